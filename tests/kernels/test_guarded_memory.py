"""A read past a guarded tensor ends the process; the tensor itself is whole."""

from __future__ import annotations

import sys

import pytest
import torch
from child_process import run_child
from guarded_memory import guarded

READ = """
import ctypes, sys
sys.path.insert(0, {folder!r})
import torch
from guarded_memory import guarded
tensor = guarded(torch.zeros(3))
ctypes.string_at(tensor.data_ptr(), tensor.nbytes + {more})
print("read")
"""


@pytest.mark.parametrize("tensor", [torch.randn(3, 5), torch.arange(7, dtype=torch.uint8), torch.zeros(2048)])
def test_it_is_a_copy(tensor: torch.Tensor) -> None:
    copy = guarded(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()
    assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(("more", "ended"), [(0, "exit code 0"), (1, "killed by SIGSEGV")])
def test_one_byte_past_its_end_is_fatal(more: int, ended: str) -> None:
    folder = next(path for path in sys.path if path.endswith("tests/kernels"))
    assert run_child(["-c", READ.format(folder=folder, more=more)], {}, 60.0).ended == ended
