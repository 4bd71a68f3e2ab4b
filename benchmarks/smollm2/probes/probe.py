"""What a probe varies, and the probes that there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt.compressor.recipe import DEFAULT_DAMPING, GroupSize, Int4Format
from memopt.kernels.layout import BF16_BITS, INT4_BITS

CalibrationText = Literal["mixed", "english", "code"]
# Of the shared mean diagonal, added where targets are fitted.
DEFAULT_RIDGE = 0.01


@dataclass(frozen=True, slots=True)
class Feedback:
    """Shares, 0 to 1, of what targets take over from a second stream that runs through the float weights.

    `gate_up`, `down`: the target W' is the regression of the float stream's output W x_float on the quantized stream's
    input x. `local_down`: the same for down alone, with the float gate and up on the quantized stream's rows, which
    needs no second stream. `residual`: down's targets also answer for an expert's part of what the residual rows of
    both streams differ by. `ridge`: share of the mean diagonal in every regression.
    """

    gate_up: float = 0.0
    down: float = 0.0
    local_down: float = 0.0
    residual: float = 0.0
    ridge: float = DEFAULT_RIDGE

    @property
    def needs_float_stream(self) -> bool:
        """Whether every row must run through both models."""
        return bool(self.gate_up or self.down or self.residual)


@dataclass(frozen=True, slots=True)
class Probe:
    """A way to round the routed experts; the defaults are the product's, with as many samples as the quality table.

    `mixed_bits`: bits a weight that group sizes chosen for each layer and role must keep to; None: the two given.
    """

    name: str
    method: Literal["weighted", "gptq"] = "gptq"
    gate_up_group: GroupSize = 32
    down_group: GroupSize = 32
    mixed_bits: float | None = None
    num_samples: int = 32
    text: CalibrationText = "mixed"
    damping: float = DEFAULT_DAMPING
    num_sweeps: int = 3
    feedback: Feedback = Feedback()

    def form(self, group_size: GroupSize) -> Int4Format:
        """The format of a rule with this method and `group_size`."""
        table = {"type": "int4", "method": self.method, "group_size": group_size, "damping": self.damping}
        return Int4Format.model_validate(table)


def bits_per_weight(group_size: int) -> float:
    """INT4 codes and a BF16 scale for every `group_size` weights."""
    return INT4_BITS + BF16_BITS / group_size


BASE = "gptq-g32"
# Their errors by layer and role are what group sizes are chosen by.
UNIFORM = ("gptq-g32", "gptq-g64", "gptq-g128")

PROBES: tuple[Probe, ...] = (
    Probe(BASE),
    Probe("gptq-g64", gate_up_group=64, down_group=64),
    Probe("gptq-g128", gate_up_group=128, down_group=128),
    Probe("weighted-g32", method="weighted"),
    Probe("samples-16", num_samples=16),
    Probe("samples-64", num_samples=64),
    Probe("samples-128", num_samples=128),
    Probe("samples-256", num_samples=256),
    Probe("english-only", text="english"),
    Probe("code-only", text="code"),
    Probe("sweeps-0", num_sweeps=0),
    Probe("sweeps-1", num_sweeps=1),
    Probe("sweeps-6", num_sweeps=6),
    Probe("damping-.003", damping=0.003),
    Probe("damping-.03", damping=0.03),
    Probe("damping-.1", damping=0.1),
    Probe("feedback-local-down", feedback=Feedback(local_down=1.0)),
    Probe("feedback-down", feedback=Feedback(down=1.0)),
    Probe("feedback-down-half", feedback=Feedback(down=0.5)),
    Probe("feedback-all", feedback=Feedback(gate_up=1.0, down=1.0)),
    Probe("feedback-all-half", feedback=Feedback(gate_up=0.5, down=0.5)),
    Probe("residual", feedback=Feedback(residual=1.0)),
    Probe("residual-local-down", feedback=Feedback(local_down=1.0, residual=1.0)),
    Probe("gate-up-g64", gate_up_group=64),
    Probe("down-g64", down_group=64),
    Probe("mixed-4.25", mixed_bits=4.25),
    Probe("mixed-4.333", mixed_bits=4 + 1 / 3),
)
