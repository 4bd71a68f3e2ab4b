"""`memopt plan --gpu`: the tables, the JSON and its schema, and what is refused."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tiny_checkpoints import TINY_GLM5, tiny_config

import memopt
from cli.invoke import invoke

SCHEMA = json.loads((Path(__file__).parent.parent.parent / "docs" / "plan.schema.json").read_text())
FORMULA = "layers=64,kv_heads=8,head_dim=128,tokens=32768,requests=16"
MANY = (
    "--stage", "both", "--prefill-recipe", "dequantize", "--context", "1000", "--requests", "3", "--mtp",
    "--kv-overhead-us", "5", "--kv-saving", "0.01", "--indexer-cache", "own", "--no-absorbed-copies",
    "--memory-fraction", "0.5", "--reserve-activations", "1GiB", "--reserve-graphs", "2GiB",
    "--reserve-communication", "3GiB", "--reserve-kv-scratch", "4GiB", "--reserve-runtime", "5GiB",
)  # fmt: skip


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    Draft202012Validator.check_schema(SCHEMA)
    return Draft202012Validator(SCHEMA)


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """A tiny GLM-5.2 without the layers and experts that would take long to list."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("glm-5.2-fp8")))
    return path


def planned(*arguments: str | Path) -> dict[str, Any]:
    outcome = invoke("plan", *arguments, "--json")
    assert outcome.code == 0, outcome.stderr
    return outcome.verdict


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--gpu", "h200"),
        ("--gpu", "h200", *MANY),
        ("--gpu-memory", "80GB", "--context", "64"),
        ("--kv-pool", "1GiB", "--context", "64"),
        ("--kv-format", "fp8_e4m3"),
        ("--gpu", "a100", "--gpu-bandwidth", "2TB", "--gpu-flops", "3e14", "--gpu-fp8-flops", "6e14", "--ep", "2"),
    ],
    ids=lambda options: " ".join(options)[:30] or "none",
)
def test_the_json_follows_its_schema(
    validator: Draft202012Validator, small_config: Path, options: tuple[str, ...]
) -> None:
    verdict = planned("--config", small_config, *options)
    validator.validate(verdict)
    assert (verdict["capacity"] is None) == (options == ())
    assert verdict["weights_per_gpu"]["num_ranks"] == verdict["tensor_parallel"]


def test_formula_and_refusals_follow_the_schema_too(validator: Draft202012Validator, small_config: Path) -> None:
    validator.validate(planned("--kv-formula", FORMULA))
    for arguments in (("--kv-formula", "layers=1"), ("--config", small_config, "--gpu", "none"), ("--gpu", "h200")):
        refused = invoke("plan", *arguments, "--json")
        assert refused.code == 2
        validator.validate(refused.verdict)


def test_the_schema_refuses_what_is_no_plan(validator: Draft202012Validator, small_config: Path) -> None:
    arguments = ("--gpu", "h200", "--context", "1000", "--stage", "both", "--prefill-recipe", "dequantize")
    verdict = planned("--config", small_config, *arguments)
    validator.validate(verdict)
    stage, prefill = verdict["capacity"]["stages"]
    for table, key, wrong in (
        (stage, "tokens", "many"),
        (stage, "tokens", None),
        (stage, "tokens", 100),
        (stage, "kv_pool_bytes", None),
        (stage, "reserves", None),
        (stage, "speed", None),
        (stage["speed"], "binds", None),
        (stage["speed"], "memory_seconds", None),
        (prefill, "stage", "decode"),
        (prefill["speed"], "requests", 2),
        (verdict["capacity"], "stages", [prefill, stage]),
        (verdict["capacity"], "gpu", None),
        (verdict["capacity"], "context", None),
        (verdict, "layouts", ["hub", "hub"]),
        (verdict, "engine_notes", [{"engine": "vllm", "message": "no severity"}]),
        (stage, "kv_format", "fp7"),
        (verdict["capacity"], "assumptions", []),
        (verdict["weights_per_gpu"], "num_ranks", 0),
        (verdict, "exit_code", 2),
    ):
        right = table[key]
        table[key] = wrong
        assert not validator.is_valid(verdict), key
        table[key] = right
    for table in (verdict, verdict["capacity"], stage, stage["speed"], stage["weights"], verdict["estimate"]):
        table["unplanned"] = 1
        assert not validator.is_valid(verdict)
        del table["unplanned"]
        key = next(iter(table))
        value = table.pop(key)
        assert not validator.is_valid(verdict), key
        table[key] = value
    validator.validate(verdict)


