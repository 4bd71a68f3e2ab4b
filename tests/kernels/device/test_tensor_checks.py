"""What the wrappers of kernels refuse: the error names the argument, what was found and what is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.errors import MemoptError, ShapeError, UnsupportedError, UsageError
from memopt.kernels.device.tensor_checks import require_tensor


def test_what_fits_passes() -> None:
    require_tensor("x", torch.zeros(2, 3), (2, None), torch.bfloat16, torch.float32, like=torch.zeros(1))
    require_tensor("x", torch.zeros(3, 2).T, (2, 3), contiguous=False)
    require_tensor("x", torch.zeros(()), ())
    require_tensor("x", torch.zeros(0, 3), (0, 3), torch.float32)


@pytest.mark.parametrize(
    ("tensor", "kind", "words"),
    [
        (torch.zeros(2, 4), ShapeError, r"x is \[2, 4\], but \[any, 3\] is needed"),
        (torch.zeros(3), ShapeError, r"x is \[3\], but \[any, 3\] is needed"),
        (torch.zeros(2, 3, dtype=torch.float64), ShapeError, "float64, but bfloat16 or float32"),
        (torch.zeros(3, 2).T, ShapeError, r"strides \[1, 2\], but must be contiguous"),
        (torch.zeros(2, 3, device="meta"), UnsupportedError, r"x \[2, 3\] is on meta, but kernels run on cpu and cuda"),
        (torch.zeros(2, 3, requires_grad=True), UsageError, r"x \[2, 3\] requires a gradient.*\n?.*detach"),
    ],
)
def test_what_does_not_fit_is_refused(tensor: Tensor, kind: type[MemoptError], words: str) -> None:
    with pytest.raises(kind, match=words):
        require_tensor("x", tensor, (None, 3), torch.bfloat16, torch.float32)


def test_tensors_of_one_call_are_on_one_device() -> None:
    with pytest.raises(ShapeError, match="x is on meta, the other tensors are on cpu"):
        require_tensor("x", torch.zeros(2, device="meta"), (2,), like=torch.zeros(2))
