"""Which family a config belongs to."""

from __future__ import annotations

import json

import pytest
from refusals import refusal
from tiny_checkpoints import NAMES, tiny_config

from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.families.registry import FAMILIES, family_of
from memopt.errors import UnsupportedError

SUPPORTED = ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "kimi_k2", "kimi_k25")


def test_the_five_families() -> None:
    assert tuple(sorted(FAMILIES)) == SUPPORTED
    assert all(family().name == name for name, family in FAMILIES.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_config_finds_its_family(name: str) -> None:
    config = tiny_config(name)
    assert family_of(parse_config(json.dumps(config).encode())).name == config["model_type"]


@pytest.mark.parametrize("model_type", ["llama", "glm5_next", "GLM4_MOE", "", "glm_moe", "deepseek_v32"])
def test_another_model_type_is_refused_with_those_that_are_supported(model_type: str) -> None:
    config = parse_config(json.dumps({"model_type": model_type}).encode())
    with refusal(UnsupportedError, "config.json", repr(model_type), *SUPPORTED):
        family_of(config)
