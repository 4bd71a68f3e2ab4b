"""In float32 a token's bits depend on its own sequence alone: not on cuts of the prompt, steps, or other requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_steps import PagedSequences, Part
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers_attention import AttentionPair, deepseek_pair, glm4_pair, glm_dsa_pair, hidden_states

from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, FP32, KvFormat
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.model.rope import RotaryTable

# Prompt and all tokens of three requests, about tiles of 16, 64 and 256 rows.
LENGTHS = ((280, 300), (63, 100), (17, 18))
PAIRS: dict[str, tuple[Callable[[], AttentionPair], KvFormat]] = {
    "dsa": (lambda: glm_dsa_pair(16), FP8_DS_MLA),
    "dsa_fp32": (lambda: glm_dsa_pair(40), FP32),
    "dense": (deepseek_pair, FP8_E4M3),
    "gqa": (glm4_pair, BF16),
}
Schedule = list[list[Part]]
MAX_CUTS = 12


def outputs(name: str, steps: Schedule, padding: int) -> list[Tensor]:
    make, kv_format = PAIRS[name]
    pair, sequences = make(), PagedSequences(hidden_states([tokens for _, tokens in LENGTHS]))
    pools = new_kv_pools(pair.config, kv_format, sequences.num_pages, num_layers=1, num_kv_heads_here=2)
    rotary = RotaryTable(pair.config.rope)
    found, _ = sequences.run(pair.block(), pools.layers[0], rotary, steps, padding=padding)
    return found


def alone() -> Schedule:
    """Every request by itself: the prompt at once, then a token a step."""
    return [
        parts
        for request, (prompt, tokens) in enumerate(LENGTHS)
        for parts in (
            [Part(request, 0, prompt, True)],
            *([Part(request, position, position + 1, False)] for position in range(prompt, tokens)),
        )
    ]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Steps that take some tokens of some requests; generated ones one at a time or several, as drafts are."""
    done, steps = [0] * len(LENGTHS), []
    while any(at < tokens for at, (_, tokens) in zip(done, LENGTHS, strict=True)):
        parts = []
        for request, (prompt, tokens) in enumerate(LENGTHS):
            left = (prompt if done[request] < prompt else tokens) - done[request]
            # The first size, all that is left, is what an example is simplified to; in the end there is no other.
            sizes = [left, 200, 64, 63, 16, 5, 1, 0] if len(steps) < MAX_CUTS else [left]
            count = min(left, draw(st.sampled_from(sizes)))
            if count:
                parts.append(Part(request, done[request], done[request] + count, done[request] < prompt))
                done[request] += count
        steps += [parts] if parts else []
    return steps


WANTED: dict[str, list[Tensor]] = {}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=6, deadline=None)
@given(steps=schedules(), padding=st.integers(0, 3))
def test_bits_do_not_depend_on_the_schedule(name: str, steps: Schedule, padding: int) -> None:
    if name not in WANTED:
        WANTED[name] = outputs(name, alone(), 0)
    for found, wanted in zip(outputs(name, steps, padding), WANTED[name], strict=True):
        assert bool(torch.isfinite(wanted).all())
        assert torch.equal(found, wanted)


def test_generated_tokens_recomputed_after_a_preemption_have_the_same_bits() -> None:
    wanted = outputs("dsa", alone(), 0)
    again = [[Part(request, 0, prompt, True)] for request, (prompt, _) in enumerate(LENGTHS)]
    again.append([Part(request, prompt, tokens, False) for request, (prompt, tokens) in enumerate(LENGTHS)])
    assert all(torch.equal(*pair) for pair in zip(outputs("dsa", again, 0), wanted, strict=True))
