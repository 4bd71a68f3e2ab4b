"""A layer's attention from its tensors."""

from __future__ import annotations

from memopt.errors import UsageError
from memopt.runtime.kv.kv_pools import check_mla_sizes, padded_head_dim
from memopt.runtime.model.attention_block import AttentionBlock
from memopt.runtime.model.gqa_attention import GqaAttention, HeadNorms
from memopt.runtime.model.indexer import Indexer
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mla_attention import MlaAttention, QueryRank
from memopt.runtime.model.model_config import GqaConfig, IndexerConfig, MlaConfig, ModelConfig
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linear_builder import build_dense
from memopt.runtime.weights.linears import RowParallelLinear
from memopt.runtime.weights.load_options import LoadOptions
from memopt.runtime.weights.sized_weights import require_size, share_of_rank, sized_linear, sized_tensor


def build_attention(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> AttentionBlock:
    """The attention of layer number `layer`, whatever its kind; errors as for the two functions below."""
    build = build_mla_attention if isinstance(config.attention, MlaConfig) else build_gqa_attention
    return build(config, layer, tensors, options)


def build_mla_attention(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> MlaAttention:
    """MLA of layer number `layer`, with its indexer if it has one; tensors are this rank's cuts and are taken.

    Raises MissingTensorError, ShapeError for a tensor that does not fit the config, UnsupportedError for sizes above
    the kernels'.
    """
    attention = config.attention
    if not isinstance(attention, MlaConfig):
        raise UsageError(f"{config.family} has no MLA layers")
    check_mla_sizes(attention)
    query_size = attention.nope_size + attention.rope_size
    num_heads = share_of_rank(attention.num_heads, "heads", options)
    query_rank, query_name, query_columns = None, "self_attn.q_proj", config.hidden_size
    if attention.q_rank is not None:
        down = sized_linear(tensors, "self_attn.q_a_proj", attention.q_rank, config.hidden_size, options)
        norm = sized_tensor(tensors, "self_attn.q_a_layernorm.weight", (attention.q_rank,), options)
        query_rank, query_name, query_columns = QueryRank(down, norm), "self_attn.q_b_proj", attention.q_rank
    query = sized_linear(tensors, query_name, num_heads * query_size, query_columns, options)
    key_size = attention.latent_size + attention.rope_size
    kv_a = sized_linear(tensors, "self_attn.kv_a_proj_with_mqa", key_size, config.hidden_size, options)
    kv_norm = sized_tensor(tensors, "self_attn.kv_a_layernorm.weight", (attention.latent_size,), options)
    kv_b = build_dense(tensors, "self_attn.kv_b_proj", options)
    wanted = (num_heads * (attention.nope_size + attention.value_size), attention.latent_size)
    require_size(f"{tensors.prefix}self_attn.kv_b_proj", tuple(kv_b.shape), wanted)
    output = _output(tensors, num_heads * attention.value_size, config.hidden_size, options)
    indexer = None
    if attention.indexer is not None and config.has_indexer(layer):
        indexer = _indexer(config, attention, attention.indexer, tensors, options)
    heads = kv_b.view(num_heads, -1, attention.latent_size)
    return MlaAttention(
        attention,
        query_rank,
        query,
        kv_a,
        kv_norm,
        heads[:, : attention.nope_size].contiguous(),
        heads[:, attention.nope_size :].contiguous(),
        output,
        config.rope.is_interleaved,
        indexer,
    )


def build_gqa_attention(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> GqaAttention:
    """GQA of any layer; tensors are this rank's cuts and are taken. Errors as for `build_mla_attention`."""
    attention = config.attention
    if not isinstance(attention, GqaConfig):
        raise UsageError(f"{config.family} has no GQA layers")
    head_dim = attention.head_dim
    num_heads = share_of_rank(attention.num_heads, "heads", options)
    num_kv_heads = share_of_rank(attention.num_kv_heads, "KV heads", options)
    projections: list[Linear] = []
    for name, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads), ("v_proj", num_kv_heads)):
        sizes = heads * head_dim, config.hidden_size
        projections.append(sized_linear(tensors, f"self_attn.{name}", *sizes, options, has_bias=attention.has_bias))
    norms = None
    if attention.has_qk_norm:
        query_norm, key_norm = (sized_tensor(tensors, f"self_attn.{n}_norm.weight", (head_dim,), options) for n in "qk")
        norms = HeadNorms(query_norm, key_norm, config.rms_norm_eps)
    output = _output(tensors, num_heads * head_dim, config.hidden_size, options)
    query, key, value = projections
    return GqaAttention(
        attention,
        query,
        key,
        value,
        norms,
        output,
        config.rope.size,
        config.rope.is_interleaved,
        padded_head_dim(attention),
    )


def _indexer(
    config: ModelConfig, attention: MlaConfig, indexer: IndexerConfig, tensors: LayerTensors, options: LoadOptions
) -> Indexer:
    columns = config.hidden_size if attention.q_rank is None else attention.q_rank
    query_rows = indexer.num_heads * indexer.key_size
    query = sized_linear(tensors, "self_attn.indexer.wq_b", query_rows, columns, options)
    key = sized_linear(tensors, "self_attn.indexer.wk", indexer.key_size, config.hidden_size, options)
    # transformers keeps it in float32 (_keep_in_fp32_modules); so do we, whatever activations are.
    weights = build_dense(tensors, "self_attn.indexer.weights_proj", LoadOptions("float32")).to(options.device)
    wanted = (indexer.num_heads, config.hidden_size)
    require_size(f"{tensors.prefix}self_attn.indexer.weights_proj", tuple(weights.shape), wanted)
    norm, bias = (
        sized_tensor(tensors, f"self_attn.indexer.k_norm.{part}", (indexer.key_size,), options)
        for part in ("weight", "bias")
    )
    return Indexer(
        indexer,
        query,
        key,
        norm,
        bias,
        weights,
        attention.rope_size,
        options.communicator,
        # In float32 ranks have equal bits: a difference is a fault, and worth the time to find it.
        checks_ranks=options.compute == "float32",
    )


def _output(tensors: LayerTensors, num_columns: int, num_rows: int, options: LoadOptions) -> Linear:
    """o_proj, whose columns are this rank's heads."""
    linear = sized_linear(tensors, "self_attn.o_proj", num_rows, num_columns, options)
    return linear if options.communicator.num_ranks == 1 else RowParallelLinear(linear, options.communicator)
