"""Calibrated scales of an FP8 KV cache: planned, measured, written for engines, and read by the runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_runs import compress, experts, options, recipe, weight_bytes, write_ids
from faults.small_source import make_small_source
from loaded_models import load, model_config, stored_tensors
from signing_keys import fixed_key
from thread_ranks import ThreadRank, run_ranks
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.token_windows import Window, packed_windows
from memopt.compressor.evaluate.window_rows import batches, step_rows
from memopt.compressor.plan import PlanOptions
from memopt.errors import RecipeError
from memopt.kernels.kv_formats import kv_format
from memopt.manifests.signer import KeySigner
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.verified_model import load_verified
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.kv_range import KvRange
from memopt.runtime.kv.kv_scales import KvScales, kv_scales_of
from memopt.runtime.model.model_config import GqaConfig

CALIBRATED = {"format": "fp8_e4m3", "scales": "calibrated"}
SMALL = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}


def observed(source: Path, data: Path, percentile: float = 100.0) -> dict[int, tuple[float, float]]:
    """Scales of the decoder's layers when the source runs in one step."""
    model, config = load(source), model_config(source)
    asked = options(data)
    packed = packed_windows(read_token_data(data, config.vocab_size, None), asked.num_samples, asked.sample_tokens)
    (batch,) = batches([Window(number, 0, row) for number, row in enumerate(packed)], 10**6)
    kv_range = KvRange()
    heads = config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1
    pools = new_kv_pools(
        config,
        kv_format("fp32"),
        batch.num_pages + 1,
        num_layers=config.num_layers,
        num_kv_heads_here=heads,
        kv_range=kv_range,
    )
    model.forward(step_rows(batch, "cpu"), pools)
    found = kv_range.scales(percentile).layers
    return {
        layer: (float(entry.k.max()), float((entry.k if entry.v is None else entry.v).max()))
        for layer, entry in found.items()
    }


@pytest.mark.parametrize("name", ["mla", "gqa"])
@pytest.mark.parametrize("percentile", [None, 99.0])
def test_scales_are_those_that_the_runtime_observes(tmp_path: Path, name: str, percentile: float | None) -> None:
    if name == "mla":
        source = make_small_source(tmp_path / "source")
    else:
        source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", **SMALL, num_nextn_predict_layers=0)
    data = write_ids(tmp_path / "ids.safetensors")
    choice: dict[str, Any] = CALIBRATED if percentile is None else CALIBRATED | {"percentile": percentile}
    family = "glm_moe_dsa" if name == "mla" else "glm4_moe"
    # Weights stay as they are in all layers but the last: the source itself gives the same keys.
    rule = {"names": [r"model\.layers\.2\..*experts\.\d+\..*"], **experts("rtn")}
    form = recipe([rule], family, kv_cache=choice)
    compress(source, tmp_path / "out", form, options(data))
    found = kv_scales_of(model_config(tmp_path / "out"), stored_tensors(tmp_path / "out")).layers
    assert set(found) == {0, 1, 2}
    for layer, (k, v) in observed(source, data, percentile or 100.0).items():
        entry = found[layer]
        assert float(entry.k) == k
        assert float(entry.k if entry.v is None else entry.v) == v
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    }  # fmt: skip


def test_scales_are_those_of_the_release_whatever_passes_came_before(tmp_path: Path) -> None:
    """Each stage of the attention is a pass over all samples; the keys of the last one are those that are stored."""
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", **SMALL, num_nextn_predict_layers=0)
    data = write_ids(tmp_path / "ids.safetensors")
    attention = {"roles": ["attention"], "format": {"type": "int4", "method": "gptq", "group_size": "channel"}}
    form = recipe([attention], "glm4_moe", kv_cache=CALIBRATED)
    compress(source, tmp_path / "out", form, options(data))
    found = kv_scales_of(model_config(tmp_path / "out"), stored_tensors(tmp_path / "out")).layers
    of_source = observed(source, data)
    for layer, (k, v) in observed(tmp_path / "out", data).items():
        assert (float(found[layer].k), float(found[layer].v)) == (k, v)
    # A layer of the source has larger keys: they would show if they counted.
    assert any(of_source[layer][0] > float(found[layer].k) for layer in found)


