"""Inputs and comparisons that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from memopt.kernels.int4_spec import Int4Rows, Int4Spec

SEARCHES = ("absmax", "mse", "mse-signed")
NORMS = ("2", "2.4")
GROUPS = (32, 64, 128, None)


@dataclass(frozen=True)
class Source:
    """FP8 rows uint8 [R, C] with float32 scales, or BF16 rows uint16 [R, C] without."""

    weight: npt.NDArray[Any]
    scale: npt.NDArray[np.float32] | None
    block: tuple[int, int] | None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, int] | None]:
        """The same as torch tensors, BF16 bits as int16."""
        weight = self.weight.view(np.int16) if self.weight.dtype == np.uint16 else self.weight
        return torch.from_numpy(weight), None if self.scale is None else torch.from_numpy(self.scale), self.block


def as_bytes(rows: Int4Rows) -> dict[str, bytes]:
    """Each result's bytes, whichever library made it."""
    arrays = {field.name: getattr(rows, field.name) for field in fields(rows)}
    # A view as bytes refuses a tensor that is not laid out row by row.
    return {
        name: (a.view(torch.uint8).numpy() if isinstance(a, torch.Tensor) else a).tobytes()
        for name, a in arrays.items()
    }


def random_source(rows: int, columns: int, block: tuple[int, int], seed: int, spread: float = 1.0) -> Source:
    """Finite FP8 rows, every pattern equally likely, under log-normal scales of both signs."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    scale = np.exp(spread * rng.normal(size=shape)) * rng.choice([-1.0, 1.0], shape)
    return Source(weight, scale.astype(np.float32), block)


def gaussian_source(rows: int, columns: int, seed: int) -> Source:
    """Gaussian weights as block FP8 128 x 128, as checkpoints store them."""
    rng = np.random.default_rng(seed)
    blocks = torch.from_numpy(rng.normal(size=(rows // 128, 128, columns // 128, 128)).astype(np.float32))
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return Source(codes.view(torch.uint8).numpy(), scale.numpy(), (128, 128))


SCALES = st.one_of(
    st.floats(width=32, min_value=2.0**-20, max_value=4.0),
    st.floats(width=32),
    st.sampled_from([0.0, -1.0, 2.0**-126, 2.0**-140, -(2.0**-149), 1e30, -3e38, 0.015625]),
)


@st.composite
def sources(draw: st.DrawFn, group: int | None) -> Source:
    """FP8 or BF16 rows with any bytes under any scales, of a legal shape for `group`."""
    unit = group or 8
    rows = draw(st.integers(1, 5))
    columns = unit * draw(st.integers(1, max(1, 320 // unit)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if draw(st.integers(0, 3)) == 0:
        weight = rng.integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
        if draw(st.booleans()):
            weight &= 0xBFFF  # magnitudes below 2: finite
        return Source(weight, None, None)
    weight = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    if draw(st.integers(0, 3)):
        weight[(weight & 0x7F) == 0x7F] = draw(st.integers(0, 0x7E))
    weight &= np.uint8(draw(st.sampled_from([0xFF, 0xFF, 0x87, 0xF0, 0x80])))
    block = draw(st.sampled_from([(128, 128), (2, 128), (1, columns), (rows, columns), (2, 64), (3, 40)]))
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    finite = draw(st.integers(0, 3)) > 0
    values = draw(st.lists(SCALES, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    scale = np.array(values, np.float32).reshape(shape)
    if finite:
        scale = np.where(np.abs(scale) < np.float32(1e35), scale, np.float32(0.5)).astype(np.float32)
    return Source(weight, scale, block)


def specs(group: int | None) -> st.SearchStrategy[Int4Spec]:
    """Every search and norm with one group size."""
    return st.builds(Int4Spec, st.just(group), st.sampled_from(SEARCHES), st.sampled_from(NORMS))
