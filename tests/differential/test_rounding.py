"""INT4 bytes of whole releases are the torch reference's, from an FP8 source and from its BF16 twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import memopt
from differential.reference_weights import (
    float8_block,
    int4_modules,
    read_config,
    read_tensors,
    reference_weights,
    same_bits,
)
from differential.releases import ALL, PORTABLE, Releases
from memopt.kernels.int4_reference import quantize_int4
from memopt.kernels.int4_spec import Int4Spec

ROUNDED = sorted(set(ALL) - {"kimi-k2.6"})


def spec_of(recipe: str | memopt.Recipe) -> Int4Spec:
    loaded = memopt.load_recipe(recipe) if isinstance(recipe, str) else recipe
    int4 = loaded.rules[0].format
    return Int4Spec(int4.weights_per_scale, int4.scale, int4.norm)


def rounded(module: str, tensors: dict[str, Tensor], config: dict, spec: Int4Spec) -> tuple[Tensor, Tensor]:
    """Packed codes and BF16 scales of a stored module, by the reference."""
    weight = tensors[module + ".weight"]
    scale = tensors.get(module + ".weight_scale_inv", tensors.get(module + ".weight_scale"))
    if scale is None:
        rows = quantize_int4(weight, None, None, spec)
    else:
        rows = quantize_int4(weight, scale.to(torch.float32), float8_block(config, weight, scale), spec)
    return rows.packed, rows.scale_bits.view(torch.bfloat16)


def assert_rounded_by_the_reference(source: Path, release: Path, spec: Int4Spec) -> None:
    stored, config, written = read_tensors(source), read_config(source), read_tensors(release)
    modules = int4_modules(written)
    assert modules
    for module in modules:
        packed, scale = rounded(module, stored, config, spec)
        assert same_bits(written[module + ".weight_packed"], packed), module
        assert same_bits(written[module + ".weight_scale"], scale), module


@pytest.mark.parametrize("name", ROUNDED)
def test_int4_bytes_of_an_fp8_source(name: str, releases: Releases) -> None:
    release = releases.release(name)
    assert_rounded_by_the_reference(release.source, release.folder, spec_of(ALL[name][1]))


@pytest.mark.parametrize("name", sorted(PORTABLE))
def test_other_weights_are_the_source_in_bf16(name: str, releases: Releases) -> None:
    release = releases.release(name)
    expected, written = reference_weights(release.source), read_tensors(release.folder)
    others = [tensor for tensor in expected if tensor.removesuffix(".weight") not in int4_modules(written)]
    assert others
    for tensor in others:
        assert same_bits(written[tensor], expected[tensor]), tensor


@pytest.mark.parametrize("name", sorted(PORTABLE))
def test_int4_bytes_of_a_bf16_source(name: str, releases: Releases, tmp_path: Path) -> None:
    """FP8 to BF16, then the same recipe: the codes are the rounding of those BF16 values, the rest is untouched."""
    checkpoint, recipe = PORTABLE[name]
    twin, again = tmp_path / "bf16", tmp_path / "again"
    options = memopt.PlanOptions(tensor_parallel=1)
    memopt.dequantize(releases.source(checkpoint), twin, workers=1)
    memopt.compress(twin, again, recipe=recipe, options=options, workers=1, device="cpu")
    assert_rounded_by_the_reference(twin, again, spec_of(recipe))
    from_fp8, from_bf16 = releases.release(name), read_tensors(again)
    stored = read_tensors(from_fp8.folder)
    assert set(stored) == set(from_bf16)
    for tensor in set(stored) - {f"{m}.{p}" for m in int4_modules(stored) for p in ("weight_packed", "weight_scale")}:
        assert same_bits(stored[tensor], from_bf16[tensor]), tensor
    assert read_config(again) == read_config(from_fp8.folder)
