"""Patterns from outside: those that people write are read, those that would hang the matcher are refused."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal, within_seconds
from tiny_checkpoints import tiny_config
from tiny_plans import checkpoint_of, plan_of

from memopt.compressor.quantization_config import EXPERT_PATTERN
from memopt.compressor.safe_pattern import compile_pattern
from memopt.errors import ConfigError, RecipeError

NAME = "language_model.model.layers.60.mlp.experts.383.gate_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head$",
        r".*mlp\.(gate|up|gate_up|down)_proj.*",
        r"^(?!.*mlp\.experts\.).*",
        r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight",
        r".*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
        r"(vision_tower|mm_projector)\.[A-Za-z0-9_.]+",
        r"model\.layers\.[0-9]{1,2}\.self_attn\.(kv_)?b_proj",
        r"(abc){2}[]()|*+?{}^]+\(\|\*",
        "a{b}",
        EXPERT_PATTERN.removeprefix("re:"),
    ],
)
def test_patterns_that_people_write_are_read(pattern: str) -> None:
    assert compile_pattern(pattern).pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(.*)*x", "repeated group"),
        ("(a+)+$", "repeated group"),
        ("(?:a|a)*x", "repeated group"),
        ("((a|b)c){9}", "repeated group"),
        ("((a*)b)+x", "repeated group"),
        ("(a?){30}", "repeated group"),
        ("(.*){9,}x", "repeated group"),
        (".*.*.*.*.*x", "too many ways"),
        ("a?" * 40 + "a" * 40, "too many ways"),
        ("(a|aa)" * 40, "too many ways"),
        (".*?.*+.*.{0,9}.{,9}x", "too many ways"),
        (r"(.*)\1", "back-reference"),
        ("(?i)a", "flags"),
        ("(?P<a>b)", "flags"),
        ("a{1001}", "1000"),
        ("(", "regular expression"),
        ("a" * 501, "501 characters"),
    ],
)
def test_patterns_that_could_hang_are_refused(pattern: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        compile_pattern(pattern)


@given(st.text(r"ab.*+?|()[]{}2,\^", max_size=14))
@settings(max_examples=400, deadline=None)
def test_whatever_is_read_is_matched_at_once(pattern: str) -> None:
    try:
        compiled = compile_pattern(pattern)
    except ValueError:
        return
    started = time.process_time()
    for name in ("a" * 40 + "!", "ab" * 20 + "!", NAME):
        re.fullmatch(compiled, name)
    assert time.process_time() - started < 2, pattern


@pytest.mark.parametrize("pattern", ["re:(.*)*x", "re:(a|a)*x", "re:" + "[a-z_.]*" * 9 + "!"])
def test_a_hostile_ignore_list_of_the_source_is_refused(pattern: str) -> None:
    config = tiny_config("kimi-k2.6-int4")
    config["text_config"]["quantization_config"]["ignore"] = [pattern]
    with within_seconds(20), refusal(ConfigError, "config.json", "ignore", repr(pattern[3:])):
        plan_of(checkpoint_of(config), "copy")


def test_a_hostile_pattern_in_a_recipe_is_refused() -> None:
    from memopt.compressor.recipe import parse_recipe

    text = "name: x\ndescription: d\nfamilies: [glm4_moe]\ndefault: keep\nrules:\n- {names: ['(.*)*x'], format: bf16}\n"
    with refusal(RecipeError, "mine.yaml", "rules.0.names", "repeated group"):
        parse_recipe(text.encode(), "mine.yaml")
