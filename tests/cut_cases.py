"""Stored tensors of every format and legal shape, as plans that copy them, and random bytes for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from memopt.compressor.alignment import divides
from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.source_tensor import PACKED, SCALE, SCALE_INV, SHAPE, SourceFormat, SourceTensor
from memopt.compressor.families.roles import Role, TensorSpec, TpAxis, TpRule
from memopt.compressor.tensor_plan import Fate, OutputTensor, TensorPlan
from memopt.manifests.dtypes import tensor_size_bytes
from memopt.manifests.rank_folders import RankLayout

NAME = "model.layers.0.mlp.experts.1.down_proj.weight"
NUM_EXPERTS = 8
FORMATS = ["bf16", "vector", "fp8-block", "fp8-channel", "fp8-channel-vector", "fp8-tensor"]
FORMATS += ["int4-32", "int4-64", "int4-128", "int4-channel"]


@dataclass(frozen=True)
class CutCase:
    """A tensor and the ranks that can share it."""

    plan: TensorPlan
    layout: RankLayout


def stored(name: str, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name, "model.safetensors", dtype, shape, 0, tensor_size_bytes(dtype, shape))


def tensor_plan(
    form: str, spec: TensorSpec, block: tuple[int, int] = (128, 128), shape_dtype: str = "I64"
) -> TensorPlan:
    """`spec` stored in `form` (one of FORMATS), copied as it is."""
    rows, columns = spec.shape[0], spec.shape[-1]
    base = spec.name.removesuffix(".weight")
    if form.startswith("int4"):
        group = columns if form == "int4-channel" else int(form.partition("-")[2])
        source = SourceTensor(
            spec,
            SourceFormat.INT4_PACKED,
            stored(base + PACKED, "I32", (rows, columns // 8)),
            stored(base + SCALE, "BF16", (rows, columns // group)),
            stored(base + SHAPE, shape_dtype, (2,)),
            group_size=group,
        )
    elif form.startswith("fp8"):
        scales = {
            "fp8-block": (SourceFormat.FP8_BLOCK, (-(-rows // block[0]), -(-columns // block[1])), block),
            "fp8-channel": (SourceFormat.FP8_CHANNEL, (rows, 1), (1, columns)),
            "fp8-channel-vector": (SourceFormat.FP8_CHANNEL, (rows,), (1, columns)),
            "fp8-tensor": (SourceFormat.FP8_TENSOR, (), (rows, columns)),
        }
        kind, scale_shape, scale_block = scales[form]
        suffix = SCALE_INV if form == "fp8-block" else SCALE
        weight, scale = stored(spec.name, "F8_E4M3", spec.shape), stored(base + suffix, "F32", scale_shape)
        source = SourceTensor(spec, kind, weight, scale, block=scale_block)
    else:
        source = SourceTensor(spec, SourceFormat.PLAIN, stored(spec.name, "BF16", spec.shape))
    outputs = tuple(OutputTensor(part.name, part.dtype, part.shape) for part in source.parts)
    return TensorPlan(source, Fate.COPIED, outputs)


@st.composite
def cut_cases(draw: st.DrawFn, num_ranks: tuple[int, ...] = (1, 2, 4, 8)) -> CutCase:
    """Any format, axis and legal small shape; expert-parallel layouts too."""
    form = draw(st.sampled_from(FORMATS))
    ranks = draw(st.sampled_from(num_ranks))
    axis = draw(st.sampled_from(TpAxis if form != "vector" else [TpAxis.ROWS, TpAxis.REPLICATED]))
    unit = draw(st.sampled_from([1, 1, 3]))
    block = draw(st.sampled_from([(4, 8), (8, 16), (64, 64)]))
    grain = {"int4-32": 32, "int4-64": 64, "int4-128": 128, "int4-channel": 8}.get(form, 1)
    if form == "fp8-block" and axis is not TpAxis.REPLICATED:
        grain = block[0] if axis is TpAxis.ROWS else block[1]
    cut = draw(st.integers(1, 3)) * ranks * unit * grain
    other = draw(st.integers(1, 3)) * (grain if form.startswith("int4") else draw(st.integers(1, 5)))
    shape = (cut, other) if axis is TpAxis.ROWS else (other, cut)
    if axis is TpAxis.ROWS and form.startswith("int4"):
        shape = (draw(st.integers(1, 3)) * ranks * unit, other)
    if form == "vector":
        shape = (shape[0],)
    is_expert = draw(st.booleans())
    spec = TensorSpec(
        NAME,
        shape,
        Role.ROUTED_EXPERT,
        TpRule(axis, unit),
        expert=draw(st.integers(0, NUM_EXPERTS - 1)) if is_expert else None,
        num_experts=NUM_EXPERTS if is_expert else 0,
    )
    plan = tensor_plan(form, spec, block, draw(st.sampled_from(["I32", "I64"])))
    weights_per_scale = plan.source.group_size
    assert divides(spec, ranks, weights_per_scale=weights_per_scale, block=plan.source.block), (form, spec)
    return CutCase(plan, RankLayout(draw(st.sampled_from(["tp", "ep"])), ranks))


def random_contents(plan: TensorPlan, seed: int) -> dict[str, bytes]:
    """Bytes for every output; a weight_shape holds the logical shape."""
    generator = np.random.default_rng(seed)
    contents: dict[str, bytes] = {}
    for output in plan.outputs:
        if output.name.endswith(SHAPE):
            kind = np.int32 if output.dtype == "I32" else np.int64
            contents[output.name] = np.array(plan.source.spec.shape, kind).tobytes()
        else:
            contents[output.name] = generator.bytes(output.size_bytes)
    return contents


def as_array(raw: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.void]:
    """The bytes as an array of opaque items."""
    items: npt.NDArray[np.void] = np.frombuffer(raw, np.dtype((np.void, tensor_size_bytes(dtype, ())))).reshape(shape)
    return items
