"""The `quantization_config` that describes a release to vLLM, SGLang and transformers (compressed-tensors schema)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from memopt.compressor.checkpoint.source_tensor import SourceFormat
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.kv_scale_plan import KV_CACHE_SCHEME
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import RecipeError
from memopt.kernels.layout import FP8_BLOCK_COLUMNS, INT4_BITS

PACK_QUANTIZED = "pack-quantized"
FLOAT_QUANTIZED = "float-quantized"
MIXED_PRECISION = "mixed-precision"
PATTERN_PREFIX = "re:"
EXPERT_PATTERN = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
_FP8_BITS = 8

# What each role's modules are called, as a pattern that no other role's modules match. Patterns are matched from the
# start of the name (re.match), and against vLLM's fused names too, hence gate_up.
_ROLE_PATTERNS: dict[Role, tuple[str, ...]] = {
    Role.LM_HEAD: (r"re:.*lm_head$",),
    Role.ATTENTION: (r"re:.*self_attn.*",),
    Role.KV_B: (r"re:.*self_attn.*",),
    Role.INDEXER: (r"re:.*self_attn.*",),
    Role.INDEXER_WEIGHTS: (r"re:.*self_attn.*",),
    Role.SHARED_EXPERT: (r"re:.*shared_experts.*",),
    Role.DENSE_MLP: (r"re:.*mlp\.(gate|up|gate_up|down)_proj$",),
    Role.ROUTER: (r"re:.*mlp\.gate$",),
    Role.MTP_PROJECTION: (r"re:.*eh_proj.*",),
    Role.MTP_HEAD: (r"re:.*shared_head.*",),
    Role.VISION: (r"re:.*vision_tower.*", r"re:.*mm_projector.*"),
    Role.ROUTED_EXPERT: (EXPERT_PATTERN,),
}
# Modules that engines make and ask about whether or not the checkpoint stores them: a tied lm_head has no tensor, and
# transformers would wait for its packed words; embeddings are ignorable although they are not Linear.
_ALWAYS_IGNORED = {Role.LM_HEAD: _ROLE_PATTERNS[Role.LM_HEAD][0], Role.EMBEDDING: r"re:.*embed_tokens.*"}


def pattern_matches(pattern: str, module: str) -> bool:
    """compressed-tensors' rule: "re:" patterns match from the start, anything else is the exact name."""
    if pattern.startswith(PATTERN_PREFIX):
        return re.match(pattern.removeprefix(PATTERN_PREFIX), module) is not None
    return pattern == module


def module_patterns(chosen: Iterable[TensorSpec], others: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Patterns that match every module of `chosen`, none of `others`: a role's pattern where safe, else names."""
    other_modules = [spec.module for spec in others]
    modules_of_role: dict[Role, list[str]] = {}
    for spec in chosen:
        modules_of_role.setdefault(spec.role, []).append(spec.module)
    is_safe: dict[str, bool] = {}
    patterns: list[str] = []
    for role, modules in modules_of_role.items():
        usable = _ROLE_PATTERNS.get(role, ())
        for pattern in usable:
            if pattern not in is_safe:
                is_safe[pattern] = not any(pattern_matches(pattern, module) for module in other_modules)
        safe = tuple(pattern for pattern in usable if is_safe[pattern])
        used = [pattern for pattern in safe if any(pattern_matches(pattern, module) for module in modules)]
        rest = [m for m in modules if not any(pattern_matches(pattern, m) for pattern in safe)]
        patterns += [entry for entry in [*used, *rest] if entry not in patterns]
    return tuple(patterns)


def _int4_arguments(group_size: int | None) -> dict[str, Any]:
    return {
        "num_bits": INT4_BITS,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        # Never "static" or "weight": vLLM then loads w2 scales unsharded under tensor parallelism (vLLM #41511).
        "actorder": None,
        "observer": "minmax",
    }


def _float8_scheme(plan: TensorPlan) -> dict[str, Any]:
    """The FP8 group in compressed-tensors' words: FP8_BLOCK's preset, or channel weights with token activations."""
    is_block = plan.source.format is SourceFormat.FP8_BLOCK
    common = {"num_bits": _FP8_BITS, "type": "float", "symmetric": True}
    strategies = {SourceFormat.FP8_BLOCK: "block", SourceFormat.FP8_CHANNEL: "channel"}
    weights: dict[str, Any] = {**common, "strategy": strategies.get(plan.source.format, "tensor"), "dynamic": False}
    activations: dict[str, Any] = {**common, "strategy": "token", "dynamic": True}
    if is_block:
        weights["block_structure"] = list(plan.source.block or ())
        activations |= {"strategy": "group", "group_size": FP8_BLOCK_COLUMNS}
    return {
        "targets": ["Linear"],
        "format": FLOAT_QUANTIZED,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def is_stale(quantization: dict[str, Any] | None, plans: tuple[TensorPlan, ...]) -> bool:
    """Whether a block stands over plain tensors alone: engines would wait for scales that do not exist."""
    return bool(quantization) and not any(plan.is_int4 or plan.is_float8 for plan in plans)


def build_quantization_config(plans: tuple[TensorPlan, ...]) -> dict[str, Any] | None:
    """The block for these plans, or None when no output is INT4 or FP8.

    One INT4 form: `targets: ["Linear"]` plus an ignore list, the form that all three engines read. INT4 beside FP8:
    the mixed form, INT4 by pattern and FP8 as "Linear". RecipeError for two INT4 or two FP8 forms in one release.
    """
    linear = [plan for plan in plans if plan.source.spec.is_linear and plan.outputs]
    int4 = [plan for plan in linear if plan.is_int4]
    float8 = [plan for plan in linear if plan.is_float8]
    if not int4 and not float8:
        return None
    if len({plan.source.format for plan in float8}) > 1:
        raise RecipeError("the release would hold two FP8 forms at once", remedy="give one of them bf16")
    plain = [plan.source.spec for plan in linear if not plan.is_int4 and not plan.is_float8]
    quantized = [plan.source.spec for plan in linear if plan.is_int4 or plan.is_float8]
    ignore = list(module_patterns(plain, quantized))
    quantized_roles = {spec.role for spec in quantized}
    always = [pattern for role, pattern in _ALWAYS_IGNORED.items() if role not in quantized_roles]
    ignore += [pattern for pattern in always if pattern not in ignore]
    groups: dict[str, Any] = {}
    if int4:
        sizes = {plan.int4_group_size for plan in int4}
        if len(sizes) > 1:
            names = ", ".join(sorted("channel" if size is None else str(size) for size in sizes))
            raise RecipeError(f"the release would hold INT4 groups {names} at once", remedy="use one group size")
        others = [plan.source.spec for plan in linear if not plan.is_int4]
        targets = list(module_patterns([plan.source.spec for plan in int4], others)) if float8 else ["Linear"]
        groups["group_0"] = {
            "targets": targets,
            **({"format": PACK_QUANTIZED} if float8 else {}),
            "weights": _int4_arguments(sizes.pop()),
            "input_activations": None,
            "output_activations": None,
        }
    if float8:
        groups[f"group_{len(groups)}"] = _float8_scheme(float8[0])
    form = MIXED_PRECISION if int4 and float8 else PACK_QUANTIZED if int4 else FLOAT_QUANTIZED
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": KV_CACHE_SCHEME if any(plan.source.spec.role is Role.KV_SCALE for plan in plans) else None,
        "quantization_status": "compressed",
    }
