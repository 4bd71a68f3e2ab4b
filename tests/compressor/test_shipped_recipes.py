"""Every shipped recipe runs on a tiny checkpoint of its family."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor.recipe import shipped_recipe_names

CASES = {
    "glm-5.2-int4": ("glm-5.2-fp8", 8),
    "glm-5.2-int4-fp8": ("glm-5.2-fp8", 1),
    "glm-5.1-int4": ("glm-5.1-fp8", 8),
    "glm-4.7-int4": ("glm-4.7-fp8", 8),
    "kimi-k2-int4": ("kimi-k2-instruct-fp8", 8),
    "kimi-k2.6": ("kimi-k2.6-int4", 8),
    "copy": ("deepseek-v3-fp8", 1),
    "dequantize": ("kimi-k2.6-int4", 1),
}


def test_every_shipped_recipe_has_a_case() -> None:
    assert set(CASES) == set(shipped_recipe_names())


@pytest.mark.parametrize("recipe", sorted(CASES))
def test_recipe_runs(recipe: str, tmp_path: Path) -> None:
    checkpoint, degree = CASES[recipe]
    source = make_checkpoint(tmp_path / "source", checkpoint)
    result = memopt.compress(
        source, tmp_path / "out", recipe=recipe, options=memopt.PlanOptions(tensor_parallel=degree), workers=2
    )
    assert result.num_units >= 1
    assert memopt.inspect(tmp_path / "out").problems == ()
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert list(opened.keys())
