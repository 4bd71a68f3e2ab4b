"""What the wrappers of kernels demand of tensors; every error names the argument and both shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.errors import ShapeError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch

# "cuda" is AMD's GPUs as well.
DEVICE_TYPES = ("cpu", "cuda")


def require_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    like: torch.Tensor | None = None,
    contiguous: bool = True,
) -> None:
    """ShapeError unless `tensor` has `shape` (None: any size), one of `dtypes`, and is contiguous if asked.

    `like`: a tensor on whose device it must be. UnsupportedError for a device without kernels, UsageError for a tensor
    that wants a gradient: no kernel passes one back.
    """
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    fits = tensor.ndim == len(shape) and all(
        size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"{name} is {list(tensor.shape)}, but [{wanted}] is needed")
    if dtypes and tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ShapeError(f"{name} [{wanted}] is {str(tensor.dtype).removeprefix('torch.')}, but {names} is needed")
    if contiguous and not tensor.is_contiguous():
        raise ShapeError(
            f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, but must be contiguous",
            remedy="call .contiguous() first",
        )
    if like is not None and tensor.device != like.device:
        raise ShapeError(f"{name} is on {tensor.device}, the other tensors are on {like.device}")
    if tensor.device.type not in DEVICE_TYPES:
        raise UnsupportedError(
            f"{name} {list(tensor.shape)} is on {tensor.device}, but kernels run on {' and '.join(DEVICE_TYPES)}",
            remedy="move the tensors to one of these",
        )
    if tensor.requires_grad:
        raise UsageError(
            f"{name} {list(tensor.shape)} requires a gradient, but kernels pass none back",
            remedy="call .detach() first",
        )
