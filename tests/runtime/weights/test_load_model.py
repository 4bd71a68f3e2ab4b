"""A model from a stream of tensors: any order, what lacks, what is left over, and how much memory it takes."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import load, model_config, stored_tensors
from step_cases import RowsOf, Steps
from tensor_memory_peak import TensorMemoryPeak
from tiny_checkpoints import NAMES, TINY_GLM5, make_checkpoint
from torch import Tensor

import memopt
from memopt.errors import MissingTensorError, ShapeError, UnknownTensorError, UnsupportedError
from memopt.kernels.kv_formats import FP32
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.weights.load_model import LoadOptions, load_decoder

OPTIONS = LoadOptions("float32")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "int4"
    memopt.compress(TINY_GLM5, folder, recipe="glm-5.2-int4", workers=1, device="cpu")
    return folder


def some_logits(decoder: Decoder) -> Tensor:
    return Steps(decoder, FP32).logits(RowsOf(0, [3, 1, 4, 1, 5], 0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_mtp", [False, True])
def test_every_family_with_and_without_mtp(name: str, use_mtp: bool, tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path, name, num_hidden_layers=3), use_mtp=use_mtp)
    assert len(decoder.layers) == 3
    assert len(decoder.mtp_layers) == (decoder.config.num_mtp_layers if use_mtp else 0)
    assert torch.isfinite(some_logits(decoder)).all()


def test_order_does_not_matter(int4: Path) -> None:
    tensors = list(stored_tensors(int4))
    expected = some_logits(load_decoder(model_config(int4), tensors, OPTIONS))
    random.Random(1).shuffle(tensors)
    assert torch.equal(some_logits(load_decoder(model_config(int4), tensors, OPTIONS)), expected)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.self_attn.kv_b_proj.weight",
        "model.layers.3.self_attn.indexer.k_norm.bias",
        "model.layers.4.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.7.up_proj.weight_scale",
        "model.layers.1.mlp.experts.0.down_proj.weight_shape",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, int4: Path) -> None:
    tensors = dict(stored_tensors(int4))
    del tensors[name]
    with pytest.raises(MissingTensorError) as refusal:
        load_decoder(model_config(int4), tensors.items(), OPTIONS)
    assert refusal.value.tensor == name


def test_a_missing_scale_of_fp8_is_named() -> None:
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors = {key: tensor for key, tensor in stored_tensors(TINY_GLM5) if key != name}
    with pytest.raises(MissingTensorError) as refusal:
        load_decoder(model_config(TINY_GLM5), tensors.items(), OPTIONS)
    assert refusal.value.tensor == name


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.5000.input_layernorm.weight",
        "model.layers.2.self_attn.indexer.wk.weight",  # a "shared" layer has none
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.8.up_proj.weight_packed",
        "model.layers.1.mlp.experts.0.up_proj.zero_point",
        "model.extra.weight",
        "vision_tower.patch.weight",
    ],
)
def test_a_tensor_that_nothing_uses_is_named(name: str, int4: Path) -> None:
    extra = {name: torch.zeros(4, 4)} | dict(stored_tensors(int4))
    with pytest.raises(UnknownTensorError) as refusal:
        load_decoder(model_config(int4), extra.items(), OPTIONS)
    assert refusal.value.tensor == name


def test_a_tensor_after_its_layer_was_built_is_refused(int4: Path) -> None:
    tensors = [*stored_tensors(int4), ("model.layers.0.extra.weight", torch.zeros(1))]
    with pytest.raises(UnknownTensorError, match="after its layer"):
        load_decoder(model_config(int4), tensors, OPTIONS)


def test_buffers_and_kv_scales_are_left_out(int4: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.layers.1.self_attn.k_scale": torch.ones(1),
        "model.layers.1.self_attn.v_scale": torch.ones(()),
    }
    tensors = extra | dict(stored_tensors(int4))
    expected = some_logits(load_decoder(model_config(int4), stored_tensors(int4), OPTIONS))
    assert torch.equal(some_logits(load_decoder(model_config(int4), tensors.items(), OPTIONS)), expected)


def test_parts_that_do_not_fit_are_named(int4: Path) -> None:
    tensors = dict(stored_tensors(int4))
    name = "model.layers.1.mlp.experts.3.up_proj.weight_shape"
    with pytest.raises(ShapeError, match="packed words hold") as refusal:
        load_decoder(model_config(int4), (tensors | {name: torch.tensor([256, 1])}).items(), OPTIONS)
    assert refusal.value.tensor == name
    name = "model.layers.1.mlp.experts.3.up_proj.weight_packed"
    with pytest.raises(ShapeError, match="first expert") as refusal:
        load_decoder(model_config(int4), (tensors | {name: tensors[name][:, :4]}).items(), OPTIONS)
    assert refusal.value.tensor == name
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    packed = f"{name}_packed"
    del tensors[packed]
    with pytest.raises(UnsupportedError, match="one format"):
        load_decoder(model_config(int4), (tensors | {name: torch.zeros(256, 256)}).items(), OPTIONS)


def test_float32_is_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="float32"):
        LoadOptions("float32", device="cuda")


def test_what_was_streamed_is_let_go(int4: Path) -> None:
    """Of the stream at most one layer's own tensors are alive: experts are copied, what is kept is a copy or itself.

    Tensors come as views of one memory a file, as `Release.iter_tensors` yields them.
    """
    alive: list[weakref.ref[Tensor]] = []
    largest = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal largest
        for name, tensor in stored_tensors(int4):
            memory = torch.cat((tensor.reshape(-1).view(torch.uint8), torch.zeros(64, dtype=torch.uint8)))
            view = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            alive.append(weakref.ref(memory))
            del memory
            yield name, view
            del view
            gc.collect(0)
            bytes_alive = sum(held.nbytes for ref in alive if (held := ref()) is not None)
            largest = max(largest, bytes_alive)

    decoder = load_decoder(model_config(int4), stream(), OPTIONS)
    assert largest == 0
    assert torch.isfinite(some_logits(decoder)).all()


def test_a_tied_model_uses_its_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek-v3-fp8", num_hidden_layers=1, tie_word_embeddings=True)
    tensors = dict(stored_tensors(folder))
    decoder = load_decoder(model_config(folder), tensors.items(), OPTIONS)
    hidden = torch.randn(2, decoder.config.hidden_size)
    expected = hidden @ tensors["model.embed_tokens.weight"].float().T
    torch.testing.assert_close(decoder.head(hidden), expected, rtol=1e-4, atol=1e-4)
    # A head that is stored all the same is not looked at, as in transformers.
    extra = tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}
    assert torch.equal(load_decoder(model_config(folder), extra.items(), OPTIONS).head(hidden), decoder.head(hidden))


def test_kimi_k2_5_leaves_its_vision_tower_out_and_needs_its_prefix(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi-k2.6-int4", num_hidden_layers=1)
    tensors = dict(stored_tensors(folder))
    assert any(name.startswith("vision_tower.") for name in tensors)
    load_decoder(model_config(folder), tensors.items(), OPTIONS)
    tensors["model.norm.weight"] = tensors.pop("language_model.model.norm.weight")
    with pytest.raises(UnknownTensorError, match="language_model"):
        load_decoder(model_config(folder), tensors.items(), OPTIONS)


def test_pools_of_too_few_layers_are_refused(int4: Path) -> None:
    steps = Steps(load(int4), FP32)
    pools = replace(steps.pools, layers=steps.pools.layers[:2])
    with pytest.raises(ShapeError, match="2 layers"):
        steps.decoder.forward(steps.rows(RowsOf(0, [1], 0)), pools)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("weights", ["released", "bf16"])
def test_memory_is_the_model_and_one_layer(compute: Any, weights: Any, int4: Path) -> None:
    """While it loads: the finished parts, one layer's experts as they came, and one expert's unpacked codes."""
    config, tensors = model_config(int4), list(stored_tensors(int4))
    with TensorMemoryPeak() as memory:
        decoder = load_decoder(config, tensors, LoadOptions(compute, weights))
        gc.collect()
        model_bytes = memory.live_bytes
    layer_bytes = sum(tensor.nbytes for name, tensor in tensors if ".layers.1.mlp.experts." in name)
    expert_weights = 3 * config.hidden_size * config.moe.intermediate_size
    # int32 codes, and the same again while they are moved.
    assert memory.peak_bytes <= model_bytes + layer_bytes + 2 * 4 * expert_weights
    assert model_bytes > 3 * layer_bytes
    assert len(decoder.layers) == config.num_layers
