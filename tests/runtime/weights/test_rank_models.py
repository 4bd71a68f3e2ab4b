"""Ranks' cuts as models: logits of N ranks are those of one, tensor- and expert-parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import load
from step_cases import RowsOf, Steps
from thread_ranks import ThreadRank, run_ranks
from tiny_checkpoints import make_checkpoint
from torch import Tensor

import memopt
from memopt.kernels.kv_formats import FP32

PROMPT = list(range(3, 40))
RECIPES = {"glm-5.2-fp8": "glm-5.2-int4", "glm-4.7-fp8": "glm-4.7-int4", "kimi-k2-instruct-fp8": "kimi-k2-int4"}


def ranked_release(root: Path, name: str, options: memopt.PlanOptions) -> Path:
    make_checkpoint(root / "source", name, num_hidden_layers=3)
    memopt.compress(root / "source", root / "out", recipe=RECIPES[name], options=options, workers=1, device="cpu")
    return root / "out"


def logits(decoder: Any, num_kv_heads: int | None = None) -> Tensor:
    steps = Steps(decoder, FP32, num_kv_heads=num_kv_heads)
    parts = [steps.logits(RowsOf(0, PROMPT, 0))]
    parts += [steps.logits(RowsOf(0, [7 * p], len(PROMPT) + p, is_prompt=False)) for p in range(3)]
    return torch.cat(parts)


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_two_ranks_compute_what_one_does(name: str, kind: str, tmp_path: Path) -> None:
    degree = {"tensor_parallel": 2} if kind == "tp" else {"expert_parallel": 2}
    release = ranked_release(tmp_path, name, memopt.PlanOptions(**degree))  # type: ignore[arg-type]
    expected = logits(load(release))

    def work(rank: ThreadRank) -> tuple[Tensor, int]:
        folder = release / f"{kind}2" / f"rank-{rank.rank}"
        decoder = load(release, folder, communicator=rank, is_expert_parallel=kind == "ep")
        return logits(decoder, num_kv_heads=4), decoder.layers[2].mlp.size_bytes

    with torch.inference_mode():
        found = run_ranks(2, work)
    assert torch.equal(found[0][0], found[1][0])
    assert float((found[0][0] - expected).abs().max() / expected.abs().max()) < 1e-5
    # The expert-parallel ranks have other experts, the others half of each.
    assert found[0][1] == found[1][1] < load(release).layers[2].mlp.size_bytes
