"""Steps of a model without an engine: rows of requests with pages of their own, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from memopt.kernels.kv_formats import KvFormat
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.model_config import GqaConfig
from memopt.runtime.model.step_rows import PrefillChunk, StepRows


@dataclass(frozen=True)
class RowsOf:
    """Tokens of one request to compute: at `first_position` and following, as a prompt's chunk or as decode rows."""

    request: int
    token_ids: list[int]
    first_position: int
    is_prompt: bool = True


@dataclass
class Steps:
    """A decoder with pools in which request r holds pages 1 + r * pages to (r + 1) * pages."""

    decoder: Decoder
    kv_format: KvFormat
    num_requests: int = 1
    max_tokens: int = 512
    num_kv_heads: int | None = None  # of this rank; None: all
    pools: KvPools = field(init=False)

    def __post_init__(self) -> None:
        num_layers = len(self.decoder.layers) + len(self.decoder.mtp_layers)
        attention = self.decoder.config.attention
        all_heads = attention.num_kv_heads if isinstance(attention, GqaConfig) else 1
        self.pools = new_kv_pools(
            self.decoder.config,
            self.kv_format,
            self.num_requests * self.num_pages + 1,
            num_layers=num_layers,
            num_kv_heads_here=self.num_kv_heads or all_heads,
        )

    @property
    def num_pages(self) -> int:
        return -(-self.max_tokens // PAGE_TOKENS)

    def rows(self, *parts: RowsOf) -> StepRows:
        """Prompts must come before decode rows."""
        chunks: list[PrefillChunk] = []
        token_ids: list[int] = []
        positions: list[int] = []
        requests: list[int] = []
        for part in parts:
            count = len(part.token_ids)
            if part.is_prompt:
                chunks.append(PrefillChunk(len(token_ids), count, part.first_position))
            token_ids += part.token_ids
            positions += range(part.first_position, part.first_position + count)
            requests += [part.request] * count
        pages = 1 + torch.tensor(requests)[:, None] * self.num_pages + torch.arange(self.num_pages)
        place = torch.tensor(positions)
        page = pages.gather(1, place[:, None] // PAGE_TOKENS)[:, 0]
        return StepRows(
            token_ids=torch.tensor(token_ids),
            positions=place,
            slots=page * PAGE_TOKENS + place % PAGE_TOKENS,
            block_table=pages.to(torch.int32),
            num_tokens=(place + 1).to(torch.int32),
            chunks=tuple(chunks),
            longest=max(positions) + 1,
        )

    @torch.inference_mode()
    def hidden(self, *parts: RowsOf) -> Tensor:
        return self.decoder.forward(self.rows(*parts), self.pools)

    @torch.inference_mode()
    def logits(self, *parts: RowsOf) -> Tensor:
        """float32 of every row."""
        return self.decoder.logits(self.hidden(*parts))
