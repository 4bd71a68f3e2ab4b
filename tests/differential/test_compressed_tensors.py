"""compressed-tensors' own code reads every release: its config, its matching, and its decompression, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from differential.reference_weights import (
    int4_modules,
    negative_share,
    quantization_block,
    read_config,
    read_tensors,
    reference_weights,
    same_bits,
)
from differential.releases import ALL, MIXED, PORTABLE, POSITIVE_SCALES, VARIANTS, Releases
from memopt.kernels.int4_reference import dequantize_int4, pack_int4, unpack_int4

PACKED = "pack-quantized"
FLOAT = "float-quantized"


def config_of(releases: Releases, name: str) -> QuantizationConfig:
    """The release's block as compressed-tensors parses it: unknown keys inside a group are errors there."""
    return QuantizationConfig.model_validate(quantization_block(read_config(releases.release(name).folder)))


def scheme_of(config: QuantizationConfig, form: str) -> QuantizationScheme:
    """The one group stored in `form`."""
    found = [group for group in config.config_groups.values() if (group.format or config.format) == form]
    assert len(found) == 1
    return found[0]


def decompress(form: str, state: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    return BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"]


@pytest.mark.parametrize("name", sorted(ALL))
def test_int4_modules_decompress_to_the_reference(name: str, releases: Releases) -> None:
    folder = releases.release(name).folder
    tensors, expected = read_tensors(folder), reference_weights(folder)
    scheme = scheme_of(config_of(releases, name), PACKED)
    modules = int4_modules(tensors)
    assert modules
    for module in modules:
        state = {part: tensors[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
        assert same_bits(decompress(PACKED, state, scheme), expected[module + ".weight"]), module
    if name in PORTABLE.keys() | MIXED.keys() | VARIANTS.keys() - POSITIVE_SCALES:
        assert negative_share(tensors) > 0.2


@pytest.mark.parametrize("name", sorted(MIXED))
def test_fp8_modules_decompress_to_the_reference(name: str, releases: Releases) -> None:
    folder = releases.release(name).folder
    tensors, expected = read_tensors(folder), reference_weights(folder)
    scheme = scheme_of(config_of(releases, name), FLOAT)
    weights = [weight for weight, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert weights
    for weight in weights:
        state = {"weight": tensors[weight], "weight_scale": tensors[weight + "_scale"]}
        assert same_bits(decompress(FLOAT, state, scheme).to(torch.bfloat16), expected[weight]), weight


@pytest.mark.parametrize("name", sorted(PORTABLE | VARIANTS | MIXED))
def test_matching_finds_exactly_the_quantized_modules(name: str, releases: Releases) -> None:
    """By compressed-tensors' matcher, a Linear is of the group that it is stored in, or of none."""
    tensors = read_tensors(releases.release(name).folder)
    config = config_of(releases, name)
    linear = torch.nn.Linear(1, 1)
    stored = dict.fromkeys(int4_modules(tensors), PACKED)
    for weight, tensor in tensors.items():
        module, _, last = weight.rpartition(".")
        if last == "weight" and tensor.ndim == 2 and not module.endswith("embed_tokens"):
            stored[module] = FLOAT if tensor.dtype == torch.float8_e4m3fn else "none"
    assert len(set(stored.values())) == (3 if name in MIXED else 2)
    for module, form in stored.items():
        # The first group that matches counts, as in vLLM.
        groups = [
            group.format or config.format
            for group in config.config_groups.values()
            if is_match(module, linear, group.targets, config.ignore)
        ]
        assert [*groups, "none"][0] == form, module


def int4_scheme(group_size: int | None) -> QuantizationScheme:
    strategy = "channel" if group_size is None else "group"
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy=strategy, group_size=group_size)
    return QuantizationScheme(targets=["Linear"], weights=arguments)


@st.composite
def packed_weights(draw: st.DrawFn) -> tuple[Tensor, Tensor, int | None]:
    """Any codes and normal BF16 scales of either sign (their products normal too), any legal shape."""
    group_size = draw(st.sampled_from([32, 64, 128, None]))
    rows = draw(st.integers(1, 6))
    columns = 8 * draw(st.integers(1, 20)) if group_size is None else group_size * draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    shape = (rows, 1 if group_size is None else columns // group_size)
    exponents = torch.randint(1, 250, shape, generator=generator, dtype=torch.int32)
    mantissas = torch.randint(0, 128, shape, generator=generator, dtype=torch.int32)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int32)
    bits = (signs << 15) | (exponents << 7) | mantissas
    return codes, bits.to(torch.int16).view(torch.bfloat16), group_size


@settings(deadline=None, max_examples=100)
@given(packed_weights())
def test_any_codes_and_scales_decompress_alike(case: tuple[Tensor, Tensor, int | None]) -> None:
    codes, scale, group_size = case
    packed = pack_int4(codes)
    state = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(codes.shape)}
    theirs = decompress(PACKED, state, int4_scheme(group_size))
    assert same_bits(theirs, dequantize_int4(packed, scale, group_size))


@settings(deadline=None, max_examples=100)
@given(packed_weights())
def test_packing_is_theirs(case: tuple[Tensor, Tensor, int | None]) -> None:
    codes, _, _ = case
    packed = pack_to_int32(codes, 4)
    assert same_bits(pack_int4(codes), packed)
    assert same_bits(unpack_int4(packed), unpack_from_int32(packed, 4, codes.shape))


@settings(deadline=None, max_examples=50)
@given(packed_weights())
def test_their_compression_of_our_weights_gives_our_codes_back(case: tuple[Tensor, Tensor, int | None]) -> None:
    """Against a stored scale, negative or not, compressing a decompressed weight changes nothing."""
    codes, scale, group_size = case
    packed = pack_int4(codes)
    weight = dequantize_int4(packed, scale, group_size)
    compressor = BaseCompressor.get_value_from_registry(PACKED)
    again = compressor.compress({"weight": weight, "weight_scale": scale}, int4_scheme(group_size))
    assert same_bits(again["weight_packed"], packed)
