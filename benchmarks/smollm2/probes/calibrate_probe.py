"""Rounds every routed expert of a SplitModel as a probe says, layer by layer, as the product's calibration does.

Gate and up under the Hessian of the layer's inputs, down under that of the quantized gate and up's outputs; the next
layer reads what the quantized one writes. Statistics and rounding are the product's (compressor/calibrate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.smollm2.probes.error_feedback import residual_target, target_weight
from benchmarks.smollm2.probes.group_sizes import LayerErrors, LayerGroups
from benchmarks.smollm2.probes.probe import Probe
from benchmarks.smollm2.probes.split_forward import SplitForward, hidden, mlp, product
from benchmarks.smollm2.probes.split_model import GatedWeights, SplitLayer
from memopt.compressor.calibrate.expert_rounding import RoundingOptions, round_expert
from memopt.compressor.calibrate.module_statistics import ModuleStatistics, StatisticsCollector
from memopt.compressor.recipe import GroupSize
from memopt.kernels.calibration.round_to_scale import expand_scale

# Errors that no rounding follows from are measured on one row of these.
ERROR_ROW_STRIDE = 8


@dataclass(frozen=True, slots=True)
class CalibratedExperts:
    """A layer each: routed experts as their codes and scales spell them, float32, and what they lost."""

    routed: tuple[GatedWeights, ...]
    errors: tuple[LayerErrors, ...]


class ProbeCalibration:
    """One probe's pass over `ids` int64 [N, T], N samples of T tokens."""

    def __init__(self, forward: SplitForward, ids: Tensor, probe: Probe) -> None:
        self._forward = forward
        self._probe = probe
        self._lengths = [ids.shape[1]] * ids.shape[0]
        self._x = forward.embed(ids.flatten())
        # The second stream: the same tokens through the float weights.
        self._float_x = self._x.clone() if probe.feedback.needs_float_stream else None
        self._options = RoundingOptions(num_sweeps=probe.num_sweeps)

    def run(self, groups: Sequence[LayerGroups]) -> CalibratedExperts:
        """Round all layers, one of `groups` each."""
        pairs = [self._layer(layer, sizes) for layer, sizes in zip(self._forward.model.layers, groups, strict=True)]
        routed, errors = zip(*pairs, strict=True)
        return CalibratedExperts(routed, errors)

    def _layer(self, layer: SplitLayer, groups: LayerGroups) -> tuple[GatedWeights, LayerErrors]:
        forward, feedback, source = self._forward, self._probe.feedback, layer.routed
        self._x = forward.attend(layer, self._x, self._lengths)
        z = forward.mlp_inputs(layer, self._x)
        float_z = None
        if self._float_x is not None:
            self._float_x = forward.attend(layer, self._float_x, self._lengths)
            float_z = forward.mlp_inputs(layer, self._float_x)
        gate_up = self._rounded_gate_up(torch.cat([source.gate, source.up]), z, float_z, groups.gate_up)
        gate, up = gate_up.chunk(2)
        h = hidden(GatedWeights(gate, up, source.down), z)
        float_h = None
        if feedback.local_down:
            float_h = hidden(source, z)
        elif feedback.down and float_z is not None:
            float_h = hidden(source, float_z)
        down = self._rounded_down(source.down, h, float_h, groups.down)
        rounded = GatedWeights(gate, up, down)
        self._x = self._x + mlp(layer.shared, z) + product(h, down)
        if self._float_x is not None and float_z is not None:
            self._float_x = self._float_x + mlp(layer.shared, float_z) + mlp(source, float_z)
        return rounded, self._errors(source, rounded, z, h)

    def _errors(self, source: GatedWeights, rounded: GatedWeights, z: Tensor, h: Tensor) -> LayerErrors:
        """What the layer's rounded experts get wrong; `z` are its inputs, `h` the rounded neurons' values."""
        some = slice(None, None, ERROR_ROW_STRIDE)
        energy = self._x[some].square().mean(dim=1)
        of_gate_up = product(h[some] - hidden(source, z[some]), source.down)
        of_down = product(h[some], rounded.down - source.down)
        shares = ((error.square().mean(dim=1) / energy).mean() for error in (of_gate_up, of_down))
        return LayerErrors(*(float(share) for share in shares))

    def _rounded_gate_up(self, weight: Tensor, z: Tensor, float_z: Tensor | None, group_size: GroupSize) -> Tensor:
        """All experts' gate and up at once: they share their input, and rows do not depend on each other."""
        feedback = self._probe.feedback
        statistics = self._statistics(z)
        if feedback.gate_up and float_z is not None and statistics.hessian is not None:
            weight = target_weight(weight, float_z, z, statistics.hessian[0], feedback.gate_up, feedback.ridge)
        return self._rounded(weight, statistics, group_size)

    def _rounded_down(self, weight: Tensor, h: Tensor, float_h: Tensor | None, group_size: GroupSize) -> Tensor:
        """Each expert's own columns under their own Hessian; the residual's difference is shared among all experts."""
        feedback, num_experts = self._probe.feedback, self._forward.model.config.moe.num_experts
        parts: list[Tensor] = []
        size = weight.shape[1] // num_experts
        for columns in (slice(first, first + size) for first in range(0, weight.shape[1], size)):
            rows = h[:, columns].contiguous()
            statistics = self._statistics(rows)
            target = weight[:, columns].contiguous()
            if statistics.hessian is not None:
                hessian, share, ridge = statistics.hessian[0], feedback.local_down or feedback.down, feedback.ridge
                if float_h is not None:
                    target = target_weight(target, float_h[:, columns], rows, hessian, share, ridge)
                if feedback.residual and self._float_x is not None:
                    missing = self._float_x - self._x
                    target += residual_target(missing, rows, hessian, feedback.residual / num_experts, ridge)
            parts.append(self._rounded(target, statistics, group_size))
        return torch.cat(parts, dim=1)

    def _statistics(self, rows: Tensor) -> ModuleStatistics:
        collector = StatisticsCollector(1, rows.shape[1], with_hessian=self._probe.method == "gptq")
        collector.add(rows.to(torch.bfloat16))
        return collector.finish()

    def _rounded(self, weight: Tensor, statistics: ModuleStatistics, group_size: GroupSize) -> Tensor:
        found = round_expert(weight, statistics, self._probe.form(group_size), self._options)
        return found.codes * expand_scale(found.scale, weight.shape[1])
