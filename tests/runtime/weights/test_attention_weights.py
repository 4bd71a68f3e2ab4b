"""Attention blocks from tensors: what is missing or of a wrong size is named, ranks take their heads."""

from __future__ import annotations

import pytest
import torch
from transformers_attention import AttentionPair, deepseek_pair, glm4_pair, glm_dsa_pair

from memopt.errors import MissingTensorError, ShapeError, UsageError
from memopt.runtime.model.gqa_attention import GqaAttention
from memopt.runtime.model.mla_attention import MlaAttention
from memopt.runtime.parallel.communicator import SingleRank
from memopt.runtime.weights.attention_weights import build_attention, build_gqa_attention, build_mla_attention
from memopt.runtime.weights.layer_names import LayerNames
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linears import RowParallelLinear
from memopt.runtime.weights.load_options import LoadOptions


class SecondOfTwo(SingleRank):
    """Rank 1 of 2."""

    rank = 1
    num_ranks = 2


def tensors_of(pair: AttentionPair, **changes: torch.Tensor | None) -> LayerTensors:
    """The module's tensors; `changes`: others by name with "__" for ".", None to leave one out."""
    tensors = LayerTensors("model.layers.0.", LayerNames((), ()))
    state = dict(pair.module.state_dict()) | {name.replace("__", "."): value for name, value in changes.items()}
    for name, tensor in state.items():
        if tensor is not None:
            tensors.add(f"self_attn.{name}", tensor.detach().clone())
    return tensors


MLA, DSA, GQA = deepseek_pair(), glm_dsa_pair(), glm4_pair()
FLOAT32 = LoadOptions("float32")


@pytest.mark.parametrize("pair", [MLA, DSA, GQA], ids=["mla", "dsa", "gqa"])
def test_sizes_are_those_of_the_tensors(pair: AttentionPair) -> None:
    block = pair.block()
    assert isinstance(block, MlaAttention | GqaAttention)
    parameters = sum(tensor.numel() for tensor in pair.module.state_dict().values())
    assert block.size_bytes == parameters * torch.float32.itemsize


def test_the_head_weights_of_an_indexer_stay_float32() -> None:
    block = build_mla_attention(DSA.config, 0, tensors_of(DSA), LoadOptions("bfloat16"))
    assert block.indexer is not None
    assert block.indexer.head_weights.dtype == torch.float32
    assert torch.equal(block.indexer.head_weights, DSA.module.indexer.weights_proj.weight)
    assert block.key_up.dtype == block.value_up.dtype == torch.bfloat16


def test_ranks_compare_what_they_select_where_they_have_the_same_bits() -> None:
    for compute, is_compared in (("float32", True), ("bfloat16", False)):
        block = build_mla_attention(DSA.config, 0, tensors_of(DSA), LoadOptions(compute))  # type: ignore[arg-type]
        assert block.indexer is not None
        assert block.indexer.checks_ranks is is_compared


@pytest.mark.parametrize(
    ("pair", "name", "rows", "columns"),
    [
        (MLA, "q_a_proj__weight", 47, 64),
        (MLA, "kv_b_proj__weight", 4 * 56, 63),
        (MLA, "kv_a_proj_with_mqa__weight", 81, 64),
        (MLA, "o_proj__weight", 64, 95),
        (DSA, "indexer__wk__weight", 31, 64),
        (DSA, "indexer__weights_proj__weight", 15, 64),
        (GQA, "k_proj__weight", 128, 63),
        (GQA, "o_proj__weight", 64, 192),
    ],
)
def test_a_wrong_size_names_the_tensor(pair: AttentionPair, name: str, rows: int, columns: int) -> None:
    module = name.removesuffix("__weight").replace("__", ".")
    found = rf"self_attn\.{module}.*\[{rows}, {columns}\], but config.json asks for"
    tensors = tensors_of(pair, **{name: torch.zeros(rows, columns)})
    with pytest.raises(ShapeError, match=found):
        build_attention(pair.config, 0, tensors, FLOAT32)


def test_a_missing_tensor_is_named() -> None:
    tensors = tensors_of(DSA, indexer__k_norm__bias=None)
    with pytest.raises(MissingTensorError, match=r"model\.layers\.0\.self_attn\.indexer\.k_norm\.bias"):
        build_attention(DSA.config, 0, tensors, FLOAT32)
    with pytest.raises(ShapeError, match=r"kv_a_layernorm\.weight.*\[3\], but config.json asks for \[64\]"):
        build_attention(MLA.config, 0, tensors_of(MLA, kv_a_layernorm__weight=torch.ones(3)), FLOAT32)


def test_a_rank_takes_its_heads_and_sums() -> None:
    options = LoadOptions("float32", communicator=SecondOfTwo())
    module = GQA.module
    halves = {f"{name}_proj__weight": getattr(module, f"{name}_proj").weight.chunk(2)[1] for name in "qkv"}
    halves |= {f"{name}_proj__bias": getattr(module, f"{name}_proj").bias.chunk(2)[1] for name in "qkv"}
    halves |= {"o_proj__weight": module.o_proj.weight.chunk(2, dim=1)[1]}
    tensors = tensors_of(GQA, **halves)
    block = build_gqa_attention(GQA.config, 0, tensors, options)
    tensors.finish()
    assert (block.query.num_rows, block.key.num_rows, block.output.num_columns) == (128, 64, 128)
    assert isinstance(block.output, RowParallelLinear)


def test_another_kind_or_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="glm4_moe has no MLA layers"):
        build_mla_attention(GQA.config, 0, tensors_of(GQA), FLOAT32)
    with pytest.raises(UsageError, match="deepseek_v3 has no GQA layers"):
        build_gqa_attention(MLA.config, 0, tensors_of(MLA), FLOAT32)
    eight = SecondOfTwo()
    eight.num_ranks = 8
    with pytest.raises(UsageError, match="4 heads cannot be cut over 8 ranks"):
        build_attention(MLA.config, 0, tensors_of(MLA), LoadOptions("float32", communicator=eight))
