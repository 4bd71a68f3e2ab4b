"""transformers in float32 as the oracle of the runtime: exact weights, ties as memopt breaks them, rounded caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from differential.reference_weights import int4_modules, read_tensors
from differential.transformers_models import load_model, loaded_weights
from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.layout import CODES_PER_WORD


def exact_model(release: Path, export: Path) -> PreTrainedModel:
    """The BF16 export in float32, eager attention; INT4 weights are code * scale, which BF16 does not always hold."""
    model = load_model(export, dequantize=False).float()
    model.set_attn_implementation("eager")
    tensors, weights = read_tensors(release), loaded_weights(model)
    for module in int4_modules(tensors):
        # transformers leaves MTP layers out.
        if f"{module}.weight" in weights:
            packed, scale = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
            group = packed.shape[1] * CODES_PER_WORD // scale.shape[1]
            weights[f"{module}.weight"].copy_(weight_values(Int4Weight(packed, scale, group)))
    return model


class RoundedCache(DynamicCache):
    """Gives back what a quantized cache would: of latents or keys, of rope or values, and of indexer keys."""

    def __init__(
        self, rounded: Callable[[Tensor], Tensor], rounded_indexer: Callable[[Tensor], Tensor], **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._rounded, self._rounded_indexer = rounded, rounded_indexer

    def update(self, key: Tensor, value: Tensor, layer: int, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(self._rounded(key), self._rounded(value), layer, *rest, **named)
        return keys, values

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        return super().update_indexer(self._rounded_indexer(key), layer)


@dataclass
class IndexerRecord:
    """Positions int32 [T, k] that each full layer chose, layer after layer; -1 for what a row does not see."""

    selections: list[Tensor] = field(default_factory=list)


@contextmanager
def lower_position_wins() -> Iterator[IndexerRecord]:
    """Of equal scores the indexer takes the lower position, as kernels/attention/top_k.py; torch.topk takes any.

    With few heads many scores are exactly 0, for the scores of a head are cut there.
    """
    record = IndexerRecord()
    topk, forward = torch.Tensor.topk, GlmMoeDsaIndexer.forward

    @dataclass
    class Chosen:
        indices: Tensor

    def stable(scores: Tensor, count: int, dim: int) -> Chosen:
        order = scores.sort(dim=dim, descending=True, stable=True)
        kept = order.indices[..., :count]
        # What is masked has a score of -inf, or near the smallest float.
        is_seen = order.values[..., :count] > torch.finfo(torch.float32).min / 2
        record.selections.append(torch.where(is_seen, kept, -1)[0].to(torch.int32))
        return Chosen(kept)

    def patched(self: GlmMoeDsaIndexer, *arguments: Any, **named: Any) -> Tensor:
        torch.Tensor.topk = stable  # type: ignore[method-assign,assignment]
        try:
            return forward(self, *arguments, **named)
        finally:
            torch.Tensor.topk = topk  # type: ignore[method-assign]

    GlmMoeDsaIndexer.forward = patched  # type: ignore[method-assign]
    try:
        yield record
    finally:
        GlmMoeDsaIndexer.forward = forward  # type: ignore[method-assign]


@torch.inference_mode()
def all_logits(model: PreTrainedModel, token_ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """float32 [T, V] of one pass over token_ids int64 [T]."""
    return model(input_ids=token_ids[None], cache=cache, use_cache=cache is not None).logits[0]
