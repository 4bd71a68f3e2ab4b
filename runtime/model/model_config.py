"""What a forward pass needs to know of a model, as plain figures. config.json is read by `config_file.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FamilyName = Literal["glm_moe_dsa", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe"]


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN's stretch of the rotary frequencies (arXiv 2309.00071; transformers modeling_rope_utils.py)."""

    factor: float
    original_max_tokens: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first or last `size` elements of a head.

    `is_interleaved`: pairs are (0, 1), (2, 3), ...; else (0, size / 2), (1, size / 2 + 1), ...
    """

    theta: float
    size: int
    is_interleaved: bool
    yarn: YarnConfig | None = None


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """DSA: `layers_with_indexer[i]` is True for "full" layers; a "shared" one takes the selection of the last full one.

    MTP layers, which follow the decoder's, always own one and are not in the tuple.
    """

    num_heads: int
    key_size: int
    top_k: int
    layers_with_indexer: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention; sizes in elements. `num_heads` counts all ranks'. `q_rank` None: one full q_proj."""

    num_heads: int
    q_rank: int | None
    latent_size: int
    nope_size: int
    rope_size: int
    value_size: int
    softmax_scale: float
    indexer: IndexerConfig | None = None


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """Grouped-query attention; sizes in elements. Head counts are of all ranks together."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool
    has_qk_norm: bool
    softmax_scale: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sigmoid router with a correction bias, which chooses but does not weigh (DeepSeek-V3, arXiv 2412.19437)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    num_groups: int
    groups_per_token: int
    is_renormalized: bool
    routed_scaling_factor: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A text model. `num_dense_layers` first layers have one MLP, the others experts.

    `name_prefix` stands before every tensor's name ("language_model." in Kimi K2.5). `max_tokens`: the longest sequence
    that the rotary embedding is made for. Layers are numbered through: `num_layers` of the decoder, then
    `num_mtp_layers` of multi-token prediction.
    """

    family: FamilyName
    name_prefix: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_mtp_layers: int
    num_dense_layers: int
    intermediate_size: int
    rms_norm_eps: float
    attention: MlaConfig | GqaConfig
    rope: RopeConfig
    moe: MoeConfig
    max_tokens: int
    is_embedding_tied: bool
    eos_token_ids: tuple[int, ...]

    def has_indexer(self, layer: int) -> bool:
        """Whether that layer owns a DSA indexer; MTP layers of a DSA model always do."""
        if not isinstance(self.attention, MlaConfig) or self.attention.indexer is None:
            return False
        return layer >= self.num_layers or self.attention.indexer.layers_with_indexer[layer]
