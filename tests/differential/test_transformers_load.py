"""transformers loads every release to the weights that the references give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from differential.reference_weights import negative_share, read_tensors, reference_weights, same_bits
from differential.releases import MIXED, NATIVE, PORTABLE, POSITIVE_SCALES, VARIANTS, Releases
from differential.transformers_models import load_model, loaded_weights

# transformers keeps these in float32 whatever is asked; every BF16 value is a float32 value.
FLOAT32_IN_MEMORY = ("mlp.gate.weight", "indexer.weights_proj.weight", "e_score_correction_bias")


def assert_same_weights(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], num_layers: int) -> None:
    """Every loaded weight is the expected one; only MTP layers, the vision tower and buffers are left over."""
    assert set(loaded) <= set(expected)
    for name in set(expected) - set(loaded):
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None
        assert (layer is not None and layer >= num_layers) or name.startswith(("vision_tower", "mm_projector")), name
    for name, tensor in loaded.items():
        wanted = expected[name]
        if name.endswith(FLOAT32_IN_MEMORY):
            wanted = wanted.to(tensor.dtype)
        assert same_bits(tensor, wanted), name


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("name", sorted(PORTABLE | VARIANTS))
def test_portable_release_is_the_reference(name: str, dequantize: bool, releases: Releases) -> None:
    release = releases.release(name)
    tensors = read_tensors(release.folder)
    if name in POSITIVE_SCALES:
        assert negative_share(tensors) == 0
    else:
        assert 0.2 < negative_share(tensors) < 0.8  # mse-signed: about half of the scales are negative
    model = load_model(release.folder, dequantize=dequantize)
    assert_same_weights(
        loaded_weights(model), reference_weights(release.folder), model.config.get_text_config().num_hidden_layers
    )


@pytest.mark.parametrize("name", sorted(MIXED))
def test_mixed_release_is_the_reference(name: str, releases: Releases) -> None:
    release = releases.release(name)
    tensors = read_tensors(release.folder)
    assert negative_share(tensors) > 0.2
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    model = load_model(release.folder, dequantize=True)
    assert_same_weights(loaded_weights(model), reference_weights(release.folder), model.config.num_hidden_layers)


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_native_int4_release_is_the_reference(name: str, releases: Releases) -> None:
    release = releases.release(name)
    model = load_model(release.folder, dequantize=True)
    assert_same_weights(
        loaded_weights(model), reference_weights(release.folder), model.config.get_text_config().num_hidden_layers
    )


@pytest.mark.parametrize("name", sorted(PORTABLE | MIXED))
def test_release_and_its_export_give_the_same_logits(name: str, releases: Releases) -> None:
    release = releases.release(name)
    tokens = torch.randint(512, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        of_release = load_model(release.folder, dequantize=True)(tokens).logits
        of_export = load_model(release.export, dequantize=False)(tokens).logits
    assert torch.isfinite(of_release).all()
    assert same_bits(of_release, of_export)


def test_transformers_does_not_know_kimi_k2(releases: Releases) -> None:
    """When this fails, docs/engines.md and load_model no longer need the deepseek_v3 detour."""
    with pytest.raises(ValueError, match="kimi_k2"):
        AutoConfig.from_pretrained(releases.release("kimi-k2").folder)
