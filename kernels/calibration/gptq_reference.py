"""GPTQ as its paper has it: one matrix, float64, column after column. It defines what `gptq_solve` computes.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv 2210.17323),
section 3.3 and algorithm 1, with fixed group scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN


def gptq_reference(
    weight: Tensor, hessian: Tensor, scale: Tensor, *, damping: float = 0.01, act_order: bool = False
) -> Tensor:
    """int8 codes [R, K] in -8..7 of `weight` [R, K] under `hessian` [K, K], with fixed scales `scale` [R, G].

    Columns whose Hessian diagonal is zero are rounded to nearest: they get the mean diagonal of the others. `damping`
    is a share of that mean, added to the whole diagonal. With `act_order` columns are solved by falling diagonal, each
    with the scale of the group it belongs to.
    """
    columns = weight.shape[1]
    matrix = hessian.to(torch.float64).clone()
    diagonal = matrix.diagonal()
    is_dead = diagonal == 0
    mean = diagonal[~is_dead].mean() if bool((~is_dead).any()) else torch.ones_like(diagonal[0])
    order = (
        torch.argsort(diagonal, descending=True, stable=True)
        if act_order
        else torch.arange(columns, device=weight.device)
    )
    diagonal[is_dead] = mean
    diagonal += damping * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    group = columns // scale.shape[1]
    scales = scale.to(torch.float64)
    left = weight.to(torch.float64)[:, order]
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for step, column in enumerate(order.tolist()):
        column_scale = scales[:, column // group]
        code = torch.round(left[:, step] / column_scale).clamp(INT4_CODE_MIN, INT4_CODE_MAX)
        codes[:, column] = code.to(torch.int8)
        error = (left[:, step] - code * column_scale) / upper[step, step]
        left[:, step + 1 :] -= torch.outer(error, upper[step, step + 1 :])
    return codes
