"""A calibrated release: its codes, its figures, what it says of its data, and that its bytes depend on nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_runs import compress, experts, ledger_errors, options, recipe, weight_bytes, write_ids
from faults.small_source import edit_tensor, make_small_source
from loaded_models import load, stored_tensors
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.calibrate.calibrated_rounding import round_calibrated
from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.expert_rounding import RoundingOptions
from memopt.compressor.calibrate.layer_places import weight_of
from memopt.compressor.calibrate.module_statistics import StatisticsCollector
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibration_store import CalibrationStore
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.token_windows import Window, packed_windows
from memopt.compressor.evaluate.window_rows import batches, step_rows
from memopt.compressor.recipe import Int4Format
from memopt.errors import (
    ContentError,
    DataFileError,
    NonFiniteError,
    QualityGateError,
    RecipeError,
    UnsupportedError,
    UsageError,
)
from memopt.kernels.kv_formats import kv_format
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.model.experts import MlpExperts
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.model.norms import rms_norm

GPTQ = recipe([experts("gptq")])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("source") / "checkpoint")


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("data") / "ids.safetensors")


@pytest.fixture(scope="module")
def release(source: Path, ids: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "out"
    compress(source, out, GPTQ, options(ids))
    return out


def rows_into_experts(source: Path, ids: Path, layer: int) -> tuple[torch.Tensor, MoeBlock]:
    """What the experts of `layer` read when the whole model runs in one step, as the runtime serves it."""
    model = load(source)
    data = read_token_data(ids, model.config.vocab_size, None)
    asked = options(ids)
    packed = packed_windows(data, asked.num_samples, asked.sample_tokens)
    (batch,) = batches([Window(number, 0, row) for number, row in enumerate(packed)], 10**6)
    rows = step_rows(batch, "cpu")
    pools = new_kv_pools(
        model.config, kv_format("fp32"), batch.num_pages + 1, num_layers=layer + 1, num_kv_heads_here=1
    )
    x = model.embedding(rows.token_ids)
    rope = model.rotary.cos_sin(rows.positions)
    for number in range(layer):
        x, _ = model.layers[number](x, rows, pools.layers[number], None, rope)
    last = model.layers[layer]
    attended, _ = last.attention(rms_norm(x, last.input_norm, last.eps), rows, pools.layers[layer], None, rope)
    assert isinstance(last.mlp, MoeBlock)
    return rms_norm(x + attended, last.post_norm, last.eps), last.mlp


def test_codes_are_those_of_the_rounding_with_inputs_from_the_whole_model(
    source: Path, ids: Path, release: Path
) -> None:
    x, moe = rows_into_experts(source, ids, 1)
    assert isinstance(moe.experts, MlpExperts)
    chosen = moe.routing(x).expert_ids
    stored = dict(stored_tensors(release))
    form = Int4Format(type="int4", method="gptq")
    for expert, mlp in enumerate(moe.experts.mlps):
        rows = x[(chosen == expert).any(dim=1)].to(torch.bfloat16)
        collector = StatisticsCollector(1, x.shape[1], with_hessian=True)
        collector.add(rows)
        wanted = round_calibrated(weight_of(mlp.gate_up)[None], collector.finish(), form, RoundingOptions(min_tokens=2))
        name = f"model.layers.1.mlp.experts.{expert}."
        packed = torch.cat([stored[f"{name}{part}_proj.weight_packed"] for part in ("gate", "up")])
        scale = torch.cat([stored[f"{name}{part}_proj.weight_scale"] for part in ("gate", "up")])
        assert len(rows) > 8
        assert torch.equal(packed, wanted.packed[0])
        assert torch.equal(scale.view(torch.int16), wanted.scale_bits[0])


def test_every_expert_is_better_than_plain_rounding_and_says_what_it_saw(source: Path, release: Path) -> None:
    errors = ledger_errors(release)
    # One MoE layer and the MTP layer, of four experts each.
    assert len(errors) == 2 * 4 * 3
    for figures in errors.values():
        assert figures["calibrated_error"] <= figures["plain_error"]
        assert figures["tokens"] >= 8
        assert 0.01 <= figures["damping"] < 1
        assert figures["fallback"] == 0
    mean = {key: sum(entry[key] for entry in errors.values()) for key in ("calibrated_error", "plain_error")}
    assert mean["calibrated_error"] < 0.7 * mean["plain_error"]


def test_release_json_names_the_data_by_its_digest_alone(ids: Path, release: Path) -> None:
    table = json.loads((release / "release.json").read_text())
    assert table["calibration"] == {
        "data_sha256": options(ids).identity().sha256,
        "data_size_bytes": ids.stat().st_size,
        "samples": 6,
        "tokens": 144,
        "activations": "float32",
        "coverage_tokens": 8,
    }
    assert "torch" in table["tool"]
    assert not (release / ".memopt").exists()


def test_another_run_of_it_is_complete_and_other_data_is_refused(
    source: Path, ids: Path, release: Path, tmp_path: Path
) -> None:
    assert compress(source, release, GPTQ, options(ids)).was_complete
    other = write_ids(tmp_path / "other.safetensors", seed=1)
    with pytest.raises(UsageError, match="finished release of another"):
        compress(source, release, GPTQ, options(other))


def test_bytes_depend_neither_on_batches_nor_on_threads_nor_on_memory(
    source: Path, ids: Path, release: Path, tmp_path: Path
) -> None:
    one_expert_at_a_time = 128 * 128 * 120 + 2**20
    asked = options(ids, batch_tokens=24, memory_bytes=one_expert_at_a_time)
    compress(source, tmp_path / "out", GPTQ, asked, workers=1)
    assert weight_bytes(tmp_path / "out") == weight_bytes(release)


def test_weighted_needs_no_hessian_and_is_another_release(
    source: Path, ids: Path, release: Path, tmp_path: Path
) -> None:
    compress(source, tmp_path / "out", recipe([experts("weighted")]), options(ids, memory_bytes=2**23))
    errors = ledger_errors(tmp_path / "out")
    assert all(figures["calibrated_error"] <= figures["plain_error"] for figures in errors.values())
    assert {figures["damping"] for figures in errors.values()} == {0}
    assert weight_bytes(tmp_path / "out").keys() == weight_bytes(release).keys()


def test_attention_and_dense_layers_see_inputs_of_quantized_ones(tmp_path: Path) -> None:
    small = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", **small, num_nextn_predict_layers=0)
    ids = write_ids(tmp_path / "ids.safetensors")
    rules = [
        experts("gptq"),
        {"roles": ["attention", "dense_mlp", "shared_expert"], "format": {"type": "int4", "method": "gptq"}},
    ]
    compress(source, tmp_path / "out", recipe(rules, "glm4_moe"), options(ids))
    errors = ledger_errors(tmp_path / "out")
    assert {"model.layers.0.mlp.down_proj.weight", "model.layers.2.self_attn.o_proj.weight"} <= errors.keys()
    for name, figures in errors.items():
        assert figures["calibrated_error"] <= figures["plain_error"], name
        assert figures["calibrated_error"] > 0, name


def test_a_second_mtp_layer_is_refused_before_anything_is_written(ids: Path, tmp_path: Path) -> None:
    small = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    source = make_checkpoint(
        tmp_path / "source", "glm-4.7-fp8", **small, num_hidden_layers=2, num_nextn_predict_layers=2
    )
    with pytest.raises(UnsupportedError, match="layer 3 is a second MTP layer"):
        compress(source, tmp_path / "out", recipe([experts("gptq")], "glm4_moe"), options(ids))
    assert not (tmp_path / "out").exists()
    plain = {"names": [r"model\.layers\.3\..*"], "roles": ["routed_expert"], "format": {"type": "int4"}}
    compress(source, tmp_path / "out", recipe([plain, experts("gptq")], "glm4_moe"), options(ids))
    calibrated = {
        name.split(".")[2] for name, figures in ledger_errors(tmp_path / "out").items() if "tokens" in figures
    }
    assert calibrated == {"1", "2"}


def test_experts_behind_the_last_layer_with_data_are_not_rounded_twice(
    source: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []
    write_part = CalibrationStore.write_part

    def watched(store: CalibrationStore, layer: int, label: str, *rest: Any) -> None:
        parts.append(f"{layer} {label}")
        write_part(store, layer, label, *rest)

    monkeypatch.setattr(CalibrationStore, "write_part", watched)
    attention = {"roles": ["attention"], "format": {"type": "int4", "method": "weighted"}}
    compress(source, tmp_path / "out", recipe([experts("rtn"), attention]), options(ids))
    assert [part for part in parts if "experts" in part] == ["1 experts-00000-00004"]


def test_only_a_layer_that_shares_a_selection_is_left_one(
    ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    source = make_checkpoint(
        tmp_path / "source", "glm-5.2-fp8", **small, index_topk=16, num_nextn_predict_layers=1,
        indexer_types=["full", "full", "shared"],
    )  # fmt: skip
    names: set[str] = set()
    rows = CalibrationRun.rows

    def watched(run: CalibrationRun, name: str, *rest: Any, **more: Any) -> RowFile:
        names.add(name)
        return rows(run, name, *rest, **more)

    monkeypatch.setattr(CalibrationRun, "rows", watched)
    compress(source, tmp_path / "out", recipe([experts("weighted")]), options(ids))
    assert {name for name in names if "selection" in name} == {"selection-00002"}
    assert "mtp-hidden-00003" in names


def test_dense_projections_are_calibrated_on_few_tokens_too(source: Path, ids: Path, tmp_path: Path) -> None:
    """Coverage is a matter of experts: what all tokens reach is never rounded plainly for their number."""
    attention = {"roles": ["attention"], "format": {"type": "int4", "method": "weighted"}}
    asked = options(ids, num_samples=1, sample_tokens=3, coverage_tokens=1000)
    compress(source, tmp_path / "out", recipe([attention]), asked)
    found = {
        (name.split(".")[2], figures["tokens"], figures["fallback"])
        for name, figures in ledger_errors(tmp_path / "out").items()
    }
    assert found == {("0", 3, 0), ("1", 3, 0), ("2", 2, 0)}


def test_plain_and_calibrated_formats_mix(source: Path, ids: Path, tmp_path: Path) -> None:
    plain = {"names": [r"model\.layers\.2\..*"], "roles": ["routed_expert"], "format": {"type": "int4"}}
    compress(source, tmp_path / "out", recipe([plain, experts("gptq")]), options(ids))
    plainly = tmp_path / "plain"
    memopt.compress(source, plainly, recipe=recipe([experts("rtn")]), device="cpu")
    mixed, stored = dict(stored_tensors(tmp_path / "out")), dict(stored_tensors(plainly))
    same = {name for name in stored if torch.equal(mixed[name], stored[name])}
    packed = {name for name in stored if name.endswith("weight_packed")}
    assert {name for name in packed if ".layers.2." in name} == packed & same


def test_experts_without_enough_tokens_fall_back_and_the_budget_stops_the_release(source: Path, tmp_path: Path) -> None:
    # Two tokens of one sample cannot cover four experts with eight tokens each, forced ones included.
    ids = write_ids(tmp_path / "ids.safetensors", 2)
    asked = options(ids, num_samples=1, sample_tokens=2, coverage_tokens=16)
    with pytest.raises(
        QualityGateError, match=r"fell back .* max_fallback allows 1.00%: .* \(too few tokens\)"
    ) as found:
        compress(source, tmp_path / "out", GPTQ, asked)
    assert found.value.exit_code == 5
    assert not (tmp_path / "out" / "release.json").exists()
    lenient = recipe([experts("gptq", max_fallback=1.0)])
    compress(source, tmp_path / "lenient", lenient, asked)
    errors = ledger_errors(tmp_path / "lenient")
    assert {figures["fallback"] for figures in errors.values()} == {1}
    assert all(figures["calibrated_error"] == figures["plain_error"] for figures in errors.values())
    # A quarter of 8 is enough: all experts get both tokens, but of the MTP layer the one that has a token after it.
    compress(source, tmp_path / "enough", lenient, options(ids, num_samples=1, sample_tokens=2, coverage_tokens=8))
    found = {
        (name.split(".")[2], figures["tokens"], figures["fallback"])
        for name, figures in ledger_errors(tmp_path / "enough").items()
    }
    assert found == {("1", 2, 0), ("2", 1, 1)}


def test_forced_tokens_cover_experts_that_few_choose(source: Path, ids: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "out", GPTQ, options(ids, coverage_tokens=100))
    errors = ledger_errors(tmp_path / "out")
    forced = {name: figures for name, figures in errors.items() if figures["forced_tokens"]}
    assert forced
    for figures in forced.values():
        assert figures["tokens"] == 100
        assert 0 < figures["forced_tokens"] < 100
    assert all(figures["tokens"] >= 100 for figures in errors.values())


def test_down_alone_is_calibrated_behind_rounded_gate_and_up(source: Path, ids: Path, tmp_path: Path) -> None:
    down = {"names": [r".*\.down_proj\.weight"], **experts("gptq")}
    asked = options(ids, coverage_tokens=100)
    compress(source, tmp_path / "out", recipe([down, experts("rtn")]), asked)
    errors = {name: figures for name, figures in ledger_errors(tmp_path / "out").items() if "tokens" in figures}
    assert {name.split(".")[-2] for name in errors} == {"down_proj"}
    assert all(figures["tokens"] >= 100 for figures in errors.values())
    assert any(figures["forced_tokens"] for figures in errors.values())
    total = {key: sum(entry[key] for entry in errors.values()) for key in ("calibrated_error", "plain_error")}
    assert 0 < total["calibrated_error"] < 0.9 * total["plain_error"]


def half_of(method: str, part: str = "gate") -> list[dict[str, object]]:
    """A rule for one of gate and up of shared experts."""
    return [{"names": [rf".*shared_experts\.{part}_proj\.weight"], "format": {"type": "int4", "method": method}}]


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ([{"roles": ["kv_b"], "format": {"type": "int4", "method": "gptq"}}], "does not reach kv_b"),
        (
            [
                {"names": [r".*experts\.\d+\.up_proj\.weight"], "format": {"type": "int4", "method": "weighted"}},
                experts("gptq"),
            ],
            "different forms",
        ),
        ([{"names": [r".*experts\.0\..*"], "format": {"type": "int4", "method": "gptq"}}], "of 12 weights"),
        ([*half_of("rtn"), experts("gptq")], "the other of gate and up would not"),
        ([*half_of("gptq"), experts("gptq")], "the other of gate and up would not"),
        ([*half_of("rtn"), *half_of("weighted", "up"), experts("gptq")], "different forms"),
    ],
)
def test_recipes_that_calibration_cannot_follow(
    source: Path, ids: Path, tmp_path: Path, rules: list[dict[str, object]], fault: str
) -> None:
    with pytest.raises(RecipeError, match=fault):
        compress(source, tmp_path / "out", recipe(rules), options(ids))


@pytest.mark.parametrize(
    "name", ["mlp.experts.2.up_proj.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight"]
)
def test_a_weight_that_is_no_number_is_named(name: str, ids: Path, tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    tensor = f"model.layers.1.{name}"

    def spoil(raw: bytearray) -> None:
        raw[6:8] = b"\xff\x7f"

    file = edit_tensor(source, tensor, spoil)
    with pytest.raises(NonFiniteError, match=r"element \d is not a finite number") as found:
        compress(source, tmp_path / "out", GPTQ, options(ids))
    assert (found.value.tensor, found.value.file) == (tensor, file.name)


def test_inputs_that_overflow_name_their_layer(ids: Path, tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")

    def enlarge(raw: bytearray) -> None:
        # 2.5e38 in BF16: finite, but not when an input's square is summed.
        raw[:] = b"\x3d\x7f" * (len(raw) // 2)

    edit_tensor(source, "model.layers.1.post_attention_layernorm.weight", enlarge)
    with pytest.raises(ContentError, match="NaN or infinite") as found:
        compress(source, tmp_path / "out", GPTQ, options(ids))
    assert found.value.tensor == "model.layers.1"


def test_data_that_does_not_do_is_refused(source: Path, ids: Path, tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="7 samples of 24 need"):
        compress(source, tmp_path / "out", GPTQ, options(ids, num_samples=7))
    with pytest.raises(UsageError, match="needs no calibration data"):
        compress(source, tmp_path / "out", recipe([experts("rtn")]), options(ids))
    with pytest.raises(UsageError, match="needs calibration data"):
        memopt.compress(source, tmp_path / "out", recipe=GPTQ, device="cpu")
    with pytest.raises(UsageError, match="one expert needs"):
        compress(source, tmp_path / "small", GPTQ, options(ids, memory_bytes=1000))
    assert not list(tmp_path.iterdir())
