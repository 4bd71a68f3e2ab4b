"""What vLLM, SGLang and transformers will do with a planned output, told before a byte is written.

Every rule has a real failure behind it (docs/engines.md names the issue). A rule that an engine of the recipe breaks is
an error; for other engines it is a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.families.roles import Role
from memopt.compressor.quantization_config import MIXED_PRECISION, PATTERN_PREFIX
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import ConfigError, LintError
from memopt.kernels.layout import INT4_GROUP_SIZES

Severity = Literal["error", "note"]
ALL_ENGINES = ("vllm", "sglang", "transformers")
# vLLM packed_modules_mapping: module suffixes that one fused module loads, so that they share one scheme.
FUSED_SUFFIXES = (
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)
# Read as plain `.weight` whatever the config says (vLLM, SGLang #19106; LC #2512; router and MTP projection always).
NEVER_INT4 = {
    Role.KV_B: "MLA reads kv_b_proj.weight directly",
    Role.ROUTER: "the router is always unquantized",
    Role.INDEXER: "indexer.wk is loaded into a fused BF16 weight",
    Role.INDEXER_WEIGHTS: "indexer.weights_proj is always unquantized",
    Role.LM_HEAD: "a quantized lm_head gives garbage in SGLang",
    Role.MTP_PROJECTION: "eh_proj halves differ 20-30 times in scale",
    Role.MTP_HEAD: "the MTP head is always unquantized",
}
# Engines leave these out by themselves, whatever `ignore` says (docs/engines.md).
IGNORED_BY_ENGINES = {Role.ROUTER, Role.MTP_PROJECTION, Role.VISION}
# Marlin's tile: hidden size of a WNA16 MoE layer (vllm marlin_utils.py).
MARLIN_HIDDEN_MULTIPLE = 128
# Measured with transformers 5.24 (tests/differential).
TRANSFORMERS_MODEL_NOTES = {
    "kimi_k2": (
        "has no model type kimi_k2: pass config=AutoConfig.for_model(**config) with model_type deepseek_v3; "
        "DeepseekV3ForCausalLM.from_pretrained alone leaves the experts unloaded"
    ),
    "kimi_k25": "load with AutoModelForImageTextToText; AutoModelForCausalLM refuses the model type",
}
SIGNED_SCALE_NOTE = (
    "scales may be negative (mse-signed): legal W4A16, but the opt-in int8-activation Marlin path reads them as "
    "unsigned (vLLM #48905); leave it off, or use `scale: mse`"
)


@dataclass(frozen=True)
class EngineNote:
    """One finding of the lint: which engine, how bad, what it does and to which module."""

    engine: str
    severity: Severity
    rule: str
    message: str
    module: str = ""


@dataclass(frozen=True)
class LintSubject:
    """What the lint looks at: plans of linear modules, the config block to be written, and the engines promised."""

    plans: tuple[TensorPlan, ...]
    quantization: dict[str, Any] | None
    engines: tuple[str, ...]
    is_config_rewritten: bool
    names_code: bool
    family: str

    def finding(self, engines: tuple[str, ...], rule: str, message: str, module: str = "") -> Iterator[EngineNote]:
        for engine in engines:
            severity: Severity = "error" if engine in self.engines else "note"
            yield EngineNote(engine, severity, rule, message, module)


def _scheme(plan: TensorPlan) -> str:
    return plan.output_format if plan.is_int4 or plan.is_float8 else "unquantized"


def _fused_modules(subject: LintSubject) -> Iterator[EngineNote]:
    scheme_of = {plan.source.spec.module: _scheme(plan) for plan in subject.plans}
    for suffixes in FUSED_SUFFIXES:
        for module in [name for name in scheme_of if name.endswith(suffixes[0])]:
            prefix = module.removesuffix(suffixes[0])
            schemes = {scheme_of[prefix + suffix] for suffix in suffixes if prefix + suffix in scheme_of}
            if len(schemes) > 1:
                message = f"{', '.join(suffixes)} are fused and must share one scheme, not {sorted(schemes)}"
                yield from subject.finding(("vllm", "sglang"), "fused-all-or-none", message, module)


def _experts_share_a_scheme(subject: LintSubject) -> Iterator[EngineNote]:
    by_layer: dict[int | None, set[str]] = {}
    for plan in subject.plans:
        if plan.source.spec.role is Role.ROUTED_EXPERT:
            by_layer.setdefault(plan.source.spec.layer, set()).add(_scheme(plan))
    for layer, schemes in by_layer.items():
        if len(schemes) > 1:
            message = f"experts of one layer must share one scheme, not {sorted(schemes)}; only expert 0 is looked at"
            yield from subject.finding(("vllm", "sglang"), "experts-one-scheme", message, f"layer {layer}")


def _modules_that_stay_plain(subject: LintSubject) -> Iterator[EngineNote]:
    for plan in subject.plans:
        reason = NEVER_INT4.get(plan.source.spec.role)
        if reason is not None and plan.is_int4:
            yield from subject.finding(("vllm", "sglang"), "never-int4", reason, plan.source.spec.module)


def _moe_kernel_shapes(subject: LintSubject) -> Iterator[EngineNote]:
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


def _config_matches_tensors(subject: LintSubject) -> Iterator[EngineNote]:
    quantization = subject.quantization
    if quantization is None or quantization.get("quant_method") != "compressed-tensors":
        for plan in subject.plans:
            is_declared_fp8 = quantization is not None and quantization.get("quant_method") == "fp8"
            if plan.is_int4 or (plan.is_float8 and not is_declared_fp8):
                message = f"{plan.output_format} is stored but config.json does not declare it"
                yield from subject.finding(ALL_ENGINES, "undeclared-format", message, plan.source.spec.module)
                return
        return
    names, patterns = _ignore_list(quantization)
    kept: list[str] = []
    for plan in subject.plans:
        module = plan.source.spec.module
        is_quantized = plan.is_int4 or plan.is_float8
        is_ignored = module in names or any(pattern.match(module) for pattern in patterns)
        if is_quantized == is_ignored and (is_quantized or not _is_left_out(plan, subject)):
            message = "is quantized but `ignore` names it" if is_quantized else "is not quantized and `ignore` lacks it"
            if is_quantized or subject.is_config_rewritten:
                yield from subject.finding(ALL_ENGINES, "ignore-list", message, module)
            else:
                # The publisher's own block, kept byte for byte: vLLM and SGLang serve it as it is.
                kept.append(module)
    if kept:
        message = (
            f"the source's own `ignore` lacks {len(kept)} modules that are not quantized: "
            "load with CompressedTensorsConfig(dequantize=True)"
        )
        yield EngineNote("transformers", "note", "ignore-list", message, kept[0])


def _is_left_out(plan: TensorPlan, subject: LintSubject) -> bool:
    """Whether every engine leaves a module out by itself; transformers does not know Kimi's vision modules."""
    role = plan.source.spec.role
    return role in IGNORED_BY_ENGINES and (subject.is_config_rewritten or role is not Role.VISION)


