"""Makes the pools of all layers, and says what a token takes in them.

The kernels' sizes are fixed: a smaller latent, rope, indexer key or head is padded with zeros, which is exact and costs
the bytes of the kernel's size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.attention.gqa_decode import HEAD_DIMS
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import INDEXER_KEY_SIZE, MLA_LATENT_SIZE, MLA_ROPE_SIZE
from memopt.runtime.kv.kv_range import KvRange
from memopt.runtime.kv.kv_scales import UNIT_KV_SCALES, KvScales
from memopt.runtime.kv.layer_kv import GqaLayerKv, KvPools, LayerKv, MlaLayerKv
from memopt.runtime.model.model_config import GqaConfig, MlaConfig, ModelConfig


def new_kv_pools(
    config: ModelConfig,
    kv_format: KvFormat,
    num_pages: int,
    *,
    num_layers: int,
    num_kv_heads_here: int,
    scales: KvScales | None = None,
    device: torch.device | str = "cpu",
    rank: int = 0,
    kv_range: KvRange | None = None,
    first_layer: int = 0,
) -> KvPools:
    """Zeroed pools of `num_pages` pages, the dummy page among them, for layers `first_layer` to num_layers - 1.

    `num_kv_heads_here`: GQA heads of this rank, whose number `rank` says which of the scales are its own; MLA keeps one
    latent whatever it is. `scales`: for fp8_e4m3; None and layers that are not in them: 1.0. `kv_range` watches what is
    stored. Raises UnsupportedError for sizes above the kernels' or a format without this attention's form, UsageError
    for no pages, ShapeError for scales of another number of heads.
    """
    if num_pages < 1:
        raise UsageError(f"a KV cache of {num_pages} pages holds nothing", remedy="ask for at least 2 pages")
    known = scales or UNIT_KV_SCALES
    bad_slot = torch.zeros(1, dtype=torch.int32, device=device)
    layers: list[LayerKv] = []
    for layer in range(first_layer, num_layers):
        observer = kv_range.of_layer(layer) if kv_range is not None else None
        found = known.of_layer(layer)
        if isinstance(config.attention, MlaConfig):
            check_mla_sizes(config.attention)
            has_indexer = config.has_indexer(layer)
            layers.append(
                MlaLayerKv(
                    new_mla_pool(kv_format, num_pages, device),
                    found.k.to(device) if kv_format.has_layer_scale else None,
                    new_indexer_pool(num_pages, device, kv_format=kv_format) if has_indexer else None,
                    kv_format,
                    bad_slot,
                    observer,
                )
            )
        else:
            head_dim = padded_head_dim(config.attention)
            keys, values = (new_gqa_pool(kv_format, num_pages, num_kv_heads_here, head_dim, device) for _ in range(2))
            k_scale, v_scale = None, None
            if kv_format.has_layer_scale:
                v = found.k if found.v is None else found.v
                heads = slice(rank * num_kv_heads_here, (rank + 1) * num_kv_heads_here)
                k_scale, v_scale = (_head_scales(part, layer, heads, device) for part in (found.k, v))
            layers.append(GqaLayerKv(keys, values, k_scale, v_scale, kv_format, bad_slot, observer))
    return KvPools(kv_format, num_pages, tuple(layers), bad_slot)


def kv_token_bytes(config: ModelConfig, kv_format: KvFormat, *, num_layers: int, num_kv_heads_here: int) -> int:
    """Bytes of a token in all layers' pools of this rank, padding to the kernels' sizes included."""
    total = 0
    for layer in range(num_layers):
        if isinstance(config.attention, MlaConfig):
            total += kv_format.mla_token_bytes
            total += kv_format.indexer_token_bytes if config.has_indexer(layer) else 0
        else:
            total += kv_format.gqa_token_bytes(num_kv_heads_here, padded_head_dim(config.attention))
    return total


def padded_head_dim(attention: GqaConfig) -> int:
    """The head size in the pools: the kernels' smallest that holds the model's. UnsupportedError when none does."""
    for head_dim in HEAD_DIMS:
        if attention.head_dim <= head_dim:
            return head_dim
    raise UnsupportedError(
        f"heads have {attention.head_dim} elements, but the kernels hold at most {max(HEAD_DIMS)}",
        remedy="serve this model with vLLM or SGLang",
    )


def check_mla_sizes(attention: MlaConfig) -> None:
    """UnsupportedError when a latent, rope or indexer key is larger than what a page holds of a token."""
    key_size = attention.indexer.key_size if attention.indexer is not None else 0
    for name, size, largest in (
        ("the latent", attention.latent_size, MLA_LATENT_SIZE),
        ("the rope", attention.rope_size, MLA_ROPE_SIZE),
        ("an indexer key", key_size, INDEXER_KEY_SIZE),
    ):
        if size > largest:
            raise UnsupportedError(
                f"{name} has {size} elements, but a page holds {largest} of a token",
                remedy="serve this model with vLLM or SGLang",
            )


def _head_scales(scale: Tensor, layer: int, heads: slice, device: torch.device | str) -> Tensor:
    """float32 [heads of this rank] of a scale [] or [heads of all ranks]."""
    if scale.ndim == 0:
        return scale.expand(heads.stop - heads.start).contiguous().to(device)
    if heads.stop > scale.shape[0]:
        raise ShapeError(
            f"layer {layer} has KV scales of {scale.shape[0]} heads, but this rank's are {heads.start} to "
            f"{heads.stop - 1}",
            remedy="calibrate the release again",
        )
    return scale[heads].contiguous().to(device)
