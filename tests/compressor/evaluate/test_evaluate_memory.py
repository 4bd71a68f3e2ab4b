"""Memory of a streamed forward pass: one layer and its pages, whatever the number of layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensor_memory_peak import TensorMemoryPeak
from tiny_checkpoints import make_checkpoint

from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.streamed_forward import StreamOptions, final_states
from memopt.compressor.evaluate.token_windows import Window

VOCAB_SIZE = 128
HIDDEN_SIZE = 256
WINDOW_TOKENS = 64
NUM_WINDOWS = 4
OPTIONS = StreamOptions(compute="float32", kv_cache="fp32", batch_tokens=2 * WINDOW_TOKENS)
# Rope tables, norms and scales of layers: less than a hundredth of one.
SLACK_BYTES = 1 << 16


def peak_bytes(folder: Path, name: str, num_layers: int, num_windows: int = NUM_WINDOWS) -> tuple[int, int]:
    """Of all tensors during a pass, and of one layer of experts."""
    source = make_checkpoint(
        folder,
        name,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_nextn_predict_layers=0,
    )
    generator = np.random.default_rng(0)
    windows = [Window(number, 0, generator.integers(0, VOCAB_SIZE, WINDOW_TOKENS)) for number in range(num_windows)]
    with StoredModel(source) as model:
        with TensorMemoryPeak() as alone:
            layer = model.layer(1, OPTIONS.load_options)
        del layer
        with TensorMemoryPeak() as memory:
            final_states(model, windows, OPTIONS)
    return memory.peak_bytes, alone.peak_bytes


@pytest.mark.parametrize("name", ["glm-4.7-fp8", "kimi-k2-instruct-fp8"])
def test_peak_follows_the_largest_layer_not_their_number(name: str, tmp_path: Path) -> None:
    few, layer = peak_bytes(tmp_path / "few", name, 2)
    many, _ = peak_bytes(tmp_path / "many", name, 6)
    assert abs(many - few) < SLACK_BYTES < layer / 50
    # Never two layers, beside a batch's activations and all hidden states.
    assert few < 2 * layer


def test_each_window_adds_its_hidden_states_alone(tmp_path: Path) -> None:
    few, _ = peak_bytes(tmp_path / "few", "glm-4.7-fp8", 3)
    many, _ = peak_bytes(tmp_path / "many", "glm-4.7-fp8", 3, 4 * NUM_WINDOWS)
    added = 3 * NUM_WINDOWS * WINDOW_TOKENS * HIDDEN_SIZE * torch.float32.itemsize
    assert abs(many - few - added) < SLACK_BYTES
