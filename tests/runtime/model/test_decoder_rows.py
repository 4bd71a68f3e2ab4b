"""A whole model in float32: a request's logits do not depend on what else runs, nor on how its prompt is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded_models import load
from step_cases import RowsOf, Steps
from tiny_checkpoints import TINY_GLM5, make_checkpoint
from torch import Tensor

import memopt
from memopt.kernels.kv_formats import BF16, FP8_E4M3, FP32, KvFormat
from memopt.runtime.model.decoder import Decoder

NUM_PROMPT, NUM_TOKENS = 70, 76
FORMATS = {"fp32": FP32, "bf16": BF16, "fp8_e4m3": FP8_E4M3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    root = tmp_path_factory.mktemp("models")
    memopt.compress(TINY_GLM5, root / "int4", recipe="glm-5.2-int4", workers=1, device="cpu")
    return {
        "int4": load(root / "int4"),
        "fp8": load(TINY_GLM5),
        "gqa": load(make_checkpoint(root / "gqa", "glm-4.7-fp8", num_hidden_layers=2)),
    }


def ids_of(request: int) -> list[int]:
    return torch.randint(0, 512, (NUM_TOKENS,), generator=torch.Generator().manual_seed(request)).tolist()


def alone(decoder: Decoder, kv_format: KvFormat) -> Tensor:
    """Logits of request 0: its prompt at once, then token by token."""
    steps = Steps(decoder, kv_format, max_tokens=NUM_TOKENS)
    ids = ids_of(0)
    parts = [steps.logits(RowsOf(0, ids[:NUM_PROMPT], 0))]
    parts += [steps.logits(RowsOf(0, ids[p : p + 1], p, is_prompt=False)) for p in range(NUM_PROMPT, NUM_TOKENS)]
    return torch.cat(parts)


@pytest.mark.parametrize("kv_format", sorted(FORMATS))
@pytest.mark.parametrize("name", ["int4", "fp8", "gqa"])
def test_among_others_and_in_chunks(name: str, kv_format: str, models: dict[str, Decoder]) -> None:
    decoder, expected = models[name], alone(models[name], FORMATS[kv_format])
    among_others(decoder, FORMATS[kv_format], [19, 64], 3, expected)


@given(
    borders=st.lists(st.integers(1, NUM_PROMPT - 1), max_size=3, unique=True).map(sorted),
    num_others=st.integers(0, 18),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunks_and_any_others(borders: list[int], num_others: int, models: dict[str, Decoder]) -> None:
    decoder = models["int4"]
    among_others(decoder, BF16, borders, num_others, alone(decoder, BF16))


def among_others(decoder: Decoder, kv_format: KvFormat, borders: list[int], num_others: int, expected: Tensor) -> None:
    """Request 0's prompt in chunks beside others' tokens; its last tokens are one step of decode rows."""
    steps = Steps(decoder, kv_format, num_requests=num_others + 1, max_tokens=NUM_TOKENS)
    ids = ids_of(0)
    found: list[Tensor] = []
    start = 0
    for end in [*borders, NUM_PROMPT]:
        others = [RowsOf(r, ids_of(r)[: 1 + r % 3], 0) for r in range(1, num_others + 1)]
        found.append(steps.logits(*others, RowsOf(0, ids[start:end], start))[-(end - start) :])
        start = end
    others = [RowsOf(r, ids_of(r)[5:6], 5, is_prompt=False) for r in range(1, num_others + 1)]
    found.append(steps.logits(*others, RowsOf(0, ids[NUM_PROMPT:], NUM_PROMPT, is_prompt=False))[-6:])
    assert torch.equal(torch.cat(found), expected)


def test_bfloat16_computes_the_same_model(models: dict[str, Decoder], tmp_path: Path) -> None:
    """Rounded at every block: near the float32 logits, and not equal to them."""
    memopt.compress(TINY_GLM5, tmp_path / "int4", recipe="glm-5.2-int4", workers=1, device="cpu")
    decoder = load(tmp_path / "int4", compute="bfloat16")
    expected, found = alone(models["int4"], BF16), alone(decoder, BF16)
    assert found.dtype == torch.float32
    error = float((found - expected).abs().max() / expected.abs().max())
    assert 1e-4 < error < 0.1
    assert float((found.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9
