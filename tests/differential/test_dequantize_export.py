"""`memopt dequantize` gives the references' BF16 weights, bit for bit, in a checkpoint that is plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationScheme

import memopt
from differential.reference_weights import quantization_block, read_config, read_tensors, reference_weights, same_bits
from differential.releases import ALL, Releases
from differential.transformers_models import load_model, loaded_weights

FP8_SOURCES = ("glm-5.2-fp8", "glm-5.1-fp8", "glm-4.7-fp8", "kimi-k2-instruct-fp8", "deepseek-v3-fp8", "tiny-glm5-fp8")


def assert_plain(folder: Path) -> None:
    """No quantization block anywhere in config.json, and nothing but BF16 and F32 in the files."""
    assert "quantization_config" not in (folder / "config.json").read_text()
    assert {tensor.dtype for tensor in read_tensors(folder).values()} <= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("name", sorted(ALL))
def test_export_is_the_reference(name: str, releases: Releases) -> None:
    release = releases.release(name)
    expected = reference_weights(release.folder)
    exported = read_tensors(release.export)
    assert set(exported) == set(expected)
    for tensor_name, tensor in exported.items():
        assert same_bits(tensor, expected[tensor_name]), tensor_name
    assert_plain(release.export)


@pytest.mark.parametrize("name", sorted(ALL))
def test_export_loads_as_a_plain_model(name: str, releases: Releases) -> None:
    release = releases.release(name)
    model = load_model(release.export, dequantize=False)
    assert getattr(model, "hf_quantizer", None) is None
    expected = reference_weights(release.folder)
    for tensor_name, tensor in loaded_weights(model).items():
        assert same_bits(tensor.to(expected[tensor_name].dtype), expected[tensor_name]), tensor_name


@pytest.mark.parametrize("name", sorted(ALL))
def test_config_keeps_everything_but_the_block(name: str, releases: Releases) -> None:
    release = releases.release(name)
    source, export = read_config(release.source), read_config(release.export)
    for table in (source, source.get("text_config", {})):
        table.pop("quantization_config", None)
    assert export == source


@pytest.mark.parametrize("checkpoint", FP8_SOURCES)
def test_fp8_source_is_the_reference(checkpoint: str, releases: Releases, tmp_path: Path) -> None:
    source = releases.source(checkpoint)
    memopt.dequantize(source, tmp_path / "out", workers=2)
    expected, exported = reference_weights(source), read_tensors(tmp_path / "out")
    assert set(exported) == set(expected)
    for name, tensor in exported.items():
        assert same_bits(tensor, expected[name]), name
    assert_plain(tmp_path / "out")


@pytest.mark.parametrize("checkpoint", [name for name in FP8_SOURCES if name != "glm-4.7-fp8"])
def test_block_fp8_source_is_compressed_tensors_own(checkpoint: str, releases: Releases, tmp_path: Path) -> None:
    source = releases.source(checkpoint)
    memopt.dequantize(source, tmp_path / "out", workers=1)
    theirs = FP8BlockDequantizer.from_pretrained(source).process(read_tensors(source))
    ours = read_tensors(tmp_path / "out")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert same_bits(tensor, theirs[name]), name


def test_channel_fp8_source_is_compressed_tensors_own(releases: Releases, tmp_path: Path) -> None:
    source = releases.source("glm-4.7-fp8")
    memopt.dequantize(source, tmp_path / "out", workers=1)
    block = quantization_block(read_config(source))
    assert block is not None
    scheme = QuantizationScheme.model_validate(block["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(block["format"])
    stored, ours = read_tensors(source), read_tensors(tmp_path / "out")
    modules = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert modules
    for module in modules:
        state = {part: stored[f"{module}.{part}"] for part in ("weight", "weight_scale")}
        theirs = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
        assert same_bits(ours[module + ".weight"], theirs), module
