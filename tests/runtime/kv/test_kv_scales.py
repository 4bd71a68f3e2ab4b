"""KV scales in a release's stream: found, left out of the weights, checked, written back under the same names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers_attention import deepseek_pair, glm4_pair

from memopt.errors import ShapeError, UnknownTensorError
from memopt.runtime.kv.kv_scales import KvScaleFilter, kv_scales_of
from memopt.runtime.model.model_config import ModelConfig

MLA = replace(deepseek_pair().config, num_layers=4, num_mtp_layers=0)
GQA = replace(glm4_pair().config, num_layers=4, num_mtp_layers=1)


def one(name: str, *values: float) -> tuple[str, torch.Tensor]:
    return f"model.layers.{name}", torch.tensor(values)


def test_scales_are_taken_out_of_the_stream() -> None:
    weights = [one("0.self_attn.q_proj.weight", 1.0), one("0.mlp.k_scale", 1.0)]
    found = KvScaleFilter(MLA)
    stream = [weights[0], one("1.self_attn.k_scale", 0.5), weights[1], one("1.self_attn.v_scale", 0.5)]
    assert list(found.rest(stream)) == weights
    scales = found.scales()
    assert float(scales.of_layer(1).k) == 0.5
    assert scales.of_layer(1).v is None
    assert float(scales.of_layer(0).k) == 1.0


def test_scales_of_heads_and_the_names_they_go_out_under() -> None:
    tensors = [one("1.self_attn.k_scale", 0.5, 2.0), one("1.self_attn.v_scale", 4.0), one("3.self_attn.v_scale", 8.0)]
    scales = kv_scales_of(GQA, tensors)
    assert scales.of_layer(1).k.tolist() == [0.5, 2.0]
    # One of the two stands for both.
    assert float(scales.of_layer(3).k) == 8.0
    written = {name: value.tolist() for name, value in scales.tensors()}
    assert written == {
        "model.layers.1.self_attn.k_scale": [0.5, 2.0],
        "model.layers.1.self_attn.v_scale": [4.0],
        "model.layers.3.self_attn.k_scale": [8.0],
        "model.layers.3.self_attn.v_scale": [8.0],
    }
    again = kv_scales_of(GQA, scales.tensors())
    assert {name: value.tolist() for name, value in again.tensors()} == written


def test_names_below_a_prefix() -> None:
    config = replace(MLA, name_prefix="language_model.")
    name, scale = one("0.self_attn.k_scale", 0.5)
    found = kv_scales_of(config, [(f"language_model.{name}", scale)])
    assert [key for key, _ in found.tensors("language_model.")] == [
        "language_model.model.layers.0.self_attn.k_scale",
        "language_model.model.layers.0.self_attn.v_scale",
    ]


def test_bf16_scales_are_widened() -> None:
    name, scale = one("0.self_attn.k_scale", 0.5)
    assert kv_scales_of(MLA, [(name, scale.to(torch.bfloat16))]).of_layer(0).k.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (MLA, [1.0, 1.0], r"is \[2\], but \[\] or \[1\] is needed"),
        (GQA, [1.0, 1.0, 1.0], r"is \[3\], but \[\] or \[1\] or \[2\] is needed"),
        (GQA, [1.0, 0.0], "holds 0.0, but a scale is finite and above 0"),
        (MLA, [float("nan")], "holds nan"),
        (MLA, [float("inf")], "holds inf"),
    ],
)
def test_refusals(config: ModelConfig, values: list[float], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        kv_scales_of(config, [one("0.self_attn.k_scale", *values)])


def test_scales_of_a_layer_that_is_not_there_are_refused() -> None:
    assert float(kv_scales_of(GQA, [one("4.self_attn.v_scale", 2.0)]).of_layer(4).k) == 2.0  # the MTP layer
    for config, layer in ((MLA, 4), (GQA, 5)):
        name, scale = one(f"{layer}.self_attn.k_scale", 2.0)
        with pytest.raises(UnknownTensorError, match=f"{name}: the model has {layer} layers"):
            kv_scales_of(config, [(name, scale)])