@pytest.mark.parametrize("option", [("--tp", "8"), ("--recipe", "copy"), ("--workers", "2"), ("--allow-code",)])
def test_the_formula_takes_no_option_that_it_would_not_use(option: tuple[str, ...]) -> None:
    refused = invoke("plan", "--kv-formula", FORMULA, *option)
    assert refused.code == 2
    assert "stands alone" in refused.refusal


def test_every_option_reaches_the_plan(small_config: Path) -> None:
    room = planned("--config", small_config, "--gpu", "h200", *MANY)["capacity"]
    decode, prefill = room["stages"]
    assert (room["context"], room["memory_fraction"], room["is_mtp_on"], room["indexer_cache"]) == (
        1000,
        0.5,
        True,
        "own",
    )
    assert (prefill["recipe"], prefill["weight_formats"], prefill["kv_format"]) == ("dequantize", ["BF16"], "bf16")
    assert decode["kv_layers"] == 4
    gib = 2**30
    assert [*decode["reserves"].values()] == [gib, 2 * gib, 3 * gib, 4 * gib, 5 * gib]
    assert decode["loaded_bytes"] == decode["weights"]["with_mtp"]["rank_size_bytes"]
    assert decode["speed"]["requests"] == 3
    assert decode["speed"]["kv_crossover"]["share"] == 0.01
    assert decode["speed"]["kv_crossover"]["breaks_even_length"] is None


def test_garbage_is_collected_again_after_a_plan_and_after_a_refusal(small_config: Path) -> None:
    for options, code in (((), 0), (("--tp", "3"), 2)):
        assert invoke("plan", "--config", small_config, *options).code == code
        assert gc.isenabled()


def test_people_read_the_same_numbers(small_config: Path) -> None:
    arguments = ("--config", small_config, "--gpu", "h200", "--stage", "both", "--prefill-recipe", "dequantize",
                 "--context", "1000")  # fmt: skip
    told, room = invoke("plan", *arguments), planned(*arguments)["capacity"]
    assert (told.code, told.stderr) == (0, "")
    text = " ".join(told.stdout.split())
    for stage in room["stages"]:
        for words in (f"{stage['tokens']:,}", f"{stage['requests']:,}", f"{stage['kv_bytes_per_token']:,} B",
                      stage["kv_format"], stage["speed"]["binds"]):  # fmt: skip
            assert words in text
    for sentence in room["assumptions"]:
        assert sentence in told.stdout
    assert "a bound by a model, not a measurement" in text
    assert "Where fp8_ds_mla KV starts to pay" in text
    assert "weights, " in next(line for line in told.stdout.splitlines() if line.startswith("a rank"))


def test_the_formula_for_people() -> None:
    text = " ".join(invoke("plan", "--kv-formula", FORMULA).stdout.split())
    for words in ("bf16 16 bits 128.0 GiB", "fp8_e4m3 8 bits 64.0 GiB", "int4 4 bits 32.0 GiB", "16 requests"):
        assert words in text


def test_a_checkpoint_on_disk_is_planned_as_its_config(tmp_path: Path) -> None:
    options = ("--gpu", "h100", "--tp", "4", "--context", "4096")
    from_files = planned(TINY_GLM5, *options)["capacity"]
    assert from_files == planned("--config", TINY_GLM5 / "config.json", *options)["capacity"]
    assert from_files["layout"] == "tp4"


