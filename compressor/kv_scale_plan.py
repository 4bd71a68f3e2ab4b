"""The scales of an FP8 KV cache that a release brings: a number a layer for K and one for V, under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.source_tensor import SourceFormat, SourceTensor
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.recipe import KeepFormat, Recipe
from memopt.compressor.tensor_plan import Fate, OutputTensor, TensorPlan
from memopt.errors import RecipeError

SCALE_DTYPE = "F32"
SCALE_SHAPE = (1,)
_ATTENTION = re.compile(r"(.*\.layers\.\d+\.self_attn\.)[^.]+_proj\.weight")
_FP8_BITS = 8
_NO_PLACE = "scales of the KV cache have no place in a checkpoint without quantized weights: engines refuse the name"
# vLLM 0.32 takes strategy "tensor", float of 8 bits, symmetric and static (docs/formats.md).
KV_CACHE_SCHEME: dict[str, Any] = {
    "num_bits": _FP8_BITS,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def brings_kv_scales(recipe: Recipe) -> bool:
    """Whether a release of `recipe` has calibrated scales of the KV cache."""
    return recipe.kv_cache is not None and recipe.kv_cache.scales == "calibrated"


def with_kv_scales(plans: Sequence[TensorPlan], recipe: Recipe) -> tuple[TensorPlan, ...]:
    """The plans with scales behind the tensors of each layer, if `recipe` asks for them.

    Scales that the source brings are dropped where no weight stays quantized (vLLM 0.32 refuses their names without a
    quantization_config), unless the recipe keeps them. RecipeError for a source that brings scales of its own and a
    recipe that measures them, or for measured ones without a quantized weight beside them.
    """
    if not brings_kv_scales(recipe):
        return tuple(plans if _any_quantized(plans) else (_without_scales(plan, recipe) for plan in plans))
    for plan in plans:
        if plan.source.spec.role is Role.KV_SCALE:
            raise RecipeError(
                "the source brings scales of the KV cache",
                tensor=plan.source.spec.name,
                remedy="leave kv_cache out of the recipe: they are copied",
            )
    if not _any_quantized(plans):
        raise RecipeError(
            "calibrated scales of the KV cache need INT4 or FP8 weights beside them",
            remedy="leave kv_cache out of the recipe",
        )
    found: list[TensorPlan] = []
    for number, plan in enumerate(plans):
        found.append(plan)
        layer = plan.source.spec.layer
        is_last = number + 1 == len(plans) or plans[number + 1].source.spec.layer != layer
        if layer is not None and is_last:
            found += _scales_of(layer, plans)
    return tuple(found)


def _any_quantized(plans: Sequence[TensorPlan]) -> bool:
    return any(plan.is_int4 or plan.is_float8 for plan in plans)


def _without_scales(plan: TensorPlan, recipe: Recipe) -> TensorPlan:
    """The plan, dropped if it is a scale of the KV cache that `recipe` does not keep."""
    spec = plan.source.spec
    if spec.role is not Role.KV_SCALE or isinstance(recipe.format_of(spec), KeepFormat):
        return plan
    return TensorPlan(plan.source, Fate.DROPPED, (), reason=_NO_PLACE)


def _scales_of(layer: int, plans: Sequence[TensorPlan]) -> Iterator[TensorPlan]:
    for plan in plans:
        match = _ATTENTION.fullmatch(plan.source.spec.name)
        if plan.source.spec.layer == layer and match is not None:
            for part in ("k_scale", "v_scale"):
                is_mtp = plan.source.spec.is_mtp
                yield _planned(
                    TensorSpec(match[1] + part, SCALE_SHAPE, Role.KV_SCALE, layer=layer, is_mtp=is_mtp), plan
                )
            return


def _planned(spec: TensorSpec, beside: TensorPlan) -> TensorPlan:
    output = OutputTensor(spec.name, SCALE_DTYPE, spec.shape)
    nothing = StoredTensor(spec.name, beside.source.weight.file, SCALE_DTYPE, spec.shape, 0, 0)
    return TensorPlan(SourceTensor(spec, SourceFormat.NONE, nothing), Fate.CALIBRATED, (output,))
