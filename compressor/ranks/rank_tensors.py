"""What each rank's file of a unit holds, and where: a tensor that several ranks have lies at one place in all."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.compressor.placement import is_ragged, place_tensors
from memopt.compressor.ranks.cut import cut_of
from memopt.compressor.tensor_plan import OutputTensor, TensorPlan
from memopt.errors import AlignmentError
from memopt.manifests.rank_folders import RankLayout
from memopt.manifests.safetensors_header import DATA_ALIGNMENT_BYTES, TensorHeader


def rank_tensors(plans: Iterable[TensorPlan], layout: RankLayout) -> tuple[tuple[TensorHeader, ...], ...]:
    """The tensors of every rank's file, by rank, each by rising offset; () for a rank that holds nothing.

    What every rank holds comes first, then a rank's own experts. AlignmentError if the first part's end is not a
    multiple of 8 bytes and experts follow: the format has no padding.
    """
    common: list[OutputTensor] = []
    owned: list[list[OutputTensor]] = [[] for _ in range(layout.num_ranks)]
    for plan in plans:
        for output in plan.outputs:
            cut = cut_of(output, plan, layout)
            part = OutputTensor(output.name, output.dtype, cut.rank_shape)
            (common if cut.owner is None else owned[cut.owner]).append(part)
    first = place_tensors(common)
    end = first[-1].end if first else 0
    if end % DATA_ALIGNMENT_BYTES and any(owned):
        odd = next(output for output in common if is_ragged(output))
        raise AlignmentError(
            f"{odd.dtype} {odd.shape} has {odd.size_bytes} bytes: whole experts after it would not be aligned",
            tensor=odd.name,
            remedy="give its role bf16, or use tensor-parallel ranks",
        )
    return tuple(first + place_tensors(outputs, end) if outputs else first for outputs in owned)
