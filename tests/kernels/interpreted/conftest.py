"""The files interpreted_*.py run kernels in Triton's interpreter, each in a process that test_interpreted.py starts."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.device.triton_math import IS_INTERPRETED


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> None:
    if not IS_INTERPRETED:
        pytest.fail("TRITON_INTERPRET=1 must be set before these tests start")
    torch.set_num_threads(1)
