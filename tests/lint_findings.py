"""What the engine lint says of tiny checkpoints."""

from __future__ import annotations

from typing import Any

from tiny_plans import recipe, scan, tiny

from memopt.compressor.checkpoint.checkpoint import Checkpoint
from memopt.compressor.families.registry import family_of
from memopt.compressor.lint import EngineNote, lint
from memopt.compressor.quantization_config import build_quantization_config
from memopt.compressor.recipe import Recipe
from memopt.compressor.tensor_plan import TensorPlan, plan_tensors

ENGINES = ("vllm", "sglang", "transformers")


def plans_of(checkpoint: Checkpoint, by: Recipe) -> tuple[TensorPlan, ...]:
    family = family_of(checkpoint.config)
    found = scan(checkpoint)
    assert found.problems == ()
    return plan_tensors(by, family.name, found.tensors)


def findings(name: str, *rules: dict[str, Any], hidden_size: int = 256, **fields: Any) -> list[EngineNote]:
    """What the lint says of a tiny checkpoint's output under a recipe that promises every engine."""
    plans = plans_of(tiny(name, hidden_size=hidden_size), recipe(*rules, **fields))
    return list(lint(plans, build_quantization_config(plans), ENGINES, is_config_rewritten=True))


def fired(notes: list[EngineNote] | tuple[EngineNote, ...]) -> dict[str, set[str]]:
    """Rules that are errors, and for which engines."""
    found: dict[str, set[str]] = {}
    for note in notes:
        if note.severity == "error":
            found.setdefault(note.rule, set()).add(note.engine)
    return found
