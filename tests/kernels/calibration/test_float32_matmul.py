"""The setting of torch for fast float32 products is off inside and as it was outside, whoever made it and how."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETTINGS = {
    "nothing": "pass",
    "legacy": "torch.set_float32_matmul_precision('medium')",
    "legacy-cuda": "torch.backends.cuda.matmul.allow_tf32 = True",
    "cuda": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "cpu": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "all": "torch.backends.fp32_precision = 'tf32'",
}
PROGRAM = """
import torch
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul

def settings():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision

{setting}
before = settings()
try:
    with ieee_float32_matmul():
        print(*settings())
        raise KeyError
except KeyError:
    print(settings() == before)
"""


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_inside_and_after(setting: str) -> None:
    # A process of its own: torch remembers for good that the new settings were used.
    program = PROGRAM.format(setting=setting)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["ieee", "ieee", "True"], result.stderr
