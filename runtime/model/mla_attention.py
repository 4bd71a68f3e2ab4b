"""Multi-head latent attention over pages: prompt rows in the expanded form, decode rows in the absorbed one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopt.errors import UsageError
from memopt.kernels.attention.mla_decode import mla_decode, sparse_mla_decode
from memopt.kernels.kv_cache.kv_store import mla_store
from memopt.kernels.layout import MLA_LATENT_SIZE, MLA_ROPE_SIZE
from memopt.kernels.rows.layer_rows import has_row_kernels, mla_keys_on_cpu
from memopt.runtime.kv.layer_kv import LayerKv, MlaLayerKv
from memopt.runtime.model.head_products import head_matmul
from memopt.runtime.model.indexer import Indexer
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mla_prefill import attend_prompt_rows
from memopt.runtime.model.model_config import MlaConfig
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import apply_rope
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import StepRows

# Of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps is: DeepSeek-V3's inference/model.py and transformers 5.24
# (modeling_deepseek_v3.py, modeling_glm_moe_dsa.py), the oracle of our tests. vLLM (deepseek_v2.py), SGLang and
# Megatron-LM take rms_norm_eps, 1e-5 in GLM-5.x and Kimi K2.6: docs/runtime.md, "What decides a token".
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class QueryRank:
    """The first half of a query projection of low rank: x -> norm(down(x)), [R, q_rank]."""

    down: Linear
    norm: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The residual that q_b_proj and the indexer multiply."""
        return rms_norm(self.down(x), self.norm, LATENT_NORM_EPS)


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """One layer; heads are those of this rank. `query_rank` is None where one q_proj does it all.

    `key_up` [heads, nope, latent] (W_UK) and `value_up` [heads, value, latent] (W_UV): kv_b_proj in the type of
    activations, contiguous each, because they are multiplied head by head and a view of both is 6 times slower (BF16).
    `is_interleaved`: as in RopeConfig. `indexer` is None in dense models and in "shared" layers.
    """

    config: MlaConfig
    query_rank: QueryRank | None
    query: Linear
    kv_a: Linear
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    output: Linear
    is_interleaved: bool
    indexer: Indexer | None

    @property
    def size_bytes(self) -> int:
        """Bytes of the layer's attention weights."""
        linears = [self.query, self.kv_a, self.output, *([] if self.query_rank is None else [self.query_rank.down])]
        norms = [self.kv_norm, *([] if self.query_rank is None else [self.query_rank.norm])]
        plain = sum(tensor.numel() * tensor.element_size() for tensor in (self.key_up, self.value_up, *norms))
        indexer_bytes = 0 if self.indexer is None else self.indexer.size_bytes
        return sum(linear.size_bytes for linear in linears) + plain + indexer_bytes

    def __call__(
        self, x: Tensor, rows: StepRows, kv: LayerKv, selection: Selection | None, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Selection | None]:
        """As `AttentionBlock`."""
        if not isinstance(kv, MlaLayerKv):
            raise UsageError("an MLA layer was given pools of K and V heads", remedy="make them from its own config")
        residual = x if self.query_rank is None else self.query_rank(x)
        query = self.query(residual).view(rows.num_rows, -1, self.config.nope_size + self.config.rope_size)
        query_nope = query[:, :, : self.config.nope_size]
        query_rope = apply_rope(query[:, :, self.config.nope_size :], *rope, self.is_interleaved)
        self._store(x, rows, kv, rope)
        if self.indexer is not None:
            selection = self.indexer(x, residual, rows, kv, rope)

        num_prompt_rows = rows.num_prefill_rows
        outputs: list[Tensor] = []
        if num_prompt_rows:
            prompt = torch.cat((query_nope[:num_prompt_rows], query_rope[:num_prompt_rows]), dim=2)
            outputs.append(attend_prompt_rows(prompt, self.key_up, self.value_up, rows, kv, selection, self.config))
        if num_prompt_rows < rows.num_rows:
            decode = slice(num_prompt_rows, None)
            outputs.append(self._attend_decode_rows(query_nope[decode], query_rope[decode], rows, kv, selection))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.output(attended.flatten(1)), selection

    def _store(self, x: Tensor, rows: StepRows, kv: MlaLayerKv, rope: tuple[Tensor, Tensor]) -> None:
        """Writes the rows' latents and ropes into the pages, padded to the kernels' sizes."""
        latent, key_rope = self._keys(self.kv_a(x), rope)
        if kv.observer is not None:
            parts = latent[:, : self.config.latent_size], key_rope[:, : self.config.rope_size]
            kv.observer.observe(torch.cat(parts, dim=1)[:, None], None, rows.slots)
        mla_store(
            latent, key_rope, kv.pool, rows.slots, kv.kv_format, kv.scale, kv.bad_slot,
            is_checked=rows.num_checked_pages == kv.pool.shape[0],
        )  # fmt: skip

    def _keys(self, kv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Latents [R, 512] and ropes [R, 64] of kv_a_proj's rows: normed, turned, padded to the kernels' sizes."""
        if has_row_kernels(kv) and kv.dtype == self.kv_norm.dtype:
            return mla_keys_on_cpu(kv, self.kv_norm, LATENT_NORM_EPS, *rope, self.is_interleaved)
        latent, key_rope = torch.split(kv, [self.config.latent_size, self.config.rope_size], dim=1)
        latent = rms_norm(latent, self.kv_norm, LATENT_NORM_EPS)
        key_rope = apply_rope(key_rope[:, None], *rope, self.is_interleaved)[:, 0]
        return _padded(latent, MLA_LATENT_SIZE), _padded(key_rope, MLA_ROPE_SIZE)

    def _attend_decode_rows(
        self, query_nope: Tensor, query_rope: Tensor, rows: StepRows, kv: MlaLayerKv, selection: Selection | None
    ) -> Tensor:
        """Output [D, heads, value size] of the D rows behind the prompts', each a request of its own."""
        absorbed = head_matmul(query_nope, self.key_up)
        queries = absorbed, query_rope.contiguous()
        if absorbed.device.type != "cpu":
            queries = _padded(absorbed, MLA_LATENT_SIZE), _padded(query_rope, MLA_ROPE_SIZE)
        table = rows.block_table[rows.num_prefill_rows :]
        if selection is None:
            counts = rows.num_tokens[rows.num_prefill_rows :]
            attended = mla_decode(
                *queries, kv.pool, table, counts, kv_format=kv.kv_format, scale=kv.scale,
                softmax_scale=self.config.softmax_scale, is_checked=True,
            )  # fmt: skip
        else:
            attended = sparse_mla_decode(
                *queries, kv.pool, table, selection.positions[rows.num_prefill_rows :], kv_format=kv.kv_format,
                scale=kv.scale, softmax_scale=self.config.softmax_scale, is_checked=True,
            )  # fmt: skip
        latents = attended.output[:, :, : self.config.latent_size]
        return head_matmul(latents, self.value_up.mT)


def _padded(x: Tensor, size: int) -> Tensor:
    """`x` with zeros behind its last dimension up to `size`, contiguous."""
    return pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x.contiguous()
