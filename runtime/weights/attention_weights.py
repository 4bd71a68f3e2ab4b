"""A layer's attention from its tensors."""

from __future__ import annotations

from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.runtime.kv.kv_pools import check_mla_sizes, padded_head_dim
from memopt.runtime.model.attention_block import AttentionBlock
from memopt.runtime.model.gqa_attention import GqaAttention, HeadNorms
from memopt.runtime.model.indexer import Indexer
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mla_attention import MlaAttention, QueryRank
from memopt.runtime.model.model_config import GqaConfig, IndexerConfig, MlaConfig, ModelConfig
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linear_builder import build_dense, build_linear
from memopt.runtime.weights.linears import RowParallelLinear
from memopt.runtime.weights.load_options import LoadOptions


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
    num_heads = _heads_here(attention.num_heads, options, "heads")
    query_rank, query_name, query_columns = None, "self_attn.q_proj", config.hidden_size
    if attention.q_rank is not None:
        down = build_linear(tensors, "self_attn.q_a_proj", options)
        _require_size(tensors, "self_attn.q_a_proj", down, attention.q_rank, config.hidden_size)
        norm = _vector(tensors, "self_attn.q_a_layernorm.weight", attention.q_rank, options)
        query_rank, query_name, query_columns = QueryRank(down, norm), "self_attn.q_b_proj", attention.q_rank
    query = build_linear(tensors, query_name, options)
    _require_size(tensors, query_name, query, num_heads * query_size, query_columns)
    kv_a = build_linear(tensors, "self_attn.kv_a_proj_with_mqa", options)
    key_size = attention.latent_size + attention.rope_size
    _require_size(tensors, "self_attn.kv_a_proj_with_mqa", kv_a, key_size, config.hidden_size)
    kv_norm = _vector(tensors, "self_attn.kv_a_layernorm.weight", attention.latent_size, options)
    kv_b = build_dense(tensors, "self_attn.kv_b_proj", options)
    wanted = (num_heads * (attention.nope_size + attention.value_size), attention.latent_size)
    if tuple(kv_b.shape) != wanted:
        raise _wrong_size(tensors, "self_attn.kv_b_proj", tuple(kv_b.shape), wanted)
    output = _output(tensors, num_heads * attention.value_size, config.hidden_size, options)
    indexer = None
    if attention.indexer is not None and config.has_indexer(layer):
        indexer = _indexer(config, attention, attention.indexer, tensors, options)
    return MlaAttention(
        attention,
        query_rank,
        query,
        kv_a,
        kv_norm,
        kv_b.view(num_heads, -1, attention.latent_size),
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
    num_heads = _heads_here(attention.num_heads, options, "heads")
    num_kv_heads = _heads_here(attention.num_kv_heads, options, "KV heads")
    projections: list[Linear] = []
    for name, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads), ("v_proj", num_kv_heads)):
        projection = build_linear(tensors, f"self_attn.{name}", options)
        _require_size(tensors, f"self_attn.{name}", projection, heads * head_dim, config.hidden_size)
        projections.append(projection)
    norms = None
    if attention.has_qk_norm:
        query_norm, key_norm = (_vector(tensors, f"self_attn.{n}_norm.weight", head_dim, options) for n in "qk")
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
    query = build_linear(tensors, "self_attn.indexer.wq_b", options)
    columns = config.hidden_size if attention.q_rank is None else attention.q_rank
    _require_size(tensors, "self_attn.indexer.wq_b", query, indexer.num_heads * indexer.key_size, columns)
    key = build_linear(tensors, "self_attn.indexer.wk", options)
    _require_size(tensors, "self_attn.indexer.wk", key, indexer.key_size, config.hidden_size)
    # transformers keeps it in float32 (_keep_in_fp32_modules); so do we, whatever activations are.
    weights = build_dense(tensors, "self_attn.indexer.weights_proj", LoadOptions("float32")).to(options.device)
    if tuple(weights.shape) != (indexer.num_heads, config.hidden_size):
        wanted = (indexer.num_heads, config.hidden_size)
        raise _wrong_size(tensors, "self_attn.indexer.weights_proj", tuple(weights.shape), wanted)
    norm, bias = (
        _vector(tensors, f"self_attn.indexer.k_norm.{part}", indexer.key_size, options) for part in ("weight", "bias")
    )
    return Indexer(indexer, query, key, norm, bias, weights, attention.rope_size, options.communicator)


def _output(tensors: LayerTensors, num_columns: int, num_rows: int, options: LoadOptions) -> Linear:
    """o_proj, whose columns are this rank's heads."""
    if options.communicator.rank != 0:
        # Ranks' results are summed: one of them adds the bias.
        tensors.take_optional("self_attn.o_proj.bias")
    linear = build_linear(tensors, "self_attn.o_proj", options)
    _require_size(tensors, "self_attn.o_proj", linear, num_rows, num_columns)
    return linear if options.communicator.num_ranks == 1 else RowParallelLinear(linear, options.communicator)


def _heads_here(num_heads: int, options: LoadOptions, what: str) -> int:
    """Heads of this rank. Raises UsageError where ranks do not divide them."""
    num_ranks = options.communicator.num_ranks
    if num_heads % num_ranks:
        raise UsageError(
            f"{num_heads} {what} cannot be cut over {num_ranks} ranks", remedy=f"use a divisor of {num_heads}"
        )
    return num_heads // num_ranks


def _vector(tensors: LayerTensors, name: str, size: int, options: LoadOptions) -> Tensor:
    """A norm's weight or bias [size] in the type of activations."""
    vector = tensors.take(name)
    if tuple(vector.shape) != (size,):
        raise _wrong_size(tensors, name, tuple(vector.shape), (size,))
    return vector.to(options.device, options.dtype)


def _require_size(tensors: LayerTensors, name: str, linear: Linear, num_rows: int, num_columns: int) -> None:
    if (linear.num_rows, linear.num_columns) != (num_rows, num_columns):
        raise _wrong_size(tensors, name, (linear.num_rows, linear.num_columns), (num_rows, num_columns))


def _wrong_size(tensors: LayerTensors, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> ShapeError:
    return ShapeError(
        f"the weight is {list(found)}, but config.json asks for {list(wanted)}",
        tensor=tensors.prefix + name,
        remedy="check that config.json belongs to these weights, and the number of ranks to these files",
    )
