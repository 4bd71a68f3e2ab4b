"""Rounds a module, or a stack of experts, with the statistics of its inputs: methods `weighted` and `gptq`.

Experts are rounded one at a time, each on one CPU thread or on the GPU alone, so that an expert's bytes depend neither
on which others it came with, nor on the number of ranks or threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.compressor.calibrate.expert_rounding import RoundedExpert, RoundingOptions, round_expert
from memopt.compressor.calibrate.module_statistics import ModuleStatistics
from memopt.compressor.calibrate.rounding_report import ExpertReport
from memopt.compressor.recipe import Int4Format
from memopt.errors import ShapeError, UsageError
from memopt.kernels.calibration.float32_matmul import ieee_float32_matmul
from memopt.kernels.calibration.one_thread import one_cpu_thread
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.int4_reference import pack_int4


@dataclass(frozen=True)
class CalibratedRows:
    """Of E experts with R rows, K columns and G groups a row.

    `packed`: int32 [E, R, K / 8]. `scale_bits`: int16 [E, R, G], BF16 bits of either sign, never zero. `reports`: one
    an expert.
    """

    packed: Tensor
    scale_bits: Tensor
    reports: tuple[ExpertReport, ...]


def round_calibrated(
    weight: Tensor,
    statistics: ModuleStatistics,
    form: Int4Format,
    options: RoundingOptions | None = None,
    *,
    layer: ModuleStatistics | None = None,
    num_workers: int = 1,
) -> CalibratedRows:
    """INT4 rows of `weight` by the method of `form`, none worse than plain rounding under the inputs' statistics.

    `weight` float32 [E, R, K], the source's values; weights that share their input (gate and up) lie below each other
    as rows: each row comes out as it would alone. `statistics` of the E experts' inputs, with Hessians for gptq;
    `layer`: of all the layer's tokens, for `options.shrinkage_tokens` (`shrink_statistics`). `num_workers`: experts
    rounded side by side on a CPU; the bytes do not depend on it. Working memory an expert: about 24 bytes a weight and
    50 bytes for each element of a Hessian.
    The same bytes from run to run on one kind of CPU or GPU with one set of libraries.
    Raises UsageError for a format without calibration, ShapeError, AlignmentError for what does not fit,
    NonFiniteError for a weight that is not a number, ContentError for a Hessian that is not symmetric.
    """
    options = options or RoundingOptions()
    _check(weight, statistics, form, num_workers)

    def one(expert: int) -> RoundedExpert:
        return round_expert(weight[expert], statistics.of_expert(expert), form, options, layer=layer, expert=expert)

    experts = range(weight.shape[0])
    # Settings of the process: entered here once, so that no worker puts them back while another computes.
    with ieee_float32_matmul(), nullcontext() if weight.is_cuda else one_cpu_thread():
        if num_workers == 1 or weight.is_cuda:
            return _stacked(map(one, experts))
        with ThreadPoolExecutor(num_workers) as pool:
            return _stacked(pool.map(one, experts))


def _check(weight: Tensor, statistics: ModuleStatistics, form: Int4Format, num_workers: int) -> None:
    require_tensor("weight", weight, (None, None, None), torch.float32)
    num_experts, _, num_columns = weight.shape
    if not form.is_calibrated:
        raise UsageError(f"method {form.method} takes no calibration data", remedy="use method weighted or gptq")
    if num_experts == 0:
        raise ShapeError("a stack of no experts cannot be rounded")
    if (statistics.num_experts, statistics.num_columns) != (num_experts, num_columns):
        raise ShapeError(
            f"statistics of {statistics.num_experts} experts with {statistics.num_columns} columns came for weights "
            f"{list(weight.shape)}"
        )
    require_tensor("second_moment", statistics.second_moment, (num_experts, num_columns), torch.float32, like=weight)
    if form.method == "gptq":
        if statistics.hessian is None:
            raise UsageError(
                "method gptq needs Hessians, but only second moments were collected",
                remedy="collect with_hessian, or use method weighted",
            )
        shape = (num_experts, num_columns, num_columns)
        require_tensor("hessian", statistics.hessian, shape, torch.float32, like=weight)
    if num_workers < 1:
        raise UsageError(f"num_workers is {num_workers}", remedy="use 1 or more")


def _stacked(experts: Iterable[RoundedExpert]) -> CalibratedRows:
    """Packs each expert's codes as soon as they are there."""
    packed: list[Tensor] = []
    scales: list[Tensor] = []
    reports: list[ExpertReport] = []
    for expert in experts:
        packed.append(pack_int4(expert.codes))
        scales.append(expert.scale.view(torch.int16))
        reports.append(expert.report)
    return CalibratedRows(torch.stack(packed), torch.stack(scales), tuple(reports))
