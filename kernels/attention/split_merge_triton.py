"""Merging the results of splits on a GPU, in the order of the splits, so that the same splits give the same bytes."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.decode_math_triton import LOG2_E, log_sum_exp, reciprocal
from memopt.kernels.device.current_device import on_tensors_device
from memopt.kernels.device.triton_math import to_bf16

NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_heads", "num_splits"])
def merge_kernel(partial, log_sum_exps, out, lse, num_heads, num_splits, VALUE: tl.constexpr, SPLITS: tl.constexpr):
    """One request and head a program. SPLITS: a power of two, at least `num_splits`."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = request * num_splits * num_heads + head
    split = tl.arange(0, SPLITS)
    each = tl.load(log_sum_exps + first + split * num_heads, mask=split < num_splits, other=float("-inf")) * LOG2_E
    largest = tl.max(each, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(each - largest), 0)

    element = tl.arange(0, VALUE)
    result = tl.zeros([VALUE], tl.float32)
    for s in range(num_splits):
        weight = tl.exp2(tl.load(log_sum_exps + first + s * num_heads) * LOG2_E - largest)
        value = tl.load(partial + (first + s * num_heads) * VALUE + element)
        result += tl.where(weight == 0.0, 0.0, value * weight)
    result = result * reciprocal(total)
    place = out + (request * num_heads + head) * VALUE + element
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(place, to_bf16(result))
    else:
        tl.store(place, result)
    tl.store(lse + request * num_heads + head, log_sum_exp(largest, total))


@on_tensors_device
def merge_splits(partial: Tensor, log_sum_exps: Tensor, out: AttentionOutput) -> AttentionOutput:
    """As `split_merge_reference.merge_splits`."""
    num_requests, num_splits, num_heads, value_size = partial.shape
    merge_kernel[(num_requests, num_heads)](
        partial, log_sum_exps, out.output, out.log_sum_exp, num_heads, num_splits,
        VALUE=value_size, SPLITS=triton.next_power_of_2(num_splits), num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
