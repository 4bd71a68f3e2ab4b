"""memopt.Engine on the signed release of the trained example: what it refuses, and what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from signed_tiny_model import IDENTITY, KEY, SignedModel, signed_tiny_model
from signing_keys import fixed_key
from thread_ranks import ThreadRank, run_ranks

from memopt.errors import (
    CapacityError,
    ContentError,
    ExitCode,
    LayoutError,
    MemoptError,
    PolicyError,
    SignatureError,
    UnsupportedError,
    UsageError,
)
from memopt.manifests.policy import policy_for_key
from memopt.runtime.engine import engine as engine_module
from memopt.runtime.engine import new_core as new_core_module
from memopt.runtime.engine.cache_size import memory_bytes_of, require_memory
from memopt.runtime.engine.engine import Engine
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.leader_commands import Abortion, Submission, parse_commands, render_commands
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.verified_model import load_verified

PROMPT = "def main("


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> SignedModel:
    return signed_tiny_model(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(release: SignedModel) -> Iterator[Engine]:
    with Engine(release.folder, key=release.key, num_pages=40, max_requests=4) as engine:
        yield engine


def answer(engine: Engine, **params: object) -> str:
    return engine.generate([PROMPT], SamplingParams(**params))[0].text  # type: ignore[arg-type]


def test_answers_in_the_order_of_the_prompts(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8)
    many = engine.generate([PROMPT, "import os\n", [5, 6, 7]], params)
    assert [completion.num_prompt_tokens for completion in many][2] == 3
    assert all(len(completion.token_ids) == 8 and completion.finish_reason == "length" for completion in many)
    assert many[0].text.startswith("self")
    assert many[1].text.startswith("import")
    assert engine.generate([PROMPT], params)[0].text == many[0].text
    assert not engine.has_work


def test_a_stream_gives_the_same_text_and_an_abandoned_one_frees_its_pages(engine: Engine) -> None:
    text = answer(engine, max_tokens=10)
    assert "".join(engine.stream(PROMPT, SamplingParams(max_tokens=10))) == text
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=30))
    assert text.startswith(next(pieces))
    assert engine.core.pages.manager.num_used > 0
    pieces.close()  # type: ignore[attr-defined]
    engine.generate(["x"], SamplingParams(max_tokens=1))
    assert engine.core.pages.manager.num_used == 0
    assert engine.metrics().performance.num_finished["abort"] == 1


def test_events_of_other_requests_wait_for_step(engine: Engine) -> None:
    other = engine.submit("import ", SamplingParams(max_tokens=3, ignore_eos=True))
    engine.generate([PROMPT], SamplingParams(max_tokens=6))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [event.request_id for event in events] == [other] * 3
    assert events[-1].finish_reason == "length"


def test_abort_ends_a_request_with_the_next_step(engine: Engine) -> None:
    request_id = engine.submit(PROMPT, SamplingParams(max_tokens=50))
    engine.step()
    engine.abort(request_id)
    assert [(event.request_id, event.finish_reason) for event in engine.step()] == [(request_id, "abort")]
    engine.abort(request_id)
    assert not engine.has_work


def test_stop_texts_end_the_answer_and_are_not_in_it(engine: Engine) -> None:
    text = answer(engine, max_tokens=12)
    stop = text[len(text) // 2 :][:5]
    found = engine.generate([PROMPT], SamplingParams(max_tokens=12, stop=(stop,)))[0]
    assert found.finish_reason == "stop"
    assert found.text == text[: text.index(stop)]


def test_seeds(engine: Engine) -> None:
    texts = [answer(engine, max_tokens=12, temperature=1.5, seed=seed) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_what_cannot_be_run_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="39"):
        engine.submit(PROMPT, SamplingParams(max_tokens=3000))
    with pytest.raises(UsageError, match="no chat template"):
        engine.submit([{"role": "user", "content": "hello"}])
    with pytest.raises(UsageError, match="prompt is empty"):
        engine.submit([])
    with pytest.raises(UsageError, match="prompt of float values"):
        engine.submit([1.5])  # type: ignore[list-item]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "int8"}, UsageError, "weights is 'int8'"),
        ({"dtype": "float16"}, UsageError, "dtype is 'float16'"),
        ({"kv_cache": "int4"}, UsageError, "KV format 'int4'"),
        ({"integrity": "both"}, UsageError, "integrity is 'both'"),
        ({"num_pages": 1}, UsageError, "num_pages is 1"),
        ({"num_pages": 9, "kv_cache_gib": 1.0}, UsageError, "num_pages and kv_cache_gib"),
        ({"kv_cache_gib": 1e-6}, CapacityError, "holds 0 pages"),
        ({"kv_cache_gib": 1e300}, UsageError, r"kv_cache_gib is 1e\+300"),
        ({"kv_cache_gib": 1e6}, CapacityError, "do not fit into memory"),
        ({"device": "tpu"}, UsageError, "device is 'tpu'"),
        ({"device": "meta"}, UsageError, "device is 'meta'"),
        ({"max_tokens": 5000}, UsageError, "positions end at 4,096"),
        ({"max_requests": 600}, UsageError, "600 decoding requests take 600 rows"),
        ({"tensor_parallel": 2}, UsageError, "torchrun did not start this process"),
        ({"max_tokens": 1}, UsageError, "max_tokens is 1, but at least 2"),
        ({"max_step_tokens": 1, "max_requests": 1}, UsageError, "use max_step_tokens of 2 or more"),
        ({"kv_cache_gib": 0}, UsageError, "kv_cache_gib is 0"),
        ({"kv_cache_gib": "1"}, UsageError, "kv_cache_gib is '1'"),
        ({"num_pages": 10**18}, CapacityError, "1,000,000,000,000,000,000 pages of .* do not fit into memory"),
        ({"num_pages": 2.5}, UsageError, "num_pages is 2.5"),
        ({"max_requests": "4"}, UsageError, "max_requests is '4'"),
        ({"max_requests": True}, UsageError, "max_requests is True"),
        ({"tensor_parallel": "1"}, UsageError, "within 1 and|tensor_parallel is '1'"),
        ({"prefix_cache": "no"}, UsageError, "prefix_cache is 'no'"),
        ({"device": None}, UsageError, "device is None"),
    ],
)
def test_options_that_cannot_be_met(
    release: SignedModel, options: dict[str, object], error: type[MemoptError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(release.folder, key=release.key, **options)  # type: ignore[arg-type]


def test_the_cache_is_as_large_as_asked(release: SignedModel) -> None:
    with Engine(release.folder, key=release.key, kv_cache_gib=0.01, kv_cache="fp8_e4m3") as small:
        capacity = small.metrics().capacity
        # 5 layers of 576 bytes a token, 3 of them with 132 more for the indexer.
        assert capacity.num_pages == int(0.01 * 2**30) // (64 * (5 * 576 + 3 * 132)) - 1
        assert capacity.size_bytes <= 0.01 * 2**30


def test_a_cache_larger_than_the_machines_memory_is_refused(
    release: SignedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would promise it, and end the process when it is written."""
    page_bytes = 64 * (5 * 576 + 3 * 132) * 2
    with pytest.raises(CapacityError, match=r"9 pages of .* do not fit into memory"):
        require_memory(9, page_bytes // 64, 9 * page_bytes - 1)
    require_memory(9, page_bytes // 64, 9 * page_bytes)
    assert 2**28 < memory_bytes_of("cpu") < 2**50
    monkeypatch.setattr(new_core_module, "memory_bytes_of", lambda device: 10_000)
    with pytest.raises(CapacityError, match="7 pages"):
        Engine(release.folder, key=release.key, num_pages=7)


def test_no_more_requests_run_than_there_are_pages(release: SignedModel) -> None:
    """So tables for a million million requests are never made."""
    options = {"num_pages": 3, "max_requests": 10**12, "max_step_tokens": 10**13}
    with Engine(release.folder, key=release.key, **options) as small:  # type: ignore[arg-type]
        assert small.core.limits.max_requests == 2
        answers = small.generate([[1], [2], [3] * 64], SamplingParams(max_tokens=2, ignore_eos=True))
        assert [len(answer.token_ids) for answer in answers] == [2] * 3
        assert small.metrics().capacity.peak_used_pages == 2


def test_of_prompts_of_which_one_is_refused_none_runs(engine: Engine) -> None:
    before = engine.metrics().performance.num_generated_tokens
    with pytest.raises(UsageError, match="prompt is empty"):
        engine.generate([PROMPT, []], SamplingParams(max_tokens=5))
    assert not engine.has_work
    assert engine.step() == []
    engine.generate([PROMPT], SamplingParams(max_tokens=5, ignore_eos=True))
    assert engine.metrics().performance.num_generated_tokens == before + 5


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        Engine("nowhere", key="none", device="cuda")


def test_ranks_of_different_options_are_refused_before_anything_is_read() -> None:
    """Their sums would meet in another order: one would wait for ever, or take one thing for another."""

    def start(communicator: ThreadRank) -> None:
        options = EngineOptions(integrity="tagged" if communicator.rank else "noop", tensor_parallel=2)
        with pytest.raises(UsageError, match="set of options of rank 1"):
            load_verified("nowhere", None, b"", options, communicator)

    run_ranks(2, start)


def copied(release: SignedModel, folder: Path) -> Path:
    return Path(shutil.copytree(release.folder, folder / "copy"))


def refusal(monkeypatch: pytest.MonkeyPatch, folder: Path, **trust: object) -> MemoptError:
    """How the engine refuses; no core may have been made."""

    def no_core(*_: object) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(engine_module, "new_core", no_core)
    with pytest.raises(MemoptError) as caught:
        Engine(folder, **trust)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("place", [0.2, 0.9])
def test_a_flipped_bit_in_the_weights_means_no_engine(
    release: SignedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: float
) -> None:
    folder = copied(release, tmp_path)
    weights = folder / "model-00001-of-00001.safetensors"
    with weights.open("r+b") as file:
        file.seek(int(weights.stat().st_size * place))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    problem = refusal(monkeypatch, folder, key=release.key)
    assert isinstance(problem, ContentError)
    assert problem.exit_code == ExitCode.CONTENT


def test_changed_small_files_mean_no_engine(
    release: SignedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(release, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert refusal(monkeypatch, folder, key=release.key).exit_code == ExitCode.CONTENT


def test_signature_policy_and_layout(release: SignedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_key = fixed_key(9).public_key
    assert isinstance(refusal(monkeypatch, release.folder, key=wrong_key), SignatureError)
    policy = replace(policy_for_key(KEY.public_key), min_counters={IDENTITY: 8})
    assert isinstance(refusal(monkeypatch, release.folder, policy=policy), PolicyError)
    assert isinstance(refusal(monkeypatch, release.folder), UsageError)
    folder = copied(release, tmp_path)
    (folder / "extra.bin").write_bytes(b"x")
    assert isinstance(refusal(monkeypatch, folder, key=release.key), LayoutError)
    (folder / "model.sig").unlink()
    assert isinstance(refusal(monkeypatch, folder, key=release.key), SignatureError)


def test_a_closed_engine_says_so(release: SignedModel) -> None:
    engine = Engine(release.folder, key=release.key, num_pages=4)
    engine.submit(PROMPT, SamplingParams(max_tokens=9))
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=9))
    engine.close()
    engine.close()
    assert not engine.has_work
    for call in (engine.step, engine.metrics, lambda: engine.submit(PROMPT), lambda: next(pieces)):
        with pytest.raises(UsageError, match="the engine is closed"):
            call()


def test_commands_survive_the_wire() -> None:
    commands = [
        Submission((1, 2, 3), SamplingParams(max_tokens=9, temperature=0.1, stop=("a", "é")), "tenant"),
        Abortion(0),
    ]
    assert parse_commands(render_commands(commands)) == commands
    assert parse_commands(render_commands([])) == []


def test_guessing_needs_a_layer_that_guesses() -> None:
    from memopt.runtime.engine.speculative import mtp_drafter

    class NoMtp:
        mtp_layers = ()

        class config:
            family = "glm4_moe"

    with pytest.raises(UnsupportedError, match="glm4_moe has none"):
        mtp_drafter(NoMtp())  # type: ignore[arg-type]
