"""The lint's rules about modules: which must share a scheme, which stay plain, and which shapes have a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memopt.compressor.families.roles import Role
from memopt.compressor.lint_subject import EngineNote, LintSubject
from memopt.compressor.tensor_plan import TensorPlan
from memopt.kernels.layout import INT4_GROUP_SIZES

# vLLM packed_modules_mapping: module suffixes that one fused module loads, so that they share one scheme.
FUSED_SUFFIXES = (
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)


@dataclass(frozen=True)
class PlainModule:
    """Modules that an engine reads as plain `.weight` whatever the config says.

    `role` and `suffix` (of the module's name; empty: any) say which; `reason` what the engine does.
    """

    engine: str
    role: Role
    reason: str
    suffix: str = ""


# vLLM 0.32 and SGLang, from their sources and issues (docs/engines.md). Not here, since both read them by the config:
# indexer.wq_b, and in vLLM kv_b_proj.
NEVER_INT4 = (
    PlainModule("sglang", Role.KV_B, "MLA reads kv_b_proj.weight directly (SGLang #19106)"),
    PlainModule("vllm", Role.ROUTER, "the router is always unquantized"),
    PlainModule("sglang", Role.ROUTER, "the router is always unquantized"),
    PlainModule("vllm", Role.INDEXER, "indexer.wk is loaded into the fused BF16 wk_weights_proj", "indexer.wk"),
    PlainModule("sglang", Role.INDEXER, "indexer.wk is fused with weights_proj, which is plain", "indexer.wk"),
    PlainModule("vllm", Role.INDEXER_WEIGHTS, "indexer.weights_proj is always unquantized"),
    PlainModule("sglang", Role.INDEXER_WEIGHTS, "indexer.weights_proj is always unquantized"),
    PlainModule("vllm", Role.LM_HEAD, "lm_head is no Linear: it is read plain unless a target names it"),
    PlainModule("sglang", Role.LM_HEAD, "a quantized lm_head gives garbage"),
    PlainModule("vllm", Role.MTP_PROJECTION, "eh_proj is always unquantized"),
    PlainModule("sglang", Role.MTP_PROJECTION, "eh_proj is always unquantized"),
    PlainModule("vllm", Role.MTP_HEAD, "the MTP head is always unquantized"),
    PlainModule("sglang", Role.MTP_HEAD, "the MTP head is always unquantized"),
)
# Marlin's tile: hidden size of a WNA16 MoE layer (vllm marlin_utils.py).
MARLIN_HIDDEN_MULTIPLE = 128


def _scheme(plan: TensorPlan) -> str:
    return plan.output_format if plan.is_int4 or plan.is_float8 else "unquantized"


def fused_modules(subject: LintSubject) -> Iterator[EngineNote]:
    scheme_of = {plan.source.spec.module: _scheme(plan) for plan in subject.plans}
    for suffixes in FUSED_SUFFIXES:
        for module in [name for name in scheme_of if name.endswith(suffixes[0])]:
            prefix = module.removesuffix(suffixes[0])
            schemes = {scheme_of[prefix + suffix] for suffix in suffixes if prefix + suffix in scheme_of}
            if len(schemes) > 1:
                message = f"{', '.join(suffixes)} are fused and must share one scheme, not {sorted(schemes)}"
                yield from subject.finding(("vllm", "sglang"), "fused-all-or-none", message, module)


def experts_share_a_scheme(subject: LintSubject) -> Iterator[EngineNote]:
    by_layer: dict[int | None, set[str]] = {}
    for plan in subject.plans:
        if plan.source.spec.role is Role.ROUTED_EXPERT:
            by_layer.setdefault(plan.source.spec.layer, set()).add(_scheme(plan))
    for layer, schemes in by_layer.items():
        if len(schemes) > 1:
            message = f"experts of one layer must share one scheme, not {sorted(schemes)}; only expert 0 is looked at"
            yield from subject.finding(("vllm", "sglang"), "experts-one-scheme", message, f"layer {layer}")


def modules_that_stay_plain(subject: LintSubject) -> Iterator[EngineNote]:
    for plan in subject.plans:
        if not plan.is_int4:
            continue
        spec = plan.source.spec
        for plain in NEVER_INT4:
            if spec.role is plain.role and spec.module.endswith(plain.suffix):
                yield from subject.finding((plain.engine,), "never-int4", plain.reason, spec.module)


def moe_kernel_shapes(subject: LintSubject) -> Iterator[EngineNote]:
    for plan in subject.plans:
        spec = plan.source.spec
        if spec.role is not Role.ROUTED_EXPERT or not plan.is_int4:
            continue
        group = plan.int4_group_size
        if group is not None and group not in INT4_GROUP_SIZES:
            message = f"no WNA16 MoE kernel for group {group}: {', '.join(map(str, INT4_GROUP_SIZES))} or channel"
            yield from subject.finding(("vllm", "sglang"), "moe-group-size", message, spec.module)
            return
        if spec.module.endswith("gate_proj") and spec.shape[1] % MARLIN_HIDDEN_MULTIPLE:
            message = f"hidden size {spec.shape[1]} is not a multiple of {MARLIN_HIDDEN_MULTIPLE} (Marlin)"
            yield from subject.finding(("vllm",), "moe-hidden-size", message, spec.module)
            return
