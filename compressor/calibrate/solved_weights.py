"""Rounds one module with its statistics, stores what came out, and makes the projections that the release will have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memopt.compressor.calibrate.calibrated_rounding import round_calibrated
from memopt.compressor.calibrate.expert_rounding import RoundingOptions
from memopt.compressor.calibrate.module_statistics import ModuleStatistics
from memopt.compressor.calibration_figures import CalibrationFigures
from memopt.compressor.recipe import Int4Format
from memopt.compressor.tensor_plan import OutputTensor, TensorPlan
from memopt.kernels.calibration.round_to_scale import round_to_scale, search_scale
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.int4_reference import pack_int4
from memopt.kernels.int4_spec import Int4Spec
from memopt.runtime.weights.linear_builder import int4_form
from memopt.runtime.weights.linears import Int4Linear
from memopt.runtime.weights.load_options import LoadOptions

# A tensor that will be stored, and its bytes.
StoredPart = tuple[OutputTensor, npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class SolvedWeight:
    """Of one module: `packed` int32 [R, K / 8], `scale` bfloat16 [R, G]; `figures` None for plain rounding."""

    packed: Tensor
    scale: Tensor
    form: Int4Format
    figures: CalibrationFigures | None

    @property
    def int4(self) -> Int4Weight:
        """In the kernels' words."""
        return Int4Weight(self.packed, self.scale, self.form.weights_per_scale)

    def linear(self, options: LoadOptions, bias: Tensor | None = None) -> Int4Linear:
        """The projection that the release will have."""
        return Int4Linear(int4_form(self.int4, options), bias)


def solve(
    weight: Tensor,
    statistics: ModuleStatistics,
    form: Int4Format,
    options: RoundingOptions,
    *,
    num_forced_tokens: int = 0,
    layer: ModuleStatistics | None = None,
) -> SolvedWeight:
    """Round `weight` float32 [R, K] by `form`, a calibrated one; raises as `round_calibrated`."""
    rows = round_calibrated(weight[None], statistics, form, options, layer=layer)
    report = rows.reports[0]
    figures = CalibrationFigures(
        report.num_tokens,
        num_forced_tokens,
        report.method,
        report.damping or 0.0,
        report.energy,
        report.plain_error,
        report.error,
        report.num_rows,
        report.num_plain_rows,
        "" if report.fallback is None else str(report.fallback),
    )
    return SolvedWeight(rows.packed[0], rows.scale_bits[0].view(torch.bfloat16), form, figures)


def round_plainly(weight: Tensor, form: Int4Format) -> SolvedWeight:
    """Round `weight` float32 [R, K] without data, to the codes that the release's own rounding gives."""
    scale = search_scale(weight, Int4Spec(form.weights_per_scale, form.scale, form.norm))
    return SolvedWeight(pack_int4(round_to_scale(weight, scale)), scale, form, None)


def stored_parts(solved: SolvedWeight, weights: Sequence[TensorPlan]) -> list[StoredPart]:
    """The stored tensors of `weights`, whose rows lie below each other in `solved`: packed words and scales."""
    found: list[StoredPart] = []
    first = 0
    for plan in weights:
        rows = slice(first, first + plan.source.spec.shape[0])
        for output, tensor in zip(plan.outputs, (solved.packed, solved.scale), strict=False):
            found.append((output, tensor[rows].cpu().contiguous().view(torch.uint8).numpy().reshape(-1)))
        first = rows.stop
    return found


def loaded(
    parts: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]], weights: Sequence[TensorPlan]
) -> tuple[Tensor, Tensor]:
    """`packed` and `scale` of a module from the stored bytes of its `weights`."""
    packed: list[Tensor] = []
    scales: list[Tensor] = []
    for (packed_bytes, scale_bytes), plan in zip(parts, weights, strict=True):
        packed.append(torch.from_numpy(packed_bytes).view(torch.int32).view(plan.outputs[0].shape))
        scales.append(torch.from_numpy(scale_bytes).view(torch.bfloat16).view(plan.outputs[1].shape))
    return torch.cat(packed), torch.cat(scales)
