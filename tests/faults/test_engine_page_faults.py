"""Faults in the pages of a real model's requests: exactly the affected ones end, all others keep every bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import torch
from engine_page_faults import (
    RecordedRun,
    RecordingModel,
    double_free,
    entry_outside_the_pool,
    evict_shared,
    free_only,
    lost_entry,
    padding_row,
    reallocate,
    record,
    stale_entry,
    stale_record,
    swap_entries,
    swap_own_entries,
    work_as_on_a_gpu,
)
from signed_tiny_model import signed_tiny_model

from memopt.kernels.kv_formats import BF16
from memopt.kernels.layout import NO_TAG
from memopt.runtime.engine.admission import EngineLimits
from memopt.runtime.engine.engine import Engine
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.integrity.choose_tracker import choose_tracker
from memopt.runtime.integrity.mismatch import IntegrityCounts
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.prefix_index import prefix_namespace
from memopt.runtime.model.decoder import Decoder

NUM_PAGES, MAX_TOKENS = 64, 128
# Two pages each: the second one has room for the answer. A newcomer writes behind the request whose second page it is
# given, never into one slot in one step, which the store on the CPU would refuse.
PROMPT_TOKENS, NEWCOMER_TOKENS, ANSWER_TOKENS = 70, 5, 6
STEPS_BEFORE = 3
AFFECTED = {
    "reallocated", "freed twice", "shared", "sharing", "swapped own", "swapped", "swapped with", "stale", "outside",
    "lost", "stale record",
}  # fmt: skip
UNAFFECTED = {"bystander", "lender", "freed only", *(f"newcomer {number}" for number in range(3))}
# Without tags, a page id outside the pool ends the process on a GPU and raises on the CPU: not a wrong answer.
NEEDS_TAGS = {"outside"}
# The page is right and nothing is spoiled.
HARMLESS = {"stale record"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of the trained example's signed INT4 release, with tags, in float32 arithmetic."""
    model = signed_tiny_model(tmp_path_factory.mktemp("page_faults"))
    with Engine(
        model.folder,
        key=model.key,
        integrity="tagged",
        dtype="float32",
        num_pages=NUM_PAGES,
        max_requests=4,
        max_tokens=MAX_TOKENS,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def decoder(engine: Engine) -> Decoder:
    """Its model."""
    model = engine.core._runner._model
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _core(decoder: Decoder, tracker: str) -> tuple[EngineCore, RecordingModel]:
    config = decoder.config
    pools = new_kv_pools(config, BF16, NUM_PAGES, num_layers=config.num_layers, num_kv_heads_here=1)
    model = RecordingModel(decoder)
    limits = EngineLimits(max_requests=24, max_step_tokens=1200, max_tokens=MAX_TOKENS)
    core = EngineCore(
        model,
        pools,
        limits,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        tracker=choose_tracker(tracker, NUM_PAGES, "cpu"),
        prefix_namespace=prefix_namespace("0" * 64, BF16.name),
    )
    return core, model


def _prompt(number: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 2000, (num_tokens,), generator=generator).tolist()


def _run(
    decoder: Decoder, tracker: str, faults: set[str], *, is_as_on_a_gpu: bool = False
) -> tuple[EngineCore, RecordedRun]:
    """One run of all requests; `faults` names those that are struck, after STEPS_BEFORE steps."""
    core, model = _core(decoder, tracker)
    if is_as_on_a_gpu:
        work_as_on_a_gpu(core)
    run = RecordedRun()
    params = SamplingParams(max_tokens=ANSWER_TOKENS)
    names = sorted((AFFECTED | UNAFFECTED) - {"sharing"})
    for number, name in enumerate(names):
        if not name.startswith("newcomer"):
            run.requests[name] = core.submit(_prompt(number, PROMPT_TOKENS), params)
    record(core, model, run, 1)
    run.requests["sharing"] = core.submit(_prompt(names.index("shared"), PROMPT_TOKENS), params)
    record(core, model, run, STEPS_BEFORE - 1)
    assert run.requests["sharing"].num_reused_tokens == 64
    _strike(core, run, faults)
    for number in range(3):
        run.requests[f"newcomer {number}"] = core.submit(_prompt(100 + number, NEWCOMER_TOKENS), params)
    record(core, model, run, 12)
    core.pages.check()
    return core, run


def _strike(core: EngineCore, run: RecordedRun, faults: set[str]) -> None:
    """The faults of that name."""
    requests = run.requests
    if "swapped own" in faults:
        swap_own_entries(core, requests["swapped own"])
    if "swapped" in faults:
        swap_entries(core, requests["swapped"], requests["swapped with"])
    if "stale" in faults:
        stale_entry(core, requests["stale"], requests["lender"])
    if "outside" in faults:
        entry_outside_the_pool(core, requests["outside"])
    if "lost" in faults:
        lost_entry(core, requests["lost"])
    if "stale record" in faults:
        stale_record(core, requests["stale record"])
    if "padding" in faults:
        padding_row(core)
    if "freed only" in faults:
        free_only(core, requests["freed only"])
    # Freed last, so that the newcomers take exactly these pages.
    if "reallocated" in faults:
        reallocate(core, requests["reallocated"])
    if "freed twice" in faults:
        double_free(core, requests["freed twice"])
    if "shared" in faults:
        evict_shared(core, requests["shared"])


@pytest.fixture(scope="module")
def undisturbed(decoder: Decoder) -> RecordedRun:
    """The same requests, without a fault and without tags."""
    _, run = _run(decoder, "noop", set())
    assert set(run.reasons().values()) == {"length"}
    return run


@pytest.mark.parametrize("is_as_on_a_gpu", [False, True])
def test_tags_end_exactly_the_affected_requests(
    decoder: Decoder, undisturbed: RecordedRun, is_as_on_a_gpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="memopt.integrity")
    core, run = _run(decoder, "tagged", AFFECTED | {"padding", "freed only"}, is_as_on_a_gpu=is_as_on_a_gpu)
    assert {name for name, reason in run.reasons().items() if reason == "page_mismatch"} == AFFECTED
    for name in UNAFFECTED:
        assert run.reasons()[name] == "length"
        assert run.tokens(name) == undisturbed.tokens(name)
        assert run.logits[name] == undisturbed.logits[name]
    for name in AFFECTED:
        # What was computed in the step of the check is not part of the answer.
        assert run.tokens(name) == undisturbed.tokens(name)[: len(run.tokens(name))]
        assert len(run.tokens(name)) == (STEPS_BEFORE - 1 if name == "sharing" else STEPS_BEFORE)

    *events, last = [json.loads(record.getMessage()) for record in caplog.records]
    # The page that nobody took passed every check, and was missing when its request gave it back.
    assert last["event"] == "page_lost"
    assert last["request_id"] == str(run.requests["freed only"].request_id)
    assert last["expected"] == last["found"] != f"{NO_TAG:#018x}"
    ids = {str(run.requests[name].request_id) for name in AFFECTED}
    assert {event["request_id"] for event in events} == ids
    assert all(event["event"] == "page_mismatch" and event["step"] == STEPS_BEFORE + 1 for event in events)
    lost = str(run.requests["lost"].request_id)
    for event in events:
        # A page that never came to the table has no tag on record, nor has what stands there instead.
        assert (event["expected"] == event["found"] == f"{NO_TAG:#018x}") == (event["request_id"] == lost)
    metrics = core.metrics()
    assert metrics.integrity.num_mismatches == metrics.performance.num_finished["page_mismatch"] == len(AFFECTED)
    assert metrics.integrity.num_checks == metrics.performance.num_steps > STEPS_BEFORE
    assert metrics.integrity.num_lost_pages == 1
    # The page that a flagged request held at the place of its first mismatch is lost to the engine ("shared" and
    # "sharing" held the same), so is the one that was freed only, and nothing else.
    assert metrics.capacity.num_quarantined_pages == len(AFFECTED - {"sharing"} | {"freed only"})


def test_without_tags_the_same_faults_spoil_answers(decoder: Decoder, undisturbed: RecordedRun) -> None:
    """So the test above can fail: each of these faults reaches the logits when nobody compares tags."""
    core, run = _run(decoder, "noop", AFFECTED - NEEDS_TAGS)
    spoiled = {name for name in run.logits if run.logits[name] != undisturbed.logits[name][: len(run.logits[name])]}
    assert spoiled >= AFFECTED - NEEDS_TAGS - HARMLESS
    assert spoiled.isdisjoint(HARMLESS | {"bystander"})
    # Whose page was missing in the end does not pass for sound: its owner's, or the newcomer's, whoever ended later.
    doubtful = {name for name, reason in run.reasons().items() if reason == "page_mismatch"}
    assert len(doubtful) == core.metrics().integrity.num_lost_pages > 0
    assert doubtful <= {"reallocated", "freed twice", "shared", "sharing", *(f"newcomer {n}" for n in range(3))}
    assert core.metrics().integrity.num_checks == 0


@pytest.mark.parametrize("is_as_on_a_gpu", [False, True])
def test_tags_alone_change_no_bit(decoder: Decoder, undisturbed: RecordedRun, is_as_on_a_gpu: bool) -> None:
    """Nor does the masking that every step has where the host does not know that nobody is flagged."""
    core, run = _run(decoder, "tagged", set(), is_as_on_a_gpu=is_as_on_a_gpu)
    assert run.logits == undisturbed.logits
    assert core.pages.counts == IntegrityCounts(core.num_steps, 0, 0)


def test_an_engine_tells_its_caller(engine: Engine) -> None:
    """Through the public interface: the event of the request that ended, the other's answer, and the figures."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    alone = engine.generate([_prompt(1, PROMPT_TOKENS)], params)[0].token_ids
    sound = engine.submit(_prompt(1, PROMPT_TOKENS), params)
    struck = engine.submit(_prompt(2, PROMPT_TOKENS), params)
    events = engine.step()
    _, request = engine.core.scheduler.running
    swap_own_entries(engine.core, request)
    while engine.has_work:
        events += engine.step()
    assert [event.token_id for event in events if event.request_id == sound] == list(alone)
    *tokens, last = [event for event in events if event.request_id == struck]
    assert [event.finish_reason for event in tokens] == [None]
    assert (last.token_id, last.text, last.finish_reason) == (None, "", "page_mismatch")
    metrics = engine.metrics()
    assert metrics.integrity.num_mismatches == 1
    assert metrics.capacity.num_quarantined_pages == 1
    assert metrics.capacity.num_used_pages == 0