def test_a_release_is_planned_as_the_plan_that_made_it(tmp_path: Path) -> None:
    options = ("--gpu", "h100", "--tp", "2", "--context", "4096")
    before = planned(TINY_GLM5, *options)["capacity"]
    memopt.compress(TINY_GLM5, tmp_path / "out", recipe="glm-5.2-int4", device="cpu")
    assert planned(tmp_path / "out", *options)["capacity"] == before


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--gpu", "h300"), "MEMOPT_USAGE", "known: a100"),
        (("--gpu-memory", "4GiB"), "MEMOPT_CAPACITY", "of l40s"),
        (("--gpu-memory", "0"), "MEMOPT_USAGE", "GPU memory of 0 bytes"),
        (("--gpu-memory", "lots"), "MEMOPT_USAGE", "'lots' is not a size"),
        (("--gpu-bandwidth", "4TB"), "MEMOPT_USAGE", "--gpu NAME or --gpu-memory"),
        (("--gpu-memory", "80GB", "--gpu-flops", "nan"), "MEMOPT_USAGE", "GPU BF16 rate of nan"),
        (("--gpu", "h200", "--context", "4097"), "MEMOPT_CAPACITY", "maximum of 4,096"),
        (("--gpu", "h200", "--context", "0"), "MEMOPT_USAGE", "context 0"),
        (("--gpu", "h200", "--context", "-3"), "MEMOPT_USAGE", "context -3"),
        (("--gpu", "h200", "--context", "9", "--requests", "0"), "MEMOPT_USAGE", "requests 0"),
        (("--gpu", "h200", "--requests", "9"), "MEMOPT_USAGE", "--context"),
        (("--gpu", "h200", "--context", "4096", "--requests", "100000000"), "MEMOPT_CAPACITY", "of that length"),
        (("--gpu", "h200", "--kv-format", "int4"), "MEMOPT_USAGE", "no KV format of MLA"),
        (("--gpu", "h200", "--memory-fraction", "2"), "MEMOPT_USAGE", "memory fraction 2"),
        (("--gpu", "h200", "--tp", "3"), "MEMOPT_ALIGNMENT", "legal:"),
        (("--gpu", "h200", "--stage", "both"), "MEMOPT_ALIGNMENT", "prefill stage, recipe copy"),
        (("--gpu", "h200", "--kv-formula", FORMULA), "MEMOPT_USAGE", "stands alone"),
        (("--gpu-memory", "141", "--context", "9"), "MEMOPT_USAGE", "with its unit, as 141GiB"),
        (("--gpu", "h200", "--gpu-flops", "1e-300", "--context", "9"), "MEMOPT_USAGE", "GPU BF16 rate of 1e-300"),
        (("--gpu", "h200", "--prefill-kv-format", "bf16"), "MEMOPT_USAGE", "only decode is planned"),
        (("--gpu", "h200", "--recipe", "copy", "--kv-format", "bf16"), "MEMOPT_USAGE", "only prefill is planned"),
        (("--memory-fraction", "0.5"), "MEMOPT_USAGE", "--memory-fraction: of what GPU?"),
        (("--kv-pool", "1GiB", "--reserve-kv-scratch", "1GiB"), "MEMOPT_USAGE", "--reserve-kv-scratch divides"),
        (("--gpu", "h200", "--kv-saving", "0.1"), "MEMOPT_USAGE", "--context TOKENS as well"),
        (("--kv-pool", "1GiB", "--context", "9", "--kv-overhead-us", "5"), "MEMOPT_USAGE", "--gpu NAME"),
        (("--gpu", "h200", "--kv-pool", "150GiB"), "MEMOPT_CAPACITY", "a pool below 140.4 GiB"),
    ],
)
def test_refusals_say_what_would_do(small_config: Path, options: tuple[str, ...], code: str, words: str) -> None:
    refused = invoke("plan", "--config", small_config, *options, "--json")
    assert (refused.code, refused.verdict["code"]) == (2, code)
    assert words in refused.refusal
