"""Whose embedding and head an MTP layer uses, and that its rows do not depend on how they are cut into steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from loaded_models import load, model_config, stored_tensors
from step_cases import RowsOf, Steps
from tiny_checkpoints import TINY_GLM5, make_checkpoint

from memopt.kernels.kv_formats import FP32
from memopt.runtime.weights.load_model import LoadOptions, load_decoder


def test_without_copies_the_decoder_own_serve() -> None:
    decoder = load(TINY_GLM5, use_mtp=True)
    (mtp,) = decoder.mtp_layers
    assert mtp.embedding is decoder.embedding
    assert mtp.head is decoder.head
    assert load(TINY_GLM5).mtp_layers == ()


def test_own_copies_are_used(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm-4.7-fp8", num_hidden_layers=1)
    config, tensors = model_config(folder), dict(stored_tensors(folder))
    prefix = "model.layers.1."
    options = LoadOptions("float32", use_mtp=True)
    (own,) = load_decoder(config, tensors.items(), options).mtp_layers
    assert torch.equal(own.embedding.weight, tensors[f"{prefix}embed_tokens.weight"].float())
    hidden = torch.randn(3, config.hidden_size)
    expected = hidden @ tensors[f"{prefix}shared_head.head.weight"].float().T
    torch.testing.assert_close(own.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del tensors[prefix + name]
    decoder = load_decoder(config, tensors.items(), options)
    assert decoder.mtp_layers[0].embedding is decoder.embedding
    assert decoder.mtp_layers[0].head is decoder.head


def test_rows_are_the_same_in_any_steps() -> None:
    decoder = load(TINY_GLM5, use_mtp=True)
    (mtp,) = decoder.mtp_layers
    ids = torch.randint(0, 2048, (20,), generator=torch.Generator().manual_seed(4)).tolist()
    hidden = torch.randn(20, decoder.config.hidden_size)
    found = []
    for borders in ((0, 20), (0, 7, 20), (0, 1, 16, 20)):
        steps = Steps(decoder, FP32)
        kv = steps.pools.layers[decoder.config.num_layers]
        with torch.inference_mode():
            parts = [
                mtp.forward(steps.rows(RowsOf(0, ids[start:end], start)), hidden[start:end], kv)
                for start, end in pairwise(borders)
            ]
        found.append(torch.cat(parts))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
