"""What vLLM, SGLang and transformers will do with a planned output, told before a byte is written.

Every rule has a real failure behind it (docs/engines.md names the issue). A rule that an engine of the recipe breaks is
an error; for other engines it is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopt.compressor.lint_config import config_declares_what_is_stored, config_rules, ignore_list
from memopt.compressor.lint_modules import (
    experts_share_a_scheme,
    fused_modules,
    modules_that_stay_plain,
    moe_kernel_shapes,
)
from memopt.compressor.lint_subject import EngineNote as EngineNote
from memopt.compressor.lint_subject import LintSubject
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import LintError

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


def _scale_sign(subject: LintSubject) -> Iterator[EngineNote]:
    if any(plan.int4 is not None and plan.int4.scale == "mse-signed" for plan in subject.plans):
        yield EngineNote("vllm", "note", "signed-scales", SIGNED_SCALE_NOTE)


def _code(subject: LintSubject) -> Iterator[EngineNote]:
    for named in subject.missing_code:
        file, _, code = named.partition(" names ")
        message = f"{file}'s auto_map names {code}, which is not copied: use the engine's own class"
        yield EngineNote("transformers", "note", "auto-map", message)


def _model_class(subject: LintSubject) -> Iterator[EngineNote]:
    message = TRANSFORMERS_MODEL_NOTES.get(subject.family)
    if message is not None:
        yield EngineNote("transformers", "note", "model-class", message)


def _mtp(subject: LintSubject) -> Iterator[EngineNote]:
    if any(plan.source.spec.is_mtp for plan in subject.plans):
        yield EngineNote("transformers", "note", "mtp", "MTP layers are skipped on load; vLLM and SGLang use them")


_RULES = (
    fused_modules,
    experts_share_a_scheme,
    modules_that_stay_plain,
    moe_kernel_shapes,
    config_declares_what_is_stored,
    ignore_list,
    config_rules,
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
    missing_code: tuple[str, ...] = (),
    family: str = "",
) -> tuple[EngineNote, ...]:
    """Every finding, errors first. `quantization`: the block that config.json will hold.

    `missing_code`: see metadata_files.py. `family`: its name.
    """
    linear = tuple(plan for plan in plans if plan.source.spec.is_linear and plan.outputs)
    subject = LintSubject(linear, quantization, engines, is_config_rewritten, missing_code, family)
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
