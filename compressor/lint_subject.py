"""What the engine lint looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memopt.compressor.tensor_plan import TensorPlan

Severity = Literal["error", "note"]
ALL_ENGINES = ("vllm", "sglang", "transformers")


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
    """What the lint looks at: plans of linear modules, the config block to be written, and the engines promised.

    `missing_code`: see metadata_files.py. `family`: its name.
    """

    plans: tuple[TensorPlan, ...]
    quantization: dict[str, Any] | None
    engines: tuple[str, ...]
    is_config_rewritten: bool
    missing_code: tuple[str, ...]
    family: str

    def finding(self, engines: tuple[str, ...], rule: str, message: str, module: str = "") -> Iterator[EngineNote]:
        """The finding for each of `engines`: an error where the recipe promises that engine, else a note."""
        for engine in engines:
            severity: Severity = "error" if engine in self.engines else "note"
            yield EngineNote(engine, severity, rule, message, module)
