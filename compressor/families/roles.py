"""What a tensor is for, and how tensor parallelism cuts it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a tensor is for; recipes give formats to roles."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION = "attention"
    ATTENTION_BIAS = "attention_bias"
    KV_B = "kv_b"
    INDEXER = "indexer"
    INDEXER_WEIGHTS = "indexer_weights"
    DENSE_MLP = "dense_mlp"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERT = "routed_expert"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    MTP_PROJECTION = "mtp_projection"
    MTP_HEAD = "mtp_head"
    VISION = "vision"
    BUFFER = "buffer"
    KV_SCALE = "kv_scale"


class TpAxis(StrEnum):
    """Which dimension of a weight [out, in] tensor parallelism cuts."""

    ROWS = "rows"
    COLUMNS = "columns"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class TpRule:
    """How a tensor is cut over ranks: along `axis`, in whole pieces of `unit` rows or columns (a head, or 1)."""

    axis: TpAxis
    unit: int = 1


REPLICATED = TpRule(TpAxis.REPLICATED)
BY_ROWS = TpRule(TpAxis.ROWS)
BY_COLUMNS = TpRule(TpAxis.COLUMNS)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a family expects, in logical form: a quantized weight counts as one tensor.

    `name`: the logical name, ending in ".weight", ".bias" or the like. `shape`: elements. `layer`: None outside layers.
    `is_linear`: an engine's Linear module (may be quantized, must be in `ignore` when it is not).
    `is_published_quantized`: whether the published FP8 (or INT4) checkpoint of the family stores it quantized.
    `is_required`: False for tensors that some releases of the family lack.
    `expert`: the routed expert that it belongs to, of `num_experts` in its layer; None for every other tensor.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    tp: TpRule = REPLICATED
    layer: int | None = None
    is_mtp: bool = False
    is_linear: bool = False
    is_published_quantized: bool = False
    is_required: bool = True
    expert: int | None = None
    num_experts: int = 0

    @property
    def module(self) -> str:
        """The module's name: the tensor's name without its last part."""
        return self.name.rpartition(".")[0]
