"""What stage 1 leaves for stage 2: checkpoints and the reference's logprobs, one folder a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

CASE_FILE = "case.json"
REFERENCE = "reference.npz"
DAMAGED = "damaged.npz"
# Of releases with scales of the KV cache: the scales by name, and what wrong ones are divided by.
SCALES_FILE = "scales.json"
WRONG_FACTOR = 64.0


@dataclass(frozen=True)
class Case:
    """`block_size`: tokens a KV page, what vLLM's CPU kernels want. `prompt_lengths`: tokens of each prompt, in order.

    Beside it: `export/` (BF16) and, for each prompt, the logprobs that the next token was given after every token of
    prompt and greedy continuation, float32 [tokens, vocabulary]: of the export, and of the export with damage.
    """

    name: str
    block_size: int
    prompt_lengths: list[int]
    sequences: list[list[int]]
    versions: dict[str, str]

    def write(self, folder: Path) -> None:
        (folder / CASE_FILE).write_text(json.dumps(asdict(self)))


def read_case(folder: Path) -> Case:
    return Case(**json.loads((folder / CASE_FILE).read_text()))


def write_logprobs(path: Path, logprobs: list[npt.NDArray[np.float32]]) -> None:
    np.savez(path, *logprobs)


def read_logprobs(path: Path) -> list[npt.NDArray[np.float32]]:
    with np.load(path) as stored:
        return [stored[f"arr_{number}"] for number in range(len(stored.files))]
