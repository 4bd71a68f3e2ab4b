"""A Llama and the glm4_moe made of it are one function: transformers computes both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import permuted, tiny_llama_bytes
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.smollm2.as_glm4_moe import ExpertSplit, glm4_moe_config, glm4_moe_weights
from benchmarks.smollm2.check_function import glm4_moe_model, llama_model, log_probabilities
from benchmarks.smollm2.llama_source import LlamaSource, read_llama, unpermuted
from memopt.errors import AlignmentError, MissingTensorError, UnknownTensorError, UnsupportedError

TOKENS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LlamaSource:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(tiny_llama_bytes())
    return read_llama(path)


@pytest.mark.parametrize(
    "split",
    [ExpertSplit(), ExpertSplit(hidden_multiple=32), ExpertSplit(num_routed=4, num_shared=2), ExpertSplit(2, 1, 256)],
    ids=["padded-96-to-128", "not-padded", "fewer-experts", "padded-96-to-256"],
)
def test_the_split_model_is_the_same_function(source: LlamaSource, split: ExpertSplit) -> None:
    llama = log_probabilities(llama_model(source.sizes, source.weights), TOKENS)
    config = glm4_moe_config(source.sizes, split, bos=1, eos=2)
    moe = glm4_moe_model(config, glm4_moe_weights(source.sizes, source.weights, split))
    assert llama.std() > 0.5
    torch.testing.assert_close(log_probabilities(moe, TOKENS), llama, rtol=0, atol=2e-4)


def test_every_expert_matters(source: LlamaSource) -> None:
    """The likeness above would not notice experts that are not computed: without one, the function is another."""
    split = ExpertSplit()
    config = glm4_moe_config(source.sizes, split, bos=1, eos=2)
    weights = dict(glm4_moe_weights(source.sizes, source.weights, split))
    whole = log_probabilities(glm4_moe_model(config, weights.items()), TOKENS)
    weights["model.layers.1.mlp.experts.7.down_proj.weight"] = np.zeros_like(
        weights["model.layers.1.mlp.experts.7.down_proj.weight"]
    )
    assert (log_probabilities(glm4_moe_model(config, weights.items()), TOKENS) - whole).abs().max() > 1e-2


def test_a_split_that_is_not_exact_is_refused(source: LlamaSource) -> None:
    with pytest.raises(AlignmentError, match="384 neurons in 8 routed and 3 shared parts"):
        ExpertSplit(num_shared=3).expert_size(source.sizes)
    with pytest.raises(AlignmentError, match="6 routed"):
        ExpertSplit(num_routed=6, num_shared=6).expert_size(source.sizes)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_the_rows_of_heads_come_back(heads: int, pairs: int, columns: int) -> None:
    weight = np.arange(heads * 2 * pairs * columns, dtype=np.float32).reshape(-1, columns)
    assert np.array_equal(unpermuted(permuted(weight, heads), heads), weight)


def test_a_missing_figure_is_named(tmp_path: Path) -> None:
    (tmp_path / "renamed.gguf").write_bytes(tiny_llama_bytes().replace(b"rope.freq_base", b"rope.freq_bass"))
    with pytest.raises(UnsupportedError, match=r"llama\.rope\.freq_base is None"):
        read_llama(tmp_path / "renamed.gguf")


def test_a_missing_and_a_spare_tensor_are_named(tmp_path: Path) -> None:
    raw = tiny_llama_bytes()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(raw.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(MissingTensorError, match=r"blk\.1\.ffn_up"):
        read_llama(path)
    # One layer fewer than the file holds.
    path.write_bytes(raw.replace(b"llama.block_count\x04\0\0\0\x02", b"llama.block_count\x04\0\0\0\x01"))
    with pytest.raises(UnknownTensorError, match=r"blk\.1\.attn_k"):
        read_llama(path)
