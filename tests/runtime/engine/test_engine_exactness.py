"""With the real model in float32, scheduling changes nothing: not a token, not a bit of a logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from engine_page_faults import RecordedRun, RecordingModel, record
from signed_tiny_model import signed_tiny_model

from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.new_core import new_core
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.verified_model import VerifiedModel, load_verified
from memopt.runtime.parallel.communicator import SingleRank

OPTIONS = EngineOptions(dtype="float32", num_pages=40, max_requests=4, max_step_tokens=512, speculative=True)
NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.95, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VerifiedModel:
    release = signed_tiny_model(tmp_path_factory.mktemp("exact"))
    return load_verified(release.folder, None, release.key, OPTIONS, SingleRank())


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, 2048, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = {"a": prompt_of(130, 1), "b": prompt_of(70, 2), "c": prompt_of(5, 3)}


def core_of(model: VerifiedModel, **changes: object) -> EngineCore:
    options = replace(OPTIONS, speculative=False, **changes)  # type: ignore[arg-type]
    return new_core(model, options, SingleRank())


def recorded(
    core: EngineCore, prompts: Mapping[str, Sequence[int]], *, params: SamplingParams = PARAMS, steps_between: int = 0
) -> RecordedRun:
    """All prompts at once, or one every `steps_between` steps, to their ends."""
    run = RecordedRun()
    recorder = RecordingModel(core._runner._model)
    core._runner._model = recorder
    for name, prompt in prompts.items():
        run.requests[name] = core.submit(prompt, params)
        if steps_between:
            record(core, recorder, run, steps_between)
    record(core, recorder, run, 1000)
    core.pages.check()
    assert set(run.reasons().values()) == {"length"}
    return run


@pytest.fixture(scope="module")
def alone(model: VerifiedModel) -> RecordedRun:
    """Each request in an engine of its own, its prompt in one chunk."""
    whole = RecordedRun()
    for name, prompt in PROMPTS.items():
        run = recorded(core_of(model), {name: prompt})
        whole.requests |= run.requests
        whole.logits |= run.logits
    assert all(len(rows) == NUM_TOKENS for rows in whole.logits.values())
    return whole


@pytest.mark.parametrize(
    ("changes", "steps_between"),
    [
        ({}, 0),
        ({"max_step_tokens": 7}, 3),
        ({"max_step_tokens": 64, "max_requests": 2}, 1),
        ({"integrity": "tagged"}, 5),
        ({"prefix_cache": True}, 2),
    ],
    ids=["together", "chunks-of-7", "two-at-a-time", "tagged", "prefix-cache"],
)
def test_company_and_chunks_change_nothing(
    model: VerifiedModel, alone: RecordedRun, changes: dict[str, object], steps_between: int
) -> None:
    run = recorded(core_of(model, **changes), PROMPTS, steps_between=steps_between)
    assert run.logits == alone.logits
    assert {name: run.tokens(name) for name in PROMPTS} == {name: alone.tokens(name) for name in PROMPTS}


def test_preemption_changes_nothing(model: VerifiedModel, alone: RecordedRun) -> None:
    """Five pages: "a" grows into a third page only when "b" gives its two up, generated tokens among them."""
    prompts = {"a": PROMPTS["a"][:120], "b": PROMPTS["b"][:55]}
    expected = {name: recorded(core_of(model), {name: prompt}).logits[name] for name, prompt in prompts.items()}
    run = recorded(core_of(model, num_pages=5), prompts)
    assert run.requests["b"].num_preemptions == 1
    assert run.requests["a"].num_preemptions == 0
    assert run.logits == expected


def test_a_prefix_hit_changes_nothing_in_three_turns(model: VerifiedModel) -> None:
    core = core_of(model, prefix_cache=True, max_step_tokens=50)
    history = PROMPTS["b"]
    for turn, num_reused_tokens in enumerate((0, 64, 128)):
        hit = recorded(core, {"turn": history})
        miss = recorded(core_of(model), {"turn": history})
        assert hit.requests["turn"].num_reused_tokens == num_reused_tokens
        assert hit.logits == miss.logits
        history = hit.requests["turn"].tokens + prompt_of(60, 10 + turn)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_guesses_change_no_token(model: VerifiedModel, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature, top_p=1.0)
    plain = recorded(core_of(model), PROMPTS, params=params)
    core = new_core(model, OPTIONS, SingleRank())
    guessed = recorded(core, PROMPTS, params=params, steps_between=2)
    assert {name: guessed.tokens(name) for name in PROMPTS} == {name: plain.tokens(name) for name in PROMPTS}
    speculation = core.metrics().speculation
    assert speculation.num_drafted > 0
    assert speculation.num_accepted <= speculation.num_drafted


def test_right_guesses_are_taken_two_tokens_a_step(model: VerifiedModel) -> None:
    """The trained example's MTP layer guesses badly: an oracle that knows the answer takes its place."""
    plain = recorded(core_of(model), {"a": PROMPTS["a"]})
    answer = PROMPTS["a"] + plain.tokens("a") + [0, 0]

    class Oracle:
        def draft(
            self, hidden: object, next_tokens: object, rows: object, pools: object, sampled: torch.Tensor
        ) -> object:
            positions = rows.positions[sampled]  # type: ignore[attr-defined]
            # Every third guess is wrong.
            return torch.tensor([answer[p + 2] if p % 3 else (answer[p + 2] + 1) % 2048 for p in positions.tolist()])

    core = new_core(model, OPTIONS, SingleRank())
    core._runner._drafter = Oracle()  # type: ignore[assignment]
    guessed = recorded(core, {"a": PROMPTS["a"]})
    assert guessed.tokens("a") == plain.tokens("a")
    speculation = core.metrics().speculation
    assert 0 < speculation.num_accepted < speculation.num_drafted
    assert core.num_steps < NUM_TOKENS


def test_guesses_preemption_and_prefix_cache_together(model: VerifiedModel) -> None:
    prompts = {"a": PROMPTS["a"][:120], "b": PROMPTS["b"][:55]}
    plain = recorded(core_of(model), prompts)
    core = new_core(model, replace(OPTIONS, num_pages=5, prefix_cache=True), SingleRank())
    guessed = recorded(core, prompts)
    assert guessed.requests["b"].num_preemptions >= 1
    assert {name: guessed.tokens(name) for name in prompts} == {name: plain.tokens(name) for name in prompts}
