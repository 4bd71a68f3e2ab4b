"""Recipes: YAML from outside that says one thing clearly, or is refused by the field that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal, within_seconds
from tiny_plans import EVERY_FAMILY, INT4_EXPERTS, plan_of, recipe, specs_of, tiny

from memopt.compressor.families.registry import FAMILIES
from memopt.compressor.recipe import (
    DEFAULT_RECIPES,
    MAX_RECIPE_SIZE_BYTES,
    Int4Format,
    Recipe,
    load_recipe,
    parse_recipe,
    shipped_recipe_names,
)
from memopt.errors import LayoutError, RecipeError

GOOD: dict[str, Any] = {"name": "mine", "description": "d", "families": ["glm4_moe"], "default": "bf16"}
SHIPPED = (
    "copy", "dequantize", "glm-4.7-int4", "glm-5.1-int4", "glm-5.2-int4", "glm-5.2-int4-fp8", "glm-5.2-int4-gptq",
    "kimi-k2-int4", "kimi-k2.6",
)  # fmt: skip


def parse(table: Any) -> Recipe:
    return parse_recipe(yaml.safe_dump(table).encode(), "mine.yaml")


def test_the_shipped_recipes_are_these() -> None:
    assert shipped_recipe_names() == SHIPPED
    assert set(DEFAULT_RECIPES) == set(FAMILIES)
    assert all(family in load_recipe(name).families for family, name in DEFAULT_RECIPES.items())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_parses_and_is_called_as_its_file(name: str) -> None:
    shipped = load_recipe(name)
    assert shipped.name == name
    assert shipped.description
    assert set(shipped.families) <= set(FAMILIES)


def test_the_default_recipes_form() -> None:
    shipped = load_recipe("glm-5.2-int4")
    (rule,) = shipped.rules
    assert rule.roles == ("routed_expert",)
    assert rule.format == Int4Format(type="int4", method="rtn", group_size=32, scale="mse-signed", norm="2")
    assert (shipped.default.type, shipped.engines) == ("bf16", ("vllm", "sglang", "transformers"))
    assert shipped.tensor_parallel == 8


def test_no_name_and_no_file_lists_what_is_shipped() -> None:
    with refusal(RecipeError, "'glm-6-int4'", *SHIPPED):
        load_recipe("glm-6-int4")
    with refusal(RecipeError, "there is no recipe"):
        load_recipe("x" * 300)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"defaults": "bf16"}, ("defaults", "Extra inputs")),
        ({"rules": [{"role": ["router"], "format": "bf16"}]}, ("rules.0.role", "Extra inputs")),
        ({"rules": [{"roles": ["router"], "format": {"type": "int4", "bits": 4}}]}, ("rules.0.format", "bits")),
        ({"rules": [{"roles": ["router"], "format": {"type": "int8"}}]}, ("rules.0.format", "'int8'")),
        ({"rules": [{"roles": ["experts"], "format": "bf16"}]}, ("rules.0.roles.0", "routed_expert")),
        ({"rules": [{"format": "bf16"}]}, ("rules.0", "needs roles or names")),
        ({"rules": [{"roles": [], "names": [], "format": "bf16"}]}, ("rules.0", "needs roles or names")),
        ({"rules": [{"roles": ["router"]}]}, ("rules.0.format", "required")),
        ({"rules": {"roles": ["router"], "format": "bf16"}}, ("rules", "tuple")),
        ({"rules": [{"names": ["("], "format": "bf16"}]}, ("rules.0.names", "'('", "not a regular expression")),
        ({"rules": [{"names": ["a{99999999999999999999}"], "format": "bf16"}]}, ("rules.0.names", "too large")),
        ({"rules": [{"names": ["a" * 501], "format": "bf16"}]}, ("rules.0.names", "501 characters", "500")),
        ({"rules": [{"names": [3], "format": "bf16"}]}, ("rules.0.names.0", "string")),
        ({"default": {"type": "int4", "group_size": 48}}, ("default", "group_size", "'channel'")),
        ({"default": {"type": "int4", "group_size": "32"}}, ("default", "group_size")),
        ({"default": {"type": "int4", "group_size": True}}, ("default", "group_size")),
        ({"default": {"type": "int4", "scale": "max"}}, ("default", "scale", "mse-signed")),
        ({"default": {"type": "int4", "norm": 3}}, ("default", "norm", "2.4")),
        ({"default": {"type": "int4", "method": "awq"}}, ("default", "method", "'gptq'")),
        ({"default": {"type": "int4", "damping": 0.01}}, ("default", "damping", "weighted or gptq")),
        ({"default": {"type": "int4", "max_fallback": 0.01}}, ("default", "max_fallback", "weighted or gptq")),
        ({"default": {"type": "int4", "method": "gptq", "damping": None}}, ("default.damping", "no value")),
        ({"default": {"type": "int4", "method": "gptq", "damping": True}}, ("damping", "not true or false")),
        ({"default": {"type": "int4", "method": "gptq", "damping": 0}}, ("default", "damping", "greater than 0")),
        ({"default": {"type": "int4", "method": "gptq", "scale": "absmax"}}, ("default", "mse or mse-signed")),
        ({"default": {"type": "int4", "method": "weighted", "norm": 2.4}}, ("default", "norm: 2")),
        ({"default": {"type": "int4", "method": "gptq", "max_fallback": "1"}}, ("max_fallback", '"1%"')),
        ({"default": {"type": "int4", "method": "gptq", "max_fallback": "x%"}}, ("max_fallback", "float")),
        ({"default": {"type": "int4", "method": "gptq", "max_fallback": "101%"}}, ("max_fallback", "less than")),
        ({"default": {"type": "int4", "method": "gptq", "max_fallback": True}}, ("max_fallback", "true or false")),
        ({"kv_cache": {"format": "int8"}}, ("kv_cache.format", "'fp8_e4m3'")),
        ({"kv_cache": {}}, ("kv_cache.format", "required")),
        ({"kv_cache": {"format": "fp8_e4m3", "scales": "dynamic"}}, ("kv_cache.scales", "'calibrated'")),
        ({"kv_cache": {"format": "fp8_e4m3", "percentile": 100}}, ("kv_cache.percentile", "less than 100")),
        ({"kv_cache": {"format": "fp8_e4m3", "scales": "unit", "percentile": 99.9}}, ("kv_cache", "calibrated")),
        ({"gate": {}}, ("gate", "needs one of", "kl_max")),
        ({"gate": {"kl": 0.05}}, ("gate.kl", "Extra inputs")),
        ({"gate": {"kl_max": -1}}, ("gate.kl_max", "greater than or equal to 0")),
        ({"gate": {"kl_max": float("nan")}}, ("gate.kl_max",)),
        ({"gate": {"top1_min": 90}}, ("gate.top1_min", "less than or equal to 1")),
        ({"gate": {"kl_max": True}}, ("gate.kl_max", "not true or false")),
        ({"gate": {"top1_min": 0.9, "kl_max": None}}, ("gate.kl_max", "no value", "leave the line out")),
        ({"gate": None}, ("gate: has no value",)),
        ({"default": None}, ("default: has no value",)),
        ({"rules": [{"roles": [None], "format": "bf16"}]}, ("rules.0.roles.0: has no value",)),
        ({"families": []}, ("families", "at least 1")),
        ({"families": "glm4_moe"}, ("families", "tuple")),
        ({"families": ["llama"]}, ("families", "unknown family llama", *EVERY_FAMILY)),
        ({"engines": ["vllm", "tensorrt"]}, ("engines.1", "'sglang'")),
        ({"tensor_parallel": 0}, ("tensor_parallel", "greater")),
        ({"tensor_parallel": "8"}, ("tensor_parallel", "integer")),
        ({"tensor_parallel": True}, ("tensor_parallel", "not true or false")),
        ({"tensor_parallel": 1.5}, ("tensor_parallel", "integer")),
        ({"name": "../x"}, ("name", "pattern")),
        ({"name": ""}, ("name", "pattern")),
        ({"name": "a\n"}, ("name", "pattern")),
        ({"name": 3}, ("name", "string")),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: tuple[str, ...]) -> None:
    parse(GOOD)
    with refusal(RecipeError, "mine.yaml", *words):
        parse(GOOD | change)


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_missing_field_is_named(field: str) -> None:
    with refusal(RecipeError, "mine.yaml", field, "required"):
        parse({key: value for key, value in GOOD.items() if key != field})


@pytest.mark.parametrize("method", ["weighted", "gptq"])
def test_a_calibrated_format_fills_in_what_it_needs(method: str) -> None:
    form = parse(GOOD | {"default": {"type": "int4", "method": method}}).default
    assert isinstance(form, Int4Format)
    assert (form.is_calibrated, form.damping, form.max_fallback) == (True, 0.01, 0.01)
    form = parse(GOOD | {"default": {"type": "int4", "method": method, "damping": 0.1, "max_fallback": "2.5%"}}).default
    assert isinstance(form, Int4Format)
    assert (form.damping, form.max_fallback) == (0.1, 0.025)


def test_what_needs_calibration() -> None:
    rounded = {"roles": ["router"], "format": {"type": "int4"}}
    solved = {"roles": ["router"], "format": {"type": "int4", "method": "gptq"}}
    calibrated, unit = ({"format": "fp8_e4m3", "scales": scales} for scales in ("calibrated", "unit"))
    assert not parse(GOOD | {"rules": [rounded], "kv_cache": unit}).needs_calibration
    assert parse(GOOD | {"rules": [rounded, solved]}).needs_calibration
    assert parse(GOOD | {"kv_cache": calibrated}).needs_calibration
    assert parse(GOOD | {"default": {"type": "int4", "method": "weighted"}}).needs_calibration


def test_gate_and_kv_cache() -> None:
    table = GOOD | {"gate": {"kl_max": 0.05, "top1_min": "90%"}, "kv_cache": {"format": "fp8_e4m3"}}
    found = parse(table)
    assert found.gate is not None
    assert (found.gate.kl_max, found.gate.top1_min, found.gate.score_drop_max_points) == (0.05, 0.9, None)
    assert found.kv_cache is not None
    assert (found.kv_cache.scales, found.kv_cache.percentile) == ("calibrated", None)


def test_what_was_not_asked_for_is_not_written() -> None:
    rule = {"roles": ["routed_expert"], "format": {"type": "int4", "group_size": 32}}
    written = parse(GOOD | {"rules": [rule]}).model_dump(mode="json")
    assert written["rules"][0]["format"] == {
        "type": "int4", "method": "rtn", "group_size": 32, "scale": "mse-signed", "norm": "2",
    }  # fmt: skip
    assert "gate" not in written
    assert "kv_cache" not in written
    solved = parse(GOOD | {"default": {"type": "int4", "method": "gptq"}, "gate": {"kl_max": 0.05}})
    written = solved.model_dump(mode="json")
    assert written["default"]["damping"] == 0.01
    assert written["gate"] == {"kl_max": 0.05}
    assert Recipe.model_validate(written) == solved


BASE = yaml.safe_dump(GOOD)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("recipe", "dictionary")),
        ("[]", ("recipe", "dictionary")),
        ("just words", ("recipe", "dictionary")),
        (BASE + "name: again\n", ("'name'", "twice")),
        (BASE + "rules:\n- {roles: [router], roles: [norm], format: bf16}\n", ("'roles'", "twice")),
        (BASE + "? [1]\n: 2\n", ("not a string",)),
        (BASE + "1: 2\n", ("not a string",)),
        ("a: &a [x]\nb: *a\n", ("aliases",)),
        (BASE + "<<: {engines: [vllm]}\n", ("merge",)),
        ("a: [", ("not a recipe",)),
        ("a: b: c", ("not a recipe",)),
        ("\tname: x", ("not a recipe",)),
        ("name: !!python/object/apply:os.system [true]\n", ("python/object",)),
        (BASE + "tensor_parallel: !!bool maybe\n", ("not a recipe",)),
        (BASE + "tensor_parallel: !!int ''\n", ("not a recipe",)),
        (BASE + "engines: !!timestamp soon\n", ("not a recipe",)),
        (BASE + "tensor_parallel: " + "9" * 5000 + "\n", ("not a recipe",)),
        ("a: 1\n---\nb: 2\n", ("document",)),
        (BASE + "rules: " + "[" * 100_000, ("nested",)),
        (BASE + "rules: " + "{a: " * 100_000, ("nested",)),
        ("- " * 5000, ("nested",)),
    ],
)
def test_yaml_that_is_no_recipe(text: str, words: tuple[str, ...]) -> None:
    with within_seconds(10), refusal(RecipeError, "mine.yaml", *words):
        parse_recipe(text.encode(), "mine.yaml")


def test_an_alias_bomb_costs_nothing() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    with within_seconds(5), refusal(RecipeError, "mine.yaml", "aliases are not read"):
        parse_recipe(bomb.encode(), "mine.yaml")


def test_a_recipe_of_the_largest_size_does_not_take_minutes() -> None:
    text = (BASE + "".join(f"k{n}: 1\n" for n in range(MAX_RECIPE_SIZE_BYTES // 10)))[:MAX_RECIPE_SIZE_BYTES]
    with within_seconds(30), refusal(RecipeError, "mine.yaml", "k0"):
        parse_recipe(text.encode(), "mine.yaml")


def test_bytes_that_are_not_utf8() -> None:
    with refusal(RecipeError, "mine.yaml", "utf-8"):
        parse_recipe(b"name: \xff", "mine.yaml")


def test_a_file_by_path_a_huge_file_and_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(BASE)
    assert load_recipe(str(path)).name == "mine"
    with path.open("wb") as stream:
        stream.truncate(2**40)
    with within_seconds(5), refusal(RecipeError, "mine.yaml", f"{2**40:,}", f"{MAX_RECIPE_SIZE_BYTES:,}"):
        load_recipe(str(path))
    with refusal(LayoutError, str(tmp_path), "not a regular file"):
        load_recipe(str(tmp_path))


@given(raw=st.binary(max_size=60) | st.text("abn:[]{}*&!|>-? \n'\"0.e#,", max_size=60).map(str.encode))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_recipe_error(raw: bytes) -> None:
    with pytest.raises(RecipeError, match=r"mine\.yaml"):
        parse_recipe(raw, "mine.yaml")


def test_names_and_roles_must_both_match_and_the_first_rule_wins() -> None:
    specs = specs_of(tiny("glm-4.7-fp8"))
    made = recipe(
        {
            "roles": ["routed_expert"],
            "names": [r".*layers\.1\..*", r".*layers\.2\..*up_proj\.weight"],
            "format": "keep",
        },
        INT4_EXPERTS,
        {"names": [r"model\.layers\.0\.mlp\..*"], "format": "keep"},
    )

    def form(name: str) -> str:
        return made.format_of(specs[name]).type

    assert form("model.layers.1.mlp.experts.3.down_proj.weight") == "keep"
    assert form("model.layers.2.mlp.experts.3.up_proj.weight") == "keep"
    assert form("model.layers.2.mlp.experts.3.down_proj.weight") == "int4"
    assert form("model.layers.1.mlp.shared_experts.up_proj.weight") == "bf16"
    assert form("model.layers.0.mlp.up_proj.weight") == "keep"
    # A pattern must match the whole name.
    assert recipe({"names": ["lm_head"], "format": "keep"}).format_of(specs["lm_head.weight"]).type == "bf16"


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"roles": ["indexer"], "format": "keep"}], ("roles indexer",)),
        ([{"names": [r"model\.layers\.7\..*"], "format": "keep"}], (r"names model\.layers\.7\..*",)),
        (
            [{"roles": ["norm"], "names": ["lm_head.weight"], "format": "keep"}],
            ("roles norm and names lm_head.weight",),
        ),
        (
            [INT4_EXPERTS, {"names": [r".*\.experts\..*"], "format": "keep"}],
            (r"names .*\.experts\..*", "rule before it"),
        ),
    ],
)
def test_a_rule_that_matches_nothing_is_refused(rules: list[dict[str, Any]], words: tuple[str, ...]) -> None:
    with refusal(RecipeError, "recipe test", "matches no tensor", *words):
        plan_of(tiny("glm-4.7-fp8"), recipe(*rules))


def test_a_recipe_of_another_family_is_refused() -> None:
    with refusal(RecipeError, "glm-5.2-int4", "glm_moe_dsa", "the checkpoint is glm4_moe"):
        plan_of(tiny("glm-4.7-fp8"), "glm-5.2-int4")


@pytest.mark.parametrize(("norm", "expected"), [(2, "2"), (2.0, "2"), (2.4, "2.4"), ("2.4", "2.4")])
def test_the_norm_may_be_a_number(norm: Any, expected: str) -> None:
    assert Int4Format(type="int4", norm=norm).norm == expected


def test_channel_is_one_scale_a_row() -> None:
    assert Int4Format(type="int4", group_size="channel").weights_per_scale is None
    assert Int4Format(type="int4", group_size=128).weights_per_scale == 128