def test_scales_are_in_rank_files_and_survive_shard_and_merge(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    data = write_ids(tmp_path / "ids.safetensors")
    form = recipe([experts("weighted")], kv_cache=CALIBRATED)
    both = PlanOptions(tensor_parallel=2)
    compress(source, tmp_path / "both", form, options(data), options=both)
    compress(source, tmp_path / "hub", form, options(data))
    memopt.shard(tmp_path / "hub", tmp_path / "sharded", tensor_parallel=2)
    memopt.merge(tmp_path / "both", tmp_path / "merged")
    hub = {name: raw for name, raw in weight_bytes(tmp_path / "hub").items() if name.endswith(".safetensors")}
    merged = weight_bytes(tmp_path / "merged")
    assert {name: merged[name] for name in hub} == hub
    for rank in range(2):
        tensors = dict(stored_tensors(tmp_path / "both" / "tp2" / f"rank-{rank}"))
        whole = dict(stored_tensors(tmp_path / "hub"))
        names = {name for name in whole if name.endswith(("k_scale", "v_scale"))}
        assert len(names) == 6
        assert all(torch.equal(tensors[name], whole[name]) for name in names)
    again = compress(source, tmp_path / "hub", form, options(data))
    assert again.was_complete


def test_ranks_that_have_their_files_alone_load_the_scales_of_the_hub_files(tmp_path: Path) -> None:
    """`--tp 2 --layout tp`: no hub files at all, signed, each rank loading its own."""
    source = make_small_source(tmp_path / "source")
    data = write_ids(tmp_path / "ids.safetensors")
    form = recipe([experts("weighted")], kv_cache=CALIBRATED)
    ranks = PlanOptions(tensor_parallel=2, layout="tp")
    assert compress(source, tmp_path / "ranks", form, options(data), options=ranks).layouts == ("tp2",)
    compress(source, tmp_path / "hub", form, options(data))
    assert not list((tmp_path / "ranks").glob("*.safetensors"))
    key = fixed_key(1)
    memopt.sign_release(tmp_path / "ranks", [KeySigner(key)], memopt.SignOptions("acme/ranks", 1))

    def scales(rank: ThreadRank) -> KvScales:
        return load_verified(tmp_path / "ranks", None, key.public_key, EngineOptions(tensor_parallel=2), rank).scales

    hub = kv_scales_of(model_config(tmp_path / "hub"), stored_tensors(tmp_path / "hub")).layers
    assert set(hub) == {0, 1, 2}
    assert len({float(entry.k) for entry in hub.values()}) == len(hub)
    for found in run_ranks(2, scales):
        assert {layer: float(entry.k) for layer, entry in found.layers.items()} == {
            layer: float(entry.k) for layer, entry in hub.items()
        }
    memopt.merge(tmp_path / "ranks", tmp_path / "merged")
    merged, whole = weight_bytes(tmp_path / "merged"), weight_bytes(tmp_path / "hub")
    names = {name for name in whole if name.endswith((".safetensors", "config.json"))}
    assert {name: merged[name] for name in names} == {name: whole[name] for name in names}


def test_a_bf16_export_has_no_scales_and_says_why(tmp_path: Path) -> None:
    """vLLM 0.32 refuses `self_attn.k_scale` without a quantization_config (`make test-vllm` loads such an export)."""
    source = make_small_source(tmp_path / "source")
    data = write_ids(tmp_path / "ids.safetensors")
    compress(source, tmp_path / "out", recipe([experts("rtn")], kv_cache=CALIBRATED), options(data))
    memopt.dequantize(tmp_path / "out", tmp_path / "export")
    assert not any(name.endswith("_scale") for name, _ in stored_tensors(tmp_path / "export"))
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "export" / "ledger.jsonl").read_text().splitlines()]
    dropped = {row["tensor"]: row["reason"] for row in rows if row.get("fate") == "dropped"}
    assert set(dropped) == {f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(3) for part in "kv"}
    assert all("no place" in reason for reason in dropped.values())


def test_a_release_with_scales_is_compressed_again_and_keeps_them(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    data = write_ids(tmp_path / "ids.safetensors")
    compress(source, tmp_path / "out", recipe([experts("rtn")], kv_cache=CALIBRATED), options(data))
    memopt.compress(tmp_path / "out", tmp_path / "copy", recipe="copy", device="cpu")
    first, second = dict(stored_tensors(tmp_path / "out")), dict(stored_tensors(tmp_path / "copy"))
    assert first.keys() == second.keys()
    with pytest.raises(RecipeError, match="brings scales"):
        compress(tmp_path / "copy", tmp_path / "third", recipe([], kv_cache=CALIBRATED), options(data))


def test_scales_without_quantized_weights_have_no_place(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    with pytest.raises(RecipeError, match="need INT4 or FP8 weights"):
        memopt.plan(source, recipe([], kv_cache=CALIBRATED))
