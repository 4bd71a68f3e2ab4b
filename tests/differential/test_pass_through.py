"""Native INT4 (Kimi K2-Thinking, K2.5, K2.6) passes through without a changed byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import make_checkpoint, make_tensors, tiny_config, write_checkpoint

import memopt
from differential.reference_weights import INDEX, int4_modules, read_tensors, same_bits
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint


def make_k2_thinking(folder: Path) -> Path:
    """K2-Thinking: K2.6's text model at the top level, without the prefix."""
    config = tiny_config("kimi-k2.6-int4")["text_config"]
    skeleton = skeleton_checkpoint(parse_config(json.dumps(config).encode()))
    return write_checkpoint(folder, config, make_tensors(skeleton))


def make_source(family: str, folder: Path) -> Path:
    return make_k2_thinking(folder) if family == "kimi_k2" else make_checkpoint(folder, "kimi-k2.6-int4")


@pytest.mark.parametrize("recipe", ["kimi-k2.6", "kimi-k2-int4", "copy"])
@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2"])
def test_every_tensor_is_the_source_s(family: str, recipe: str, tmp_path: Path) -> None:
    source, out = make_source(family, tmp_path / "source"), tmp_path / "out"
    result = memopt.compress(source, out, recipe=recipe, options=memopt.PlanOptions(tensor_parallel=8), workers=2)
    assert result.num_units >= 1
    stored, written = read_tensors(source), read_tensors(out)
    assert set(written) == set(stored)
    assert len(int4_modules(stored)) == 2 * 4 * 3  # layers, experts, projections
    for name, tensor in stored.items():
        assert same_bits(tensor, written[name]), name
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    for small in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / small).read_bytes() == (source / small).read_bytes()
    totals = [json.loads((folder / INDEX).read_text())["metadata"]["total_size"] for folder in (source, out)]
    assert totals[0] == totals[1] == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2"])
def test_a_release_of_a_release_is_the_same(family: str, tmp_path: Path) -> None:
    source = make_source(family, tmp_path / "source")
    once, twice = tmp_path / "once", tmp_path / "twice"
    memopt.compress(source, once, recipe="kimi-k2.6", workers=1)
    memopt.compress(once, twice, recipe="kimi-k2.6", workers=1)
    weights = sorted(path.name for path in once.glob("*.safetensors"))
    assert weights == sorted(path.name for path in twice.glob("*.safetensors"))
    for name in (*weights, INDEX, "config.json"):
        assert (once / name).read_bytes() == (twice / name).read_bytes(), name
