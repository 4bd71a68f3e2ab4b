"""The blocks that GLM, Kimi and DeepSeek models are built of: each yields the tensors of one block.

Names, shapes and tensor-parallel cuts: docs/formats.md ("Tensor names", "Tensor-parallel rules").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt.compressor.families.roles import BY_COLUMNS, BY_ROWS, REPLICATED, Role, TensorSpec, TpAxis, TpRule
from memopt.compressor.families.text_config import TextConfig


@dataclass(frozen=True)
class LayerScope:
    """Where a block stands: name prefix ("model.layers.3"), layer number, and whether it is an MTP layer."""

    prefix: str
    layer: int
    is_mtp: bool

    def vector(self, name: str, size: int, role: Role = Role.NORM, tp: TpRule = REPLICATED) -> TensorSpec:
        return TensorSpec(f"{self.prefix}.{name}", (size,), role, tp, self.layer, self.is_mtp)

    def linear(
        self, name: str, rows: int, columns: int, role: Role, tp: TpRule = REPLICATED, *, is_quantized: bool = True
    ) -> TensorSpec:
        return TensorSpec(
            f"{self.prefix}.{name}.weight",
            (rows, columns),
            role,
            tp,
            self.layer,
            self.is_mtp,
            is_linear=True,
            is_published_quantized=is_quantized,
        )


def layer_norms(scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
    yield scope.vector("input_layernorm.weight", c.hidden_size)
    yield scope.vector("post_attention_layernorm.weight", c.hidden_size)


def mla_attention(scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
    """Multi-head latent attention; `q_lora_rank` None means one full q_proj."""
    c.require("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, nope, rope, v_dim = (
        c.kv_lora_rank or 0,
        c.qk_nope_head_dim or 0,
        c.qk_rope_head_dim or 0,
        c.v_head_dim or 0,
    )
    heads, hidden, qk_dim = c.num_attention_heads, c.hidden_size, nope + rope
    by_query_head = TpRule(TpAxis.ROWS, qk_dim)
    if c.q_lora_rank is None:
        yield scope.linear("self_attn.q_proj", heads * qk_dim, hidden, Role.ATTENTION, by_query_head)
    else:
        yield scope.linear("self_attn.q_a_proj", c.q_lora_rank, hidden, Role.ATTENTION)
        yield scope.vector("self_attn.q_a_layernorm.weight", c.q_lora_rank)
        yield scope.linear("self_attn.q_b_proj", heads * qk_dim, c.q_lora_rank, Role.ATTENTION, by_query_head)
    yield scope.linear("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, Role.ATTENTION)
    yield scope.vector("self_attn.kv_a_layernorm.weight", kv_rank)
    kv_head = nope + v_dim
    yield scope.linear("self_attn.kv_b_proj", heads * kv_head, kv_rank, Role.KV_B, TpRule(TpAxis.ROWS, kv_head))
    yield scope.linear("self_attn.o_proj", hidden, heads * v_dim, Role.ATTENTION, TpRule(TpAxis.COLUMNS, v_dim))


def indexer(scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
    """The DSA indexer of a "full" layer: replicated on every rank."""
    c.require("index_n_heads", "index_head_dim", "q_lora_rank")
    heads, head_dim = c.index_n_heads or 0, c.index_head_dim or 0
    yield scope.linear("self_attn.indexer.wq_b", heads * head_dim, c.q_lora_rank or 0, Role.INDEXER)
    yield scope.linear("self_attn.indexer.wk", head_dim, c.hidden_size, Role.INDEXER)
    yield scope.linear("self_attn.indexer.weights_proj", heads, c.hidden_size, Role.INDEXER_WEIGHTS, is_quantized=False)
    yield scope.vector("self_attn.indexer.k_norm.weight", head_dim)
    yield scope.vector("self_attn.indexer.k_norm.bias", head_dim)


def gqa_attention(scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
    """Grouped-query attention with optional biases and query/key norms."""
    c.require("head_dim")
    head_dim = c.head_dim or 0
    by_head_rows, by_head_columns = TpRule(TpAxis.ROWS, head_dim), TpRule(TpAxis.COLUMNS, head_dim)
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads, "v_proj": c.num_key_value_heads}
    for name, num_heads in heads.items():
        yield scope.linear(f"self_attn.{name}", num_heads * head_dim, c.hidden_size, Role.ATTENTION, by_head_rows)
        if c.attention_bias:
            yield scope.vector(f"self_attn.{name}.bias", num_heads * head_dim, Role.ATTENTION_BIAS, by_head_rows)
    yield scope.linear(
        "self_attn.o_proj", c.hidden_size, c.num_attention_heads * head_dim, Role.ATTENTION, by_head_columns
    )
    if c.use_qk_norm:
        yield scope.vector("self_attn.q_norm.weight", head_dim)
        yield scope.vector("self_attn.k_norm.weight", head_dim)


def gated_mlp(scope: LayerScope, name: str, hidden: int, intermediate: int, role: Role) -> Iterator[TensorSpec]:
    """gate, up and down projections of one MLP or expert."""
    yield scope.linear(f"{name}.gate_proj", intermediate, hidden, role, BY_ROWS)
    yield scope.linear(f"{name}.up_proj", intermediate, hidden, role, BY_ROWS)
    yield scope.linear(f"{name}.down_proj", hidden, intermediate, role, BY_COLUMNS)


def moe(scope: LayerScope, c: TextConfig) -> Iterator[TensorSpec]:
    """Router, routed experts and the shared expert."""
    yield scope.linear("mlp.gate", c.n_routed_experts, c.hidden_size, Role.ROUTER, is_quantized=False)
    yield scope.vector("mlp.gate.e_score_correction_bias", c.n_routed_experts, Role.ROUTER_BIAS)
    for expert in range(c.n_routed_experts):
        name = f"mlp.experts.{expert}"
        for spec in gated_mlp(scope, name, c.hidden_size, c.moe_intermediate_size, Role.ROUTED_EXPERT):
            yield replace(spec, expert=expert, num_experts=c.n_routed_experts)
    if c.n_shared_experts:
        shared = c.moe_intermediate_size * c.n_shared_experts
        yield from gated_mlp(scope, "mlp.shared_experts", c.hidden_size, shared, Role.SHARED_EXPERT)


def mtp_head(scope: LayerScope, c: TextConfig, *, has_own_embedding: bool) -> Iterator[TensorSpec]:
    """What an MTP layer has besides a decoder layer; an embedding and head of its own are optional."""
    yield scope.vector("enorm.weight", c.hidden_size)
    yield scope.vector("hnorm.weight", c.hidden_size)
    yield scope.linear("eh_proj", c.hidden_size, 2 * c.hidden_size, Role.MTP_PROJECTION, is_quantized=False)
    yield scope.vector("shared_head.norm.weight", c.hidden_size)
    if has_own_embedding:
        head = scope.linear("shared_head.head", c.vocab_size, c.hidden_size, Role.MTP_HEAD, BY_ROWS, is_quantized=False)
        yield replace(head, is_required=False)
        yield replace(head, name=f"{scope.prefix}.embed_tokens.weight", is_linear=False, is_required=False)


def top_level(prefix: str, head_prefix: str, c: TextConfig) -> Iterator[TensorSpec]:
    """Embedding, final norm and output head."""
    yield TensorSpec(f"{prefix}.embed_tokens.weight", (c.vocab_size, c.hidden_size), Role.EMBEDDING, BY_ROWS)
    yield TensorSpec(f"{prefix}.norm.weight", (c.hidden_size,), Role.NORM)
    yield TensorSpec(
        f"{head_prefix}lm_head.weight",
        (c.vocab_size, c.hidden_size),
        Role.LM_HEAD,
        BY_ROWS,
        is_linear=True,
        is_required=not c.tie_word_embeddings,
    )
