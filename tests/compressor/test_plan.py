"""The plan's figures, against published sizes, and its files to the byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from refusals import refusal
from tiny_checkpoints import CONFIGS, NAMES, make_checkpoint, tiny_config
from tiny_plans import checkpoint_of, plan_of, published, published_plan, recipe, tiny

import memopt
from memopt.compressor.compress_job import planned_sizes
from memopt.compressor.fingerprint import plan_fingerprint
from memopt.compressor.plan import PlanOptions
from memopt.compressor.recipe import DEFAULT_RECIPES
from memopt.compressor.tensor_plan import Fate
from memopt.errors import ConfigError, RecipeError, UnsupportedError, UsageError


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


def test_glm_5_2_from_its_config_alone() -> None:
    plan = memopt.plan_config(CONFIGS / "glm-5.2-fp8.json", "glm-5.2-int4")
    assert len(plan.source.tensors) == 118_629
    assert (gib(plan.source.size_bytes), gib(plan.weights_size_bytes)) == ("703.7", "419.9")
    assert plan.weights_size_bytes == 450_904_205_312
    assert plan.fate_counts == {Fate.QUANTIZED: 58_368, Fate.CONVERTED: 676, Fate.COPIED: 541}
    assert (plan.family, plan.tensor_parallel, plan.recipe.name) == ("glm_moe_dsa", 8, "glm-5.2-int4")
    assert json.loads(plan.index_bytes)["metadata"]["total_size"] == 450_904_205_312
    assert len(json.loads(plan.index_bytes)["weight_map"]) == 3 * 58_368 + 676 + 541


@pytest.mark.parametrize(
    ("config", "by", "size_bytes", "in_gib"),
    [
        ("glm-5.2-fp8", "glm-5.2-int4-fp8", 434_121_526_976, "404.3"),
        ("glm-5.2-fp8", "dequantize", 1_506_659_919_872, "1403.2"),
        ("kimi-k2.6-int4", "kimi-k2.6", 594_206_457_856, "553.4"),
        # The same form as Moonshot's own INT4 release, from its FP8 one: the same size.
        ("kimi-k2-instruct-fp8", "kimi-k2-int4", 594_206_457_856, "553.4"),
        ("glm-4.7-fp8", "glm-4.7-int4", 228_302_030_592, "212.6"),
    ],
)
def test_published_sizes(config: str, by: str, size_bytes: int, in_gib: str) -> None:
    plan = published_plan(config, by)
    assert (plan.weights_size_bytes, gib(plan.weights_size_bytes)) == (size_bytes, in_gib)


def test_a_recipe_of_ones_own_gives_the_figure_that_is_known_for_it() -> None:
    # Experts in groups of 128 and the MTP layer in BF16: 401.2 GiB.
    by = recipe(
        {"roles": ["routed_expert"], "names": [r"model\.layers\.78\..*"], "format": "bf16"},
        {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": 128}},
    )
    assert gib(plan_of(published("glm-5.2-fp8"), by).weights_size_bytes) == "401.2"


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_from_the_config_is_the_plan_from_the_files(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / name, name)
    from_files = memopt.plan(folder, "dequantize")
    from_config = memopt.plan_config(folder / "config.json", "dequantize")
    vision = {t.source.spec.name: t for t in from_files.tensors if t.source.spec.role == "vision"}
    assert bool(vision) == (name == "kimi-k2.6-int4")

    def outputs(plan: memopt.Plan) -> set[tuple[str, str, tuple[int, ...]]]:
        return {(o.name, o.dtype, o.shape) for t in plan.tensors for o in t.outputs if t.source.spec.name not in vision}

    assert outputs(from_files) == outputs(from_config)


def test_the_files_of_a_run_are_the_plans_to_the_byte(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8")
    options = PlanOptions(max_file_bytes=2_000_000)
    plan = memopt.plan(source, "glm-5.2-int4", options=options)
    sizes = planned_sizes(plan)
    result = memopt.compress(source, tmp_path / "out", recipe="glm-5.2-int4", options=options)
    found = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert found == sizes
    assert result.total_size_bytes == sum(sizes.values())
    assert result.weights_size_bytes == plan.weights_size_bytes
    assert len(plan.units) > 2
    for file in plan.small_files:
        assert hashlib.sha256((tmp_path / "out" / file.name).read_bytes()).hexdigest() == file.sha256


@pytest.mark.parametrize("name", NAMES)
def test_the_index_names_every_output_and_its_file(name: str) -> None:
    checkpoint = tiny(name)
    plan = plan_of(checkpoint, DEFAULT_RECIPES[checkpoint.config.model_type], max_file_bytes=10**6)
    index = json.loads(plan.index_bytes)
    assert index["weight_map"] == {header.name: unit.file_name for unit in plan.units for header in unit.layout}
    assert index["metadata"]["total_size"] == sum(unit.data_size_bytes for unit in plan.units)
    assert sorted(index["weight_map"]) == sorted(o.name for t in plan.tensors for o in t.outputs)
    assert plan.input_size_bytes == checkpoint.size_bytes


def test_the_config_is_rewritten_only_where_something_changed() -> None:
    checkpoint = tiny("glm-5.2-fp8")
    assert plan_of(checkpoint, "copy").config_bytes == checkpoint.config.raw_bytes
    written = json.loads(plan_of(checkpoint, "glm-5.2-int4").config_bytes)
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {k: v for k, v in written.items() if k != "quantization_config"} == {
        k: v for k, v in checkpoint.config.raw.items() if k != "quantization_config"
    }


def test_the_fingerprint_changes_with_anything_that_changes_bytes() -> None:
    def fingerprint(by: str = "glm-5.2-int4", config: str = "glm-5.2-fp8", seed: int = 0, **options: object) -> str:
        changes = {"max_position_embeddings": seed} if seed else {}
        return plan_fingerprint(plan_of(checkpoint_of(tiny_config(config, **changes)), by, **options))

    base = fingerprint()
    assert base == fingerprint()
    others = [
        fingerprint("glm-5.1-int4"),
        fingerprint(config="glm-5.1-fp8"),
        fingerprint(seed=1),
        fingerprint(max_file_bytes=10**6),
        fingerprint(release_name="other"),
        fingerprint(allow_code=True),
    ]
    assert len({base, *others}) == len(others) + 1


def test_the_default_recipe_is_the_familys(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for name in NAMES:
        config = tiny_config(name)
        path.write_text(json.dumps(config))
        assert memopt.plan_config(path).recipe.name == DEFAULT_RECIPES[config["model_type"]]
    path.write_text('{"model_type": "llama"}')
    with refusal(UnsupportedError, "config.json", "'llama'", "glm_moe_dsa"):
        memopt.plan_config(path)


def test_what_the_config_lacks_is_told_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("glm-4.7-fp8", hidden_size=None)))
    with refusal(ConfigError, "config.json", "hidden_size"):
        memopt.plan_config(path)


@pytest.mark.parametrize("size", [0, -1, 7])
def test_a_file_size_that_holds_nothing_is_refused(size: int) -> None:
    with refusal(UsageError, str(size), "holds nothing"):
        plan_of(tiny("glm-4.7-fp8"), "copy", max_file_bytes=size)


def test_every_shipped_recipe_refuses_the_other_families() -> None:
    for name in NAMES:
        checkpoint = tiny(name)
        for by, families in (("glm-5.2-int4", {"glm_moe_dsa"}), ("glm-4.7-int4", {"glm4_moe"})):
            if checkpoint.config.model_type not in families:
                with refusal(RecipeError, by, checkpoint.config.model_type):
                    plan_of(checkpoint, by)
