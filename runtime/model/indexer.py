"""DSA's indexer: a small attention of its own that picks the tokens which the real one reads.

Source: transformers 5.24, models/glm_moe_dsa (GlmMoeDsaIndexer).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopt.errors import ContentError, UsageError
from memopt.kernels.attention.indexer_scores import indexer_scores
from memopt.kernels.attention.prefill_indexer_scores import prefill_indexer_scores
from memopt.kernels.attention.top_k import top_k
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.kernels.kv_cache.kv_store import indexer_store
from memopt.kernels.layout import INDEXER_KEY_SIZE
from memopt.kernels.rows.layer_rows import has_row_kernels, rotate_on_cpu
from memopt.runtime.kv.layer_kv import MlaLayerKv
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.model_config import IndexerConfig
from memopt.runtime.model.norms import layer_norm
from memopt.runtime.model.rope import apply_rope
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import StepRows
from memopt.runtime.parallel.communicator import Communicator

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer, whole on every rank. `head_weights` float32 [heads, hidden].

    Rank 0 selects for all, so that ranks never differ. `checks_ranks`: every rank selects, and they are compared; set
    where activations are float32, of which all ranks have the same bits.
    """

    config: IndexerConfig
    query: Linear
    key: Linear
    key_norm: Tensor
    key_norm_bias: Tensor
    head_weights: Tensor
    rope_size: int
    communicator: Communicator
    checks_ranks: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the indexer's weights."""
        plain = (self.key_norm, self.key_norm_bias, self.head_weights)
        return (
            self.query.size_bytes
            + self.key.size_bytes
            + sum(tensor.numel() * tensor.element_size() for tensor in plain)
        )

    def __call__(
        self, x: Tensor, query_residual: Tensor, rows: StepRows, kv: MlaLayerKv, rope: tuple[Tensor, Tensor]
    ) -> Selection | None:
        """Stores the rows' keys, then selects; None when no row has more than top_k tokens.

        `x` [R, hidden] is normed, `query_residual` [R, q_rank]: what q_b_proj multiplies. Raises UsageError for pools
        without indexer keys, ContentError when ranks are compared and differ.
        """
        if kv.indexer_pool is None:
            raise UsageError("this layer has an indexer, but its pools have no indexer keys")
        key = layer_norm(self.key(x), self.key_norm, self.key_norm_bias, KEY_NORM_EPS)
        key = self._rotated(key[:, None], rope)[:, 0]
        is_checked = rows.num_checked_pages == kv.indexer_pool.shape[0]
        indexer_store(key, kv.indexer_pool, rows.slots, kv.bad_slot, is_checked=is_checked)
        if rows.longest <= self.config.top_k:
            return None
        is_first = self.communicator.rank == 0
        own = None
        if is_first or self.checks_ranks:
            own = self._select(x, query_residual, rows, kv.indexer_pool, rope)
        if self.communicator.num_ranks == 1 and own is not None:
            return Selection(own)
        shape = (rows.num_rows, self.config.top_k)
        shared = torch.empty(shape, dtype=torch.int32, device=x.device) if own is None else own.clone()
        shared = self.communicator.from_first(shared)
        if self.checks_ranks and own is not None:
            self._compare(own, shared)
        return Selection(shared)

    def _select(
        self, x: Tensor, query_residual: Tensor, rows: StepRows, pool: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Positions int32 [R, top_k]: of prompt rows a chunk at a time, of decode rows together."""
        query = self.query(query_residual).view(rows.num_rows, self.config.num_heads, self.config.key_size)
        query = self._rotated(query, rope)
        weights = tiled_matmul(x.to(torch.float32), self.head_weights)
        weights = weights * (self.config.num_heads**-0.5 * self.config.key_size**-0.5)
        found: list[Tensor] = []
        for chunk in rows.chunks:
            places = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            pages = rows.block_table[chunk.first_row]
            scores = prefill_indexer_scores(query[places], weights[places], pool, pages, chunk.first_position)
            found.append(top_k(scores, rows.num_tokens[places], self.config.top_k))
        decode = slice(rows.num_prefill_rows, None)
        if rows.num_prefill_rows < rows.num_rows:
            counts = rows.num_tokens[decode]
            scores = indexer_scores(query[decode], weights[decode], pool, rows.block_table[decode], counts)
            found.append(top_k(scores, counts, self.config.top_k))
        return torch.cat(found)

    def _rotated(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """`x` [R, heads, key size] with its first elements turned, interleaved, and padded to the kernels' key size."""
        if has_row_kernels(x):
            return rotate_on_cpu(x, *rope, True, out_size=INDEXER_KEY_SIZE)
        turned = apply_rope(x[..., : self.rope_size], *rope, True)
        return pad(torch.cat((turned, x[..., self.rope_size :]), dim=2), (0, INDEXER_KEY_SIZE - x.shape[2]))

    def _compare(self, own: Tensor, shared: Tensor) -> None:
        """ContentError on all ranks when any rank's own positions differ from rank 0's."""
        differs = (own != shared).any(dim=1).to(torch.int32)
        differing = self.communicator.maximum(differs).nonzero()[:, 0].tolist()
        if differing:
            raise ContentError(
                f"ranks select other tokens than rank 0 for rows {differing} of a step",
                remedy="check that all ranks run the same release, versions and device types",
            )
