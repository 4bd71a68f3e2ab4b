"""A head that is tied to the embeddings has no tensor of its own: plain from_pretrained must still find everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import make_checkpoint

import memopt
from differential.reference_weights import same_bits
from differential.transformers_models import load_model
from memopt.compressor.recipe import KeepFormat

OPTIONS = memopt.PlanOptions(tensor_parallel=1)


@pytest.mark.parametrize(("form", "dequantize"), [("portable", False), ("portable", True), ("mixed", True)])
def test_a_tied_release_loads_and_gives_its_export_s_logits(form: str, dequantize: bool, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", tie_word_embeddings=True)
    recipe = memopt.load_recipe("glm-4.7-int4")
    if form == "mixed":
        changes = {"default": KeepFormat(type="keep"), "engines": ("vllm", "transformers")}
        recipe = recipe.model_copy(update=changes)
    memopt.compress(source, tmp_path / "release", recipe=recipe, options=OPTIONS, device="cpu")
    memopt.dequantize(tmp_path / "release", tmp_path / "export")
    model = load_model(tmp_path / "release", dequantize=dequantize)
    export = load_model(tmp_path / "export", dequantize=False)
    assert same_bits(model.lm_head.weight, model.model.embed_tokens.weight)
    tokens = torch.randint(512, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert same_bits(export(tokens).logits, load_model(tmp_path / "release", dequantize=True)(tokens).logits)
        assert torch.isfinite(model(tokens).logits).all()
