"""The setting of torch for fast float32 products is off inside and as it was outside, whoever made it and how."""

from __future__ import annotations

import subprocess
import sys

# Legacy settings first: torch remembers for good that the others were used, and refuses to read the legacy one then.
PROGRAM = """
import torch
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul

def settings():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision

def check():
    before = settings()
    try:
        with ieee_float32_matmul():
            print(*settings(), end=" ")
            raise KeyError
    except KeyError:
        print(settings() == before)

check()
torch.set_float32_matmul_precision("medium")
check()
torch.backends.cuda.matmul.allow_tf32 = True
check()
torch.backends.cuda.matmul.fp32_precision = "tf32"
check()
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
check()
torch.backends.fp32_precision = "tf32"
check()
"""


def test_inside_and_after() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["ieee ieee True"] * 6, result.stderr
