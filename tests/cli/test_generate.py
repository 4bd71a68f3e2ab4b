"""`memopt generate`: text from a release that verified, and not a word from one that did not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_parser import parse
from release_files import policy_json
from signed_tiny_model import IDENTITY, KEY, SignedModel, signed_tiny_model
from signing_keys import fixed_key
from tiny_releases import flip_byte
from tokenizers import Tokenizer

import memopt
from cli.invoke import Outcome, command, invoke, run_command
from memopt.manifests.signer import KeySigner

WEIGHTS = "model-00001-of-00001.safetensors"
# A small cache: its pages are zeroed when the engine starts.
SMALL = ("--context", "256", "--kv-cache-gib", "0.05")
PROMPT = "def f(self):\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SignedModel:
    return signed_tiny_model(tmp_path_factory.mktemp("generate"))


def generate(model: SignedModel, *arguments: str | Path) -> Outcome:
    return invoke("generate", model.folder, "--verify-key", model.key, *SMALL, *arguments)


def objects(done: Outcome) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def answer(model: SignedModel) -> dict:
    """The greedy answer to PROMPT: 12 tokens."""
    done = generate(model, "--prompt", PROMPT, "--max-tokens", "12", "--json")
    assert done.code == 0, done.stderr
    completion, verdict = objects(done)
    assert (completion["schema"], completion["index"]) == ("memopt.completion/1", 0)
    assert (verdict["command"], verdict["status"], verdict["exit_code"]) == ("generate", "ok", 0)
    assert verdict["metrics"]["performance"]["num_generated_tokens"] == 12
    assert len(completion["token_ids"]) == 12
    assert completion["finish_reason"] == "length"
    assert completion["text"].strip()
    return completion


def test_one_prompt_is_streamed_as_it_is(model: SignedModel, answer: dict, tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text(policy_json(KEY, min_counters={IDENTITY: 7}))
    done = invoke(
        "generate", model.folder, "--policy", tmp_path / "trust.json", *SMALL, "--prompt", PROMPT, "--max-tokens", "12"
    )
    assert (done.code, done.stdout) == (0, answer["text"] + "\n")
    assert done.stderr.startswith("12 tokens in ")
    assert "ended by length" in done.stderr


def test_prompts_of_all_kinds_run_together(model: SignedModel, answer: dict, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    ids = ",".join(map(str, generate_ids(model)))
    done = generate(
        model, "--prompt", PROMPT, "--prompt-file", tmp_path / "prompt.txt", "--token-ids", ids, "--max-tokens", "12"
    )
    assert done.code == 0, done.stderr
    assert done.stdout == "".join(f"--- {number} of 3, length\n{answer['text']}\n" for number in (1, 2, 3))


def generate_ids(model: SignedModel) -> list[int]:
    return Tokenizer.from_file(str(model.folder / "tokenizer.json")).encode(PROMPT).ids


def test_a_prompt_from_standard_input(model: SignedModel, answer: dict) -> None:
    arguments = [
        "generate",
        model.folder,
        "--verify-key",
        model.key,
        *SMALL,
        "--prompt-file",
        "-",
        "--max-tokens",
        "12",
    ]
    done = run_command(*arguments, input=PROMPT)
    assert (done.code, done.stdout) == (0, answer["text"] + "\n")


def test_a_conversation_goes_through_the_template(model: SignedModel, tmp_path: Path) -> None:
    folder = tmp_path / "release"
    shutil.copytree(model.folder, folder)
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    (folder / "chat_template.jinja").write_text(template)
    memopt.sign_release(folder, [KeySigner(KEY)])
    chatting = SignedModel(folder, model.key)
    asked = ("--max-tokens", "6", "--json")
    chat = objects(generate(chatting, "--chat", "def f(self):", "--system", "x", *asked))[0]
    plain = objects(generate(chatting, "--prompt", "<|system|>x<|user|>def f(self):<|assistant|>", *asked))[0]
    assert chat == plain
    assert chat["num_prompt_tokens"] > 6
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only one message') }}")
    memopt.sign_release(folder, [KeySigner(KEY)])
    done = generate(chatting, "--chat", "hi")
    assert (done.code, done.stdout) == (2, "")
    assert "only one message" in done.refusal


def test_a_stop_text_ends_the_answer_before_it(model: SignedModel, answer: dict) -> None:
    stop = answer["text"][3:6]
    done = generate(model, "--prompt", PROMPT, "--max-tokens", "12", "--stop", stop, "--json")
    completion = objects(done)[0]
    assert completion["text"] == answer["text"][: answer["text"].index(stop)]
    assert completion["finish_reason"] == "stop"
    assert completion["token_ids"] == answer["token_ids"][: len(completion["token_ids"])]


def test_equal_seeds_give_equal_answers(model: SignedModel, answer: dict) -> None:
    def sampled(seed: str) -> list[int]:
        chosen = ("--temperature", "1.5", "--top-p", "0.9", "--seed", seed, "--max-tokens", "12", "--json")
        return objects(generate(model, "--prompt", PROMPT, *chosen))[0]["token_ids"]

    first = sampled("1")
    assert first == sampled("1")
    assert len({tuple(first), tuple(sampled("2")), tuple(answer["token_ids"])}) == 3


@pytest.mark.parametrize(
    "options",
    [
        ("--kv-cache", "fp8_e4m3", "--integrity", "tagged"),
        ("--kv-cache", "fp8_ds_mla", "--weights", "bf16"),
        ("--dtype", "float32", "--prefix-cache"),
    ],
    ids=lambda options: options[1],
)
def test_formats_and_options(model: SignedModel, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = generate(
        model, "--prompt", PROMPT, "--max-tokens", "4", *options, "--json", "--metrics", tmp_path / "metrics.prom"
    )
    assert done.code == 0, done.stderr
    families = parse((tmp_path / "metrics.prom").read_text())
    assert families["memopt_generated_tokens_total"].samples == [("", {}, 4.0)]
    num_checks = families["memopt_integrity_checks_total"].samples[0][2]
    assert (num_checks > 0) == ("tagged" in options)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.prom"]


def test_metrics_that_cannot_be_written_cost_no_answer(model: SignedModel, tmp_path: Path, answer: dict) -> None:
    nowhere = ("--metrics", tmp_path / "nowhere" / "m", "--max-tokens", "12")
    done = generate(model, "--prompt", PROMPT, "--prompt", PROMPT, *nowhere)
    assert (done.code, done.stdout.count(answer["text"])) == (7, 2)
    assert "nowhere" in done.refusal


def test_nothing_is_generated_from_what_does_not_verify(model: SignedModel, tmp_path: Path) -> None:
    damaged = tmp_path / "release"
    shutil.copytree(model.folder, damaged)
    asked = ("--prompt", PROMPT, "--max-tokens", "4", *SMALL)

    stranger = tmp_path / "stranger.pub"
    stranger.write_bytes(fixed_key(2).public_key.pem)
    done = invoke("generate", damaged, "--verify-key", stranger, *asked)
    assert (done.code, done.stdout) == (3, "")

    (tmp_path / "trust.json").write_text(policy_json(KEY, min_counters={IDENTITY: 8}))
    done = invoke("generate", damaged, "--policy", tmp_path / "trust.json", *asked)
    assert (done.code, done.stdout) == (5, "")

    flip_byte(damaged / WEIGHTS, -1)
    done = invoke("generate", damaged, "--verify-key", model.key, *asked)
    assert (done.code, done.stdout) == (4, "")
    assert WEIGHTS in done.refusal
    refused = invoke("generate", damaged, "--verify-key", model.key, *asked, "--json")
    assert (refused.verdict["status"], refused.verdict["code"]) == ("refused", "MEMOPT_CONTENT")

    (damaged / "extra.json").write_text("{}")
    done = invoke("generate", damaged, "--verify-key", model.key, *asked)
    assert (done.code, done.stdout) == (6, "")

    (damaged / "model.sig").unlink()
    done = invoke("generate", damaged, "--verify-key", model.key, *asked)
    assert (done.code, done.stdout) == (3, "")
    assert "not signed" in done.refusal


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--chat", "hi"), 2, "no chat template"),
        (("--token-ids", "5000"), 2, "vocabulary"),
        (("--prompt", ""), 2, "empty"),
        (("--prompt", "a", "--max-tokens", "300"), 2, "longest sequence is 256"),
        (("--prompt", "a", "--top-p", "0"), 2, "top_p"),
        (("--prompt", "a", "--tp", "2"), 2, "torchrun"),
    ],
)
def test_wrong_requests(model: SignedModel, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = generate(model, "--max-tokens", "4", *arguments)
    assert (done.code, done.stdout) == (code, "")
    assert words in done.refusal


def test_nobody_is_trusted_by_default(model: SignedModel) -> None:
    done = invoke("generate", model.folder, "--prompt", "a")
    assert (done.code, done.stdout) == (2, "")
    assert "nobody is trusted" in done.refusal


def long_run(model: SignedModel) -> list[str]:
    limits = ("--context", "4000", "--kv-cache-gib", "0.1")
    asked = ("--prompt", PROMPT, "--max-tokens", "3900", "--ignore-eos")
    return command("generate", model.folder, "--verify-key", model.key, *limits, *asked)


def test_ctrl_c_ends_it_with_130(model: SignedModel) -> None:
    with subprocess.Popen(long_run(model), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(stderr.splitlines()) == 1
    assert "MEMOPT_INTERRUPTED" in stderr


def test_a_reader_that_goes_away_ends_it_quietly(model: SignedModel) -> None:
    start = time.monotonic()
    with subprocess.Popen(long_run(model), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read() if process.stderr is not None else ""
        process.wait(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert time.monotonic() - start < 60
