"""The lint's rules about config.json's quantization block: does it say what is stored, and do engines take it so?"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from memopt.compressor.checkpoint.declared_quantization import COMPRESSED_TENSORS, FP8, INT4, declared_formats
from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.families.roles import Role
from memopt.compressor.lint_subject import ALL_ENGINES, EngineNote, LintSubject
from memopt.compressor.quantization_config import MIXED_PRECISION, PATTERN_PREFIX
from memopt.compressor.safe_pattern import MAX_NAME_LENGTH, compile_pattern
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import ConfigError

# Engines leave these out by themselves, whatever `ignore` says (docs/engines.md).
IGNORED_BY_ENGINES = {Role.ROUTER, Role.MTP_PROJECTION, Role.VISION}
# A published list has about ten patterns, and matching takes a second or two: these only stop a hostile one.
MAX_PATTERNS = 256
MAX_MATCHING_SECONDS = 60


def config_declares_what_is_stored(subject: LintSubject) -> Iterator[EngineNote]:
    """Both ways: no format is stored that the block lacks, and none is declared that no tensor has."""
    declared = declared_formats(subject.quantization)
    stored: dict[str, TensorPlan] = {}
    for plan in subject.plans:
        if plan.is_int4 or plan.is_float8:
            stored.setdefault(INT4 if plan.is_int4 else FP8, plan)
    for form in sorted(set(stored) - declared):
        plan = stored[form]
        message = f"{plan.output_format} is stored but config.json does not declare it"
        yield from subject.finding(ALL_ENGINES, "undeclared-format", message, plan.source.spec.module)
    for form in sorted(declared - set(stored)):
        message = f"config.json declares {form} weights but none is stored: engines wait for scales that do not exist"
        yield from subject.finding(ALL_ENGINES, "stale-format", message, CONFIG_NAME)


def ignore_list(subject: LintSubject) -> Iterator[EngineNote]:
    """Every Linear that is not quantized is in `ignore`, none that is."""
    quantization = subject.quantization
    if quantization is None or quantization.get("quant_method") != COMPRESSED_TENSORS:
        return
    ignored = _IgnoreList(quantization)
    kept: list[str] = []
    for plan in subject.plans:
        module = plan.source.spec.module
        is_quantized = plan.is_int4 or plan.is_float8
        if is_quantized == ignored.names(module) and (is_quantized or not _is_left_out(plan, subject)):
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


class _IgnoreList:
    """Names and patterns of a block's `ignore`, which may be the source's own: hostile, or no such list at all."""

    def __init__(self, quantization: dict[str, Any]) -> None:
        ignore = quantization.get("ignore") or []
        if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
            raise ConfigError("ignore must be a list of names", file=CONFIG_NAME)
        entries = [entry.removeprefix(PATTERN_PREFIX) for entry in ignore if entry.startswith(PATTERN_PREFIX)]
        if len(entries) > MAX_PATTERNS:
            raise ConfigError(
                f"ignore has {len(entries):,} patterns, at most {MAX_PATTERNS} are read", file=CONFIG_NAME
            )
        self._names = set(ignore)
        self._patterns: list[re.Pattern[str]] = []
        self._deadline = time.monotonic() + MAX_MATCHING_SECONDS
        for entry in entries:
            try:
                self._patterns.append(compile_pattern(entry))
            except ValueError as problem:
                raise ConfigError(f"ignore: {problem}", file=CONFIG_NAME) from None

    def names(self, module: str) -> bool:
        """Whether the list names `module`, by compressed-tensors' rule; ConfigError if telling takes too long."""
        if module in self._names or not self._patterns:
            return module in self._names
        if len(module) > MAX_NAME_LENGTH:
            raise ConfigError(f"a name of {len(module):,} letters is not matched with ignore", tensor=module[:80])
        if time.monotonic() > self._deadline:
            raise ConfigError(
                f"matching ignore with the modules takes more than {MAX_MATCHING_SECONDS} s",
                file=CONFIG_NAME,
                remedy="its patterns are too expensive: write the names out",
            )
        return any(pattern.match(module) for pattern in self._patterns)


def config_rules(subject: LintSubject) -> Iterator[EngineNote]:
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
