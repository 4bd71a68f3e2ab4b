"""What calibration runs on: the data file, how much of it, and what the release's bytes follow from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from memopt.errors import DataFileError, UsageError
from memopt.manifests.open_file import open_regular

DEFAULT_NUM_SAMPLES = 512
DEFAULT_SAMPLE_TOKENS = 2_048
DEFAULT_MEMORY_BYTES = 8 * 2**30
DEFAULT_BATCH_TOKENS = 8_192
# Counts and sizes are added and compared as integers of 64 bits, a sign among them.
MAX_NUMBER = 2**62
# Tokens below which an expert gets tokens of others. Of GLM-5.2's 256 experts with top-8, one that is chosen evenly has
# as many of 8,192 tokens.
DEFAULT_COVERAGE_TOKENS = 256
# An expert with fewer than this share of `coverage_tokens`, forced ones included, is rounded without data.
MIN_COVERAGE_SHARE = 0.25

ComputeType = Literal["float32", "bfloat16"]
CalibrationDevice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class CalibrationIdentity:
    """All that a release's bytes follow from besides recipe and source; the text itself is in it by its digest alone.

    `sha256` (hex) and `size_bytes` of the data file. `num_samples` windows of `sample_tokens`. `compute`: the type of
    activations. `coverage_tokens`: see docs/calibration.md. `batch_tokens`: 0 for float32, whose bytes do not depend on
    it.
    """

    sha256: str
    size_bytes: int
    num_samples: int
    sample_tokens: int
    compute: ComputeType
    coverage_tokens: int
    batch_tokens: int

    def table(self) -> dict[str, Any]:
        """What release.json says of it."""
        return {
            "data_sha256": self.sha256,
            "data_size_bytes": self.size_bytes,
            "samples": self.num_samples,
            "tokens": self.num_samples * self.sample_tokens,
            "activations": self.compute,
            "coverage_tokens": self.coverage_tokens,
        }


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """`data`: text.jsonl or ids.safetensors (evaluate/calibration_data.py says what is read of them).

    `memory_bytes`: for Hessians and the work on them. `batch_tokens`: tokens that run through a layer together.
    """

    data: Path
    num_samples: int = DEFAULT_NUM_SAMPLES
    sample_tokens: int = DEFAULT_SAMPLE_TOKENS
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    coverage_tokens: int = DEFAULT_COVERAGE_TOKENS
    device: CalibrationDevice = "auto"

    def __post_init__(self) -> None:
        # A path may be given as text, as the folders of memopt.compress.
        object.__setattr__(self, "data", Path(self.data))

    @property
    def chosen_device(self) -> Literal["cpu", "cuda"]:
        """`device`, "auto" decided: CUDA where there is one. UsageError for CUDA where there is none."""
        if self.device not in get_args(CalibrationDevice):
            raise UsageError(f"calibration device {self.device!r}", remedy="use auto, cpu or cuda")
        if self.device == "cpu":
            return self.device
        import torch

        has_cuda = torch.cuda.is_available()
        if self.device == "cuda" and not has_cuda:
            raise UsageError("there is no CUDA device to calibrate on", remedy="use --calibration-device cpu")
        return "cuda" if has_cuda else "cpu"

    def identity(self) -> CalibrationIdentity:
        """What the bytes follow from; reads the data file.

        UsageError for numbers below 1 or beyond MAX_NUMBER and for a GPU that is not there; DataFileError for a file of
        another kind, or larger than is read; else as `open_regular`.
        """
        numbers = {
            "samples": self.num_samples,
            "seq-len": self.sample_tokens,
            "calibration memory": self.memory_bytes,
            "batch tokens": self.batch_tokens,
            "coverage tokens": self.coverage_tokens,
        }
        for name, number in numbers.items():
            if number < 1:
                raise UsageError(f"{name} is {number}", remedy="use 1 or more")
            if number > MAX_NUMBER:
                raise UsageError(f"{name} is more than {MAX_NUMBER:,}", remedy="use a smaller number")
        from memopt.compressor.evaluate.calibration_data import data_size_limit

        size_limit = data_size_limit(self.data)
        with open_regular(self.data) as (descriptor, status), open(descriptor, "rb", closefd=False) as stream:
            if status.st_size > size_limit:
                # Before hours of hashing, not after.
                raise DataFileError(
                    f"{status.st_size:,} bytes, at most {size_limit:,} are read", file=self.data.name, remedy="cut it"
                )
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        compute: ComputeType = "float32" if self.chosen_device == "cpu" else "bfloat16"
        return CalibrationIdentity(
            digest,
            status.st_size,
            self.num_samples,
            self.sample_tokens,
            compute,
            self.coverage_tokens,
            0 if compute == "float32" else self.batch_tokens,
        )
