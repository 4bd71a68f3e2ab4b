"""The one alignment rule: can this tensor, in this format, be shared by N tensor- or expert-parallel ranks?"""

from __future__ import annotations

from memopt.compressor.families.roles import TensorSpec, TpAxis
from memopt.compressor.ranks.layout import EXPERT_PARALLEL
from memopt.errors import AlignmentError
from memopt.kernels.layout import CODES_PER_WORD, INT4_GROUP_SIZES
from memopt.manifests.rank_folders import RankLayout

# Degrees that `memopt inspect` tries and that an AlignmentError offers.
COMMON_DEGREES = (1, 2, 4, 8, 16, 32, 64)


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


def require_cut(
    spec: TensorSpec,
    ranks: RankLayout,
    *,
    weights_per_scale: int | None = None,
    block: tuple[int, int] | None = None,
) -> None:
    """AlignmentError naming tensor, dimension, degree, group and the legal choices, unless `ranks` can share `spec`.

    Expert-parallel ranks share routed experts whole, and cut every other tensor as tensor-parallel ones do.
    """
    if ranks.kind != EXPERT_PARALLEL or spec.expert is None:
        require_divisible(spec, ranks.num_ranks, weights_per_scale=weights_per_scale, block=block)
    elif spec.num_experts % ranks.num_ranks:
        degrees = [str(n) for n in COMMON_DEGREES if spec.num_experts % n == 0]
        raise AlignmentError(
            f"{spec.num_experts} experts / {ranks.num_ranks} ranks = {spec.num_experts / ranks.num_ranks:g}: "
            "an expert is never cut",
            tensor=spec.name,
            remedy=f"legal: expert-parallel {', '.join(degrees)}",
        )


def require_divisible(
    spec: TensorSpec,
    degree: int,
    *,
    weights_per_scale: int | None = None,
    block: tuple[int, int] | None = None,
) -> None:
    """AlignmentError naming tensor, dimension, degree, group and the legal choices, unless `divides` holds."""
    if divides(spec, degree, weights_per_scale=weights_per_scale, block=block):
        return
    size = spec.shape[0] if spec.tp.axis is TpAxis.ROWS else spec.shape[-1]
    degrees = [n for n in COMMON_DEGREES if divides(spec, n, weights_per_scale=weights_per_scale, block=block)]
    choices = [f"tensor-parallel {', '.join(map(str, degrees))}"]
    form = ""
    if weights_per_scale is not None and spec.tp.axis is TpAxis.COLUMNS:
        choices.append(_group_choice(spec, degree))
        form = f" in whole INT4 groups of {weights_per_scale}"
    elif block is not None:
        form = f" in whole FP8 blocks of {block[0]}x{block[1]}"
    elif spec.tp.unit > 1:
        form = f" in whole heads of {spec.tp.unit}"
        # vLLM and SGLang then hold a copy of a key/value head on several ranks; memopt cuts, it never repeats.
        if spec.tp.axis is TpAxis.ROWS and size // spec.tp.unit < degree:
            form += f" (there are {size // spec.tp.unit}; engines repeat key/value heads over ranks, memopt does not)"
    legal = "; ".join(choice for choice in choices if choice)
    if spec.expert is not None and spec.num_experts % degree == 0:
        legal += f"; or expert-parallel {degree}"
    raise AlignmentError(
        f"{size} {spec.tp.axis} / {degree} ranks = {size / degree:g}: cannot be cut{form}",
        tensor=spec.name,
        remedy=f"legal: {legal}",
    )


def _group_choice(spec: TensorSpec, degree: int) -> str:
    """The INT4 groups that `degree` ranks can share, or the next smaller degree that has some."""
    for fewer in sorted({n for n in COMMON_DEGREES if n < degree} | {degree}, reverse=True):
        groups = ", ".join(str(group) for group in INT4_GROUP_SIZES if divides(spec, fewer, weights_per_scale=group))
        if groups:
            return f"group {groups} at {degree}" if fewer == degree else f"tensor-parallel {fewer} with group {groups}"
    return ""