def _ignore_list(quantization: dict[str, Any]) -> tuple[set[str], list[re.Pattern[str]]]:
    """Names and patterns of the block's `ignore`, which may be the source's own; ConfigError if it is no such list."""
    ignore = quantization.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise ConfigError("ignore must be a list of names", file=CONFIG_NAME)
    patterns: list[re.Pattern[str]] = []
    for entry in ignore:
        if not entry.startswith(PATTERN_PREFIX):
            continue
        try:
            patterns.append(re.compile(entry.removeprefix(PATTERN_PREFIX)))
        except (re.error, OverflowError, RecursionError) as problem:
            raise ConfigError(f"ignore: {entry!r} is not a regular expression: {problem}", file=CONFIG_NAME) from None
    return set(ignore), patterns


def _config_rules(subject: LintSubject) -> Iterator[EngineNote]:
    quantization = subject.quantization
    if quantization is None:
        return
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        actorder = weights.get("actorder") if isinstance(weights, dict) else None
        if actorder is not None:
            message = f"actorder {actorder!r} makes vLLM load w2 scales unsharded under tensor parallelism (#41511)"
            yield from subject.finding(("vllm",), "actorder-null", message, name)
    if quantization.get("format") == MIXED_PRECISION:
        message = "config groups are read with one global format: an FP8 group beside INT4 is not honoured"
        yield from subject.finding(("sglang",), "mixed-format", message)
        yield EngineNote("transformers", "note", "mixed-format", "load with CompressedTensorsConfig(dequantize=True)")


def _scale_sign(subject: LintSubject) -> Iterator[EngineNote]:
    if any(plan.int4 is not None and plan.int4.scale == "mse-signed" for plan in subject.plans):
        yield EngineNote("vllm", "note", "signed-scales", SIGNED_SCALE_NOTE)


def _code(subject: LintSubject) -> Iterator[EngineNote]:
    if subject.names_code:
        message = "config.json's auto_map names .py files that are not copied: use the engine's own model class"
        yield EngineNote("transformers", "note", "auto-map", message)


def _model_class(subject: LintSubject) -> Iterator[EngineNote]:
    message = TRANSFORMERS_MODEL_NOTES.get(subject.family)
    if message is not None:
        yield EngineNote("transformers", "note", "model-class", message)


def _mtp(subject: LintSubject) -> Iterator[EngineNote]:
    if any(plan.source.spec.is_mtp for plan in subject.plans):
        yield EngineNote("transformers", "note", "mtp", "MTP layers are skipped on load; vLLM and SGLang use them")


_RULES = (
    _fused_modules,
    _experts_share_a_scheme,
    _modules_that_stay_plain,
    _moe_kernel_shapes,
    _config_matches_tensors,
    _config_rules,
    _scale_sign,
    _code,
    _model_class,
    _mtp,
)


def lint(
    plans: tuple[TensorPlan, ...],
    quantization: dict[str, Any] | None,
    engines: tuple[str, ...],
    *,
    is_config_rewritten: bool,
    names_code: bool = False,
    family: str = "",
) -> tuple[EngineNote, ...]:
    """Every finding, errors first. `quantization`: the block that config.json will hold.

    `names_code`: whether config.json refers to Python files that the release will not have. `family`: its name.
    """
    linear = tuple(plan for plan in plans if plan.source.spec.is_linear and plan.outputs)
    subject = LintSubject(linear, quantization, engines, is_config_rewritten, names_code, family)
    notes = [note for rule in _RULES for note in rule(subject)]
    return tuple(sorted(notes, key=lambda note: note.severity != "error"))


def raise_on_error(notes: tuple[EngineNote, ...]) -> None:
    """LintError for the first finding that is an error, saying how many there are."""
    errors = [note for note in notes if note.severity == "error"]
    if errors:
        first = errors[0]
        raise LintError(
            f"{first.engine} would refuse or garble this output [{first.rule}]: {first.message}",
            tensor=first.module or None,
            remedy=f"change the recipe's rules, or its engines ({len(errors)} findings in all)",
        )
