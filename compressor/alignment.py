"""The one alignment rule: can this tensor, in this format, be shared by N tensor- or expert-parallel ranks?"""

from __future__ import annotations

from collections.abc import Sequence

from memopt.compressor.families.roles import TensorSpec, TpAxis
from memopt.compressor.ranks.layout import EXPERT_PARALLEL, TENSOR_PARALLEL
from memopt.errors import AlignmentError
from memopt.kernels.layout import CODES_PER_WORD, INT4_GROUP_SIZES
from memopt.manifests.rank_folders import RankLayout

# Degrees that `memopt inspect` tries and that an AlignmentError offers.
COMMON_DEGREES = (1, 2, 4, 8, 16, 32, 64)
_KEY_VALUE_MODULES = frozenset({"k_proj", "v_proj"})
_KINDS = {TENSOR_PARALLEL: "tensor-parallel", EXPERT_PARALLEL: "expert-parallel"}


def divides(
    spec: TensorSpec,
    degree: int,
    *,
    weights_per_scale: int | None = None,
    block: tuple[int, int] | None = None,
) -> bool:
    """Whether `degree` ranks can each hold whole heads, whole INT4 groups and words, and whole FP8 blocks of `spec`.

    `weights_per_scale`: INT4 group in weights; one scale a row (a group as wide as the tensor) is replicated when
    columns are cut, so that it asks for whole words only. `block`: FP8 block (rows, columns).
    """
    if spec.tp.axis is TpAxis.REPLICATED or degree == 1:
        return True
    size = spec.shape[0] if spec.tp.axis is TpAxis.ROWS else spec.shape[-1]
    if weights_per_scale == spec.shape[-1]:
        weights_per_scale = CODES_PER_WORD
    if size % (degree * spec.tp.unit):
        return False
    per_rank = size // degree
    if spec.tp.axis is TpAxis.ROWS:
        return block is None or block[0] >= size or per_rank % block[0] == 0
    if weights_per_scale is not None and per_rank % max(weights_per_scale, CODES_PER_WORD):
        return False
    return block is None or block[1] >= size or per_rank % block[1] == 0


def can_cut(
    spec: TensorSpec,
    ranks: RankLayout,
    *,
    weights_per_scale: int | None = None,
    block: tuple[int, int] | None = None,
) -> bool:
    """Whether `ranks` can share `spec`; the other arguments as in `divides`.

    Expert-parallel ranks share routed experts whole, and cut every other tensor as tensor-parallel ones do.
    """
    if ranks.kind == EXPERT_PARALLEL and spec.expert is not None:
        return spec.num_experts % ranks.num_ranks == 0
    return divides(spec, ranks.num_ranks, weights_per_scale=weights_per_scale, block=block)


def cut_error(
    spec: TensorSpec,
    ranks: RankLayout,
    degrees: Sequence[int],
    *,
    is_whole_experts_legal: bool = False,
    weights_per_scale: int | None = None,
    block: tuple[int, int] | None = None,
) -> AlignmentError:
    """The refusal of a tensor that `can_cut` says no to: names tensor, dimension, degree, group and legal choices.

    `degrees`: of the same kind of ranks, those that all tensors allow as they are. `is_whole_experts_legal`: whether
    all allow as many expert-parallel ranks.
    """
    degree = ranks.num_ranks
    choices = [f"{_KINDS[ranks.kind]} {', '.join(map(str, degrees))}"] if degrees else []
    if ranks.kind == EXPERT_PARALLEL and spec.expert is not None:
        fault = f"{spec.num_experts} experts / {degree} ranks = {spec.num_experts / degree:g}: an expert is never cut"
        return AlignmentError(fault, tensor=spec.name, remedy=_legal(choices))
    size = spec.shape[0] if spec.tp.axis is TpAxis.ROWS else spec.shape[-1]
    form = ""
    if weights_per_scale == spec.shape[-1] and spec.tp.axis is TpAxis.COLUMNS:
        form = f" in whole words of {CODES_PER_WORD} INT4 codes"
    elif weights_per_scale is not None and spec.tp.axis is TpAxis.COLUMNS:
        form = f" in whole INT4 groups of {weights_per_scale}"
        choices = [f"{choice} with group {weights_per_scale}" for choice in choices]
        choices += _other_groups(spec, ranks, weights_per_scale)
    elif block is not None:
        form = f" in whole FP8 blocks of {block[0]}x{block[1]}"
    elif spec.tp.unit > 1:
        form = f" in whole heads of {spec.tp.unit}"
        if spec.tp.axis is TpAxis.ROWS and size // spec.tp.unit < degree:
            # vLLM and SGLang then hold a copy of a key/value head on several ranks; memopt cuts, it never repeats.
            is_repeated = not _KEY_VALUE_MODULES.isdisjoint(spec.name.split("."))
            repeats = "; engines repeat key/value heads over ranks, memopt does not" if is_repeated else ""
            form += f" ({size // spec.tp.unit} in all{repeats})"
    if spec.expert is not None and is_whole_experts_legal:
        choices.append(f"or {_KINDS[EXPERT_PARALLEL]} {degree}")
    return AlignmentError(
        f"{size} {spec.tp.axis} / {degree} ranks = {size / degree:g}: cannot be cut{form}",
        tensor=spec.name,
        remedy=_legal(choices),
    )


def _legal(choices: Sequence[str]) -> str:
    return f"legal: {'; '.join(choices)}" if choices else "leave the hub files uncut"


def _other_groups(spec: TensorSpec, ranks: RankLayout, weights_per_scale: int) -> list[str]:
    """The INT4 groups that so many ranks can share, or the next smaller degree that has some, if that is news."""
    fewer_degrees = {n for n in COMMON_DEGREES if n < ranks.num_ranks}
    for fewer in sorted(fewer_degrees | {ranks.num_ranks}, reverse=True):
        groups = [group for group in INT4_GROUP_SIZES if divides(spec, fewer, weights_per_scale=group)]
        if groups:
            is_news = groups != [weights_per_scale]
            return [f"{_KINDS[ranks.kind]} {fewer} with group {' or '.join(map(str, groups))}"] if is_news else []
    return []
