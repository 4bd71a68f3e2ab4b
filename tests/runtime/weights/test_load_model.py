"""A model from a stream of tensors: any order, what lacks, what is left over, and how much memory it takes."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from memopt.runtime.model.moe import MoeBlock
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


# One element would broadcast, one row less would be found out at a late token, if at all.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (2047, 256)),
        ("lm_head.weight", (2047, 256)),
        ("model.norm.weight", (1,)),
        ("model.layers.0.input_layernorm.weight", (1,)),
        ("model.layers.2.post_attention_layernorm.weight", (1,)),
        ("model.layers.1.mlp.gate.weight", (7, 256)),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (1,)),
        ("model.layers.0.mlp.up_proj.weight", (511, 256)),
        ("model.layers.0.mlp.down_proj.weight", (256, 511)),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", (128, 256)),
        ("model.layers.5.eh_proj.weight", (256, 256)),
        ("model.layers.5.enorm.weight", (1,)),
        ("model.layers.5.shared_head.norm.weight", (1,)),
        ("model.layers.5.embed_tokens.weight", (2047, 256)),
        ("model.layers.5.shared_head.head.weight", (2047, 256)),
    ],
)
def test_a_wrong_size_names_the_tensor(name: str, shape: tuple[int, ...], int4: Path) -> None:
    tensors = dict(stored_tensors(int4)) | {name: torch.ones(shape)}
    module = name.removesuffix(".weight")
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        tensors.pop(f"{module}.{part}", None)
    with pytest.raises(ShapeError, match=re.escape(f"is {list(shape)}, but config.json asks for")) as refusal:
        load_decoder(model_config(int4), tensors.items(), LoadOptions("float32", use_mtp=True))
    assert refusal.value.tensor in (name, module)


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_experts_of_another_size_than_the_config_say_so(form: str, int4: Path) -> None:
    folder = int4 if form == "int4" else TINY_GLM5
    config = model_config(folder)
    other = replace(config, moe=replace(config.moe, intermediate_size=128, num_shared_experts=2))
    with pytest.raises(ShapeError, match=r"\[512, 256\], but config.json asks for \[256, 256\]") as refusal:
        load_decoder(other, stored_tensors(folder), OPTIONS)
    assert refusal.value.tensor == "model.layers.1.mlp.experts.0.gate_proj and up_proj"


def test_a_part_that_experts_of_this_form_do_not_have_is_named() -> None:
    name = "model.layers.2.mlp.experts.4.up_proj.weight_shape"
    tensors = [(name, torch.tensor([256, 256])), *stored_tensors(TINY_GLM5)]
    with pytest.raises(UnknownTensorError, match="stored as fp8 have no such part") as refusal:
        load_decoder(model_config(TINY_GLM5), tensors, OPTIONS)
    assert refusal.value.tensor == name


@pytest.mark.parametrize("name", ["mlp.gate_proj.bias", "self_attn.o_proj.bias", "self_attn.q_a_proj.bias"])
def test_a_bias_that_the_model_does_not_have_is_refused(name: str, int4: Path) -> None:
    extra = {f"model.layers.0.{name}": torch.zeros(1)} | dict(stored_tensors(int4))
    with pytest.raises(UnknownTensorError, match="no block") as refusal:
        load_decoder(model_config(int4), extra.items(), OPTIONS)
    assert refusal.value.tensor == f"model.layers.0.{name}"


def test_the_router_is_float32_whatever_activations_are(int4: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([1.0 + place / 1024 for place in range(8)])  # BF16 holds the first alone
    tensors = dict(stored_tensors(int4)) | {name: bias}
    block = load_decoder(model_config(int4), tensors.items(), LoadOptions("bfloat16")).layers[1].mlp
    assert isinstance(block, MoeBlock)
    assert torch.equal(block.router_bias, bias)
    assert torch.equal(block.router_weight, tensors["model.layers.1.mlp.gate.weight"].float())
    assert block.router_weight.dtype == torch.float32


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_int4_beside_fp8_is_the_same_model_expanded(compute: Any, tmp_path: Path) -> None:
    """Recipe glm-5.2-int4-fp8: experts INT4, all else FP8 as it came; expanded at load it differs by rounding alone."""
    options = memopt.PlanOptions(tensor_parallel=1)
    memopt.compress(TINY_GLM5, tmp_path / "out", recipe="glm-5.2-int4-fp8", options=options, workers=1, device="cpu")
    config, tensors = model_config(tmp_path / "out"), dict(stored_tensors(tmp_path / "out"))
    stored = load_decoder(config, tensors.items(), LoadOptions(compute))
    expanded = load_decoder(config, tensors.items(), LoadOptions(compute, "bf16"))
    assert {torch.int32, torch.float8_e4m3fn} <= {tensor.dtype for tensor in tensors.values()}
    ours, theirs = some_logits(stored), some_logits(expanded)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < (2e-3 if compute == "float32" else 0.03)
    assert sum(layer.mlp.size_bytes for layer in stored.layers) < sum(layer.mlp.size_bytes for layer in expanded.layers)


def test_float32_is_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="float32"):
        LoadOptions("float32", device="cuda")


def bytes_alive(arrays: list[weakref.ref[np.ndarray[Any, Any]]]) -> int:
    return sum(held.nbytes for ref in arrays if (held := ref()) is not None)


def test_what_was_streamed_is_let_go(int4: Path) -> None:
    """Of the stream one tensor is alive: experts are copied, and so is every view of a larger memory.

    Tensors come as views of one memory a file, as `Release.iter_tensors` yields them.
    """
    alive: list[weakref.ref[np.ndarray[Any, Any]]] = []
    largest = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal largest
        for name, tensor in stored_tensors(int4):
            # numpy's array lives as long as any tensor of it; a weak reference to a tensor tells nothing of its views.
            memory = np.append(tensor.reshape(-1).view(torch.uint8).numpy(), np.zeros(64, np.uint8))
            view = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            alive.append(weakref.ref(memory))
            del memory
            yield name, view
            del view
            gc.collect(0)
            largest = max(largest, bytes_alive(alive))

    decoder = load_decoder(model_config(int4), stream(), OPTIONS)
    # The one that was handed over last is still in the loader's hands.
    assert largest <= max(tensor.nbytes for _, tensor in stored_tensors(int4)) + 64
    assert bytes_alive(alive) == 0
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
