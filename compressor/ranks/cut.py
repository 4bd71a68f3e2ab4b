"""How a stored tensor is cut over ranks: on packed words and scales as they are, nothing is rounded again.

docs/formats.md, "Rank layout". alignment.py has refused by then what cannot be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memopt.compressor.checkpoint.source_tensor import SHAPE
from memopt.compressor.families.roles import TensorSpec, TpAxis
from memopt.compressor.ranks.layout import EXPERT_PARALLEL
from memopt.compressor.tensor_plan import OutputTensor, TensorPlan
from memopt.errors import AlignmentError
from memopt.manifests.dtypes import tensor_size_bytes
from memopt.manifests.rank_folders import RankLayout


class CutKind(StrEnum):
    """What of a stored tensor a rank holds.

    ROWS, COLUMNS: its slice, of equal size on every rank, in the order of ranks. REPLICATED: all of it. EXPERT: all of
    it on one rank, nothing elsewhere. SHAPE: not a slice but its shape (`weight_shape` of a slice).
    """

    ROWS = "rows"
    COLUMNS = "columns"
    REPLICATED = "replicated"
    EXPERT = "expert"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class Cut:
    """How one stored tensor is cut. `rank_shape`: what a rank that has it stores.

    `owner`: the rank that has an EXPERT, else None. `slice_shape`: for SHAPE, the weight's logical shape on a rank.
    """

    kind: CutKind
    num_ranks: int
    rank_shape: tuple[int, ...]
    owner: int | None = None
    slice_shape: tuple[int, ...] = ()

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that store it, rising."""
        return tuple(range(self.num_ranks)) if self.owner is None else (self.owner,)

    @property
    def num_digests(self) -> int:
        """How many digests say what the ranks store: one a rank, or one for all where they store the same tensor."""
        return 1 if self.kind in {CutKind.REPLICATED, CutKind.EXPERT} else self.num_ranks

    def digest_index(self, rank: int) -> int:
        """Which of the digests is that of `rank`'s bytes."""
        return 0 if self.num_digests == 1 else rank


def owner_of(spec: TensorSpec, layout: RankLayout) -> int | None:
    """The rank that has routed expert `spec.expert` whole, contiguous experts a rank; None if every rank has a part."""
    if layout.kind != EXPERT_PARALLEL or spec.expert is None:
        return None
    return spec.expert // (spec.num_experts // layout.num_ranks)


def cut_of(output: OutputTensor, plan: TensorPlan, layout: RankLayout) -> Cut:
    """How `output`, one of `plan.outputs`, is cut over the ranks of `layout`.

    Words and weights are cut along their tensor-parallel axis; a scale along the same axis in its own units (rows,
    groups, blocks), replicated where it has one entry along it. AlignmentError if a slice would not be whole.
    """
    spec, num_ranks = plan.source.spec, layout.num_ranks
    owner = owner_of(spec, layout)
    if owner is not None:
        return Cut(CutKind.EXPERT, num_ranks, output.shape, owner)
    if spec.tp.axis is TpAxis.REPLICATED:
        return Cut(CutKind.REPLICATED, num_ranks, output.shape)
    axis = 0 if spec.tp.axis is TpAxis.ROWS else len(spec.shape) - 1
    is_main = output.name == plan.outputs[0].name
    if not is_main and output.name.endswith(SHAPE):
        return Cut(CutKind.SHAPE, num_ranks, output.shape, slice_shape=_divided(spec.shape, axis, num_ranks, spec.name))
    if not is_main and (axis >= len(output.shape) or output.shape[axis] == 1):
        return Cut(CutKind.REPLICATED, num_ranks, output.shape)
    kind = CutKind.ROWS if axis == 0 else CutKind.COLUMNS
    return Cut(kind, num_ranks, _divided(output.shape, axis, num_ranks, output.name))


def cuts_of(plan: TensorPlan, layout: RankLayout) -> tuple[Cut, ...]:
    """`cut_of` for every output of `plan`, in order."""
    return tuple(cut_of(output, plan, layout) for output in plan.outputs)


def rank_size_bytes(output: OutputTensor, cut: Cut, rank: int) -> int:
    """Bytes of `output` that `rank` stores."""
    return tensor_size_bytes(output.dtype, cut.rank_shape) if rank in cut.holders else 0


def _divided(shape: tuple[int, ...], axis: int, num_ranks: int, name: str) -> tuple[int, ...]:
    share, rest = divmod(shape[axis], num_ranks)
    if rest:
        raise AlignmentError(
            f"dimension {axis} of {shape} cannot be cut over {num_ranks} ranks",
            tensor=name,
            remedy="`memopt plan --tp N` names the legal degrees",
        )
    return (*shape[:axis], share, *shape[axis + 1 :])
