"""Weights on one GPU: the true bytes of a rank, replicated tensors and all, by role."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from math import prod

from memopt.compressor.capacity.model_shape import LatentAttention, ModelShape
from memopt.compressor.families.roles import Role, TpAxis
from memopt.compressor.ranks.cut import cuts_of, owner_of, rank_size_bytes
from memopt.compressor.tensor_plan import TensorPlan
from memopt.kernels.layout import BF16_BITS, BITS_PER_BYTE
from memopt.manifests.rank_folders import RankLayout


@dataclass(frozen=True)
class RoleWeights:
    """The tensors of one role, of main or MTP layers. `size_bytes`: in the checkpoint; `rank_size_bytes`: on one rank.

    `rank_elements`: elements on a rank that a token is multiplied by, two FLOPs each; `is_float8`: they are FP8.
    `is_lookup`: an embedding, of which a step reads a row a token and computes nothing, unless it is the head too.
    """

    role: Role
    is_mtp: bool
    is_float8: bool
    is_lookup: bool
    size_bytes: int
    rank_size_bytes: int
    rank_elements: int


@dataclass(frozen=True)
class RankWeights:
    """What a rank loads. `absorbed_bytes`: of the BF16 copies of W_UK and W_UV, in main and MTP layers."""

    num_ranks: int
    rows: tuple[RoleWeights, ...]
    absorbed_bytes: int
    absorbed_mtp_bytes: int

    def kept(self, *, is_mtp_on: bool) -> tuple[RoleWeights, ...]:
        """The rows that are loaded."""
        return tuple(row for row in self.rows if is_mtp_on or not row.is_mtp)

    def size_bytes(self, *, is_mtp_on: bool) -> int:
        """Bytes of the tensors on one rank, without copies."""
        return sum(row.rank_size_bytes for row in self.kept(is_mtp_on=is_mtp_on))

    def checkpoint_size_bytes(self, *, is_mtp_on: bool) -> int:
        """Bytes of the same tensors, uncut."""
        return sum(row.size_bytes for row in self.kept(is_mtp_on=is_mtp_on))

    def absorbed_size_bytes(self, *, is_mtp_on: bool) -> int:
        """Bytes of the copies of W_UK and W_UV on one rank."""
        return self.absorbed_bytes + (self.absorbed_mtp_bytes if is_mtp_on else 0)


def _is_lookup(tensor: TensorPlan) -> bool:
    # An MTP layer's own embedding has the role of its head.
    return tensor.source.spec.role in {Role.EMBEDDING, Role.MTP_HEAD} and not tensor.source.spec.is_linear


def _is_on_rank_0(tensor: TensorPlan, layout: RankLayout) -> bool:
    return owner_of(tensor.source.spec, layout) in {None, 0}


def _rank_elements(tensor: TensorPlan, layout: RankLayout) -> int:
    """Elements of a weight that rank 0 multiplies by: of Linear modules, and of embeddings, which may be the head."""
    spec = tensor.source.spec
    if not (spec.is_linear or _is_lookup(tensor)) or not _is_on_rank_0(tensor, layout):
        return 0
    is_cut = owner_of(spec, layout) is None and spec.tp.axis is not TpAxis.REPLICATED
    return prod(spec.shape) // (layout.num_ranks if is_cut else 1)


def _role_weights(tensor: TensorPlan, layout: RankLayout) -> RoleWeights:
    spec = tensor.source.spec
    cuts = zip(tensor.outputs, cuts_of(tensor, layout), strict=True)
    return RoleWeights(
        role=spec.role,
        is_mtp=spec.is_mtp,
        is_float8=tensor.is_float8,
        is_lookup=_is_lookup(tensor),
        size_bytes=sum(output.size_bytes for output in tensor.outputs),
        rank_size_bytes=sum(rank_size_bytes(output, cut, 0) for output, cut in cuts),
        rank_elements=_rank_elements(tensor, layout),
    )


def _likeness(tensor: TensorPlan, layout: RankLayout) -> Hashable:
    """What `_role_weights` depends on: experts of a layer, and most layers, are alike."""
    spec = tensor.source.spec
    outputs = tuple((output.name.rpartition(".")[2], output.dtype, output.shape) for output in tensor.outputs)
    return (spec.role, spec.is_mtp, spec.is_linear, spec.tp.axis, spec.shape, tensor.is_float8, outputs,
            owner_of(spec, layout) is None, _is_on_rank_0(tensor, layout))  # fmt: skip


def _absorbed_layer_bytes(shape: ModelShape, num_ranks: int) -> int:
    attention = shape.attention
    if not isinstance(attention, LatentAttention):
        return 0
    rows = attention.num_heads // num_ranks * (attention.nope + attention.value)
    return rows * attention.latent * BF16_BITS // BITS_PER_BYTE


def rank_weights(tensors: Iterable[TensorPlan], shape: ModelShape, layout: RankLayout) -> RankWeights:
    """The bytes of one rank of `layout`: those of its rank files' tensors, headers not counted.

    Every rank holds as many: slices are equal, and so are the experts of an expert-parallel rank. `tensors` must divide
    (compressor/alignment.py), else AlignmentError. Absorbed copies: engines keep W_UK and W_UV of kv_b_proj in BF16, by
    head, for attention on latents (SGLang w_kc, w_vc; vLLM model_executor/layers/attention/mla_attention.py, where they
    are views of a kv_b_proj that is BF16 itself).
    """
    alike: dict[Hashable, list[TensorPlan]] = {}
    for tensor in tensors:
        if tensor.outputs:
            alike.setdefault(_likeness(tensor, layout), []).append(tensor)
    rows: dict[tuple[Role, bool, bool, bool], RoleWeights] = {}
    for group in alike.values():
        row, number = _role_weights(group[0], layout), len(group)
        key = (row.role, row.is_mtp, row.is_float8, row.is_lookup)
        before = rows.get(key)
        rows[key] = replace(
            row,
            size_bytes=(before.size_bytes if before else 0) + number * row.size_bytes,
            rank_size_bytes=(before.rank_size_bytes if before else 0) + number * row.rank_size_bytes,
            rank_elements=(before.rank_elements if before else 0) + number * row.rank_elements,
        )
    a_layer = _absorbed_layer_bytes(shape, layout.num_ranks)
    return RankWeights(
        num_ranks=layout.num_ranks,
        rows=tuple(rows.values()),
        absorbed_bytes=shape.num_layers * a_layer,
        absorbed_mtp_bytes=shape.num_mtp_layers * a_layer,
    )
