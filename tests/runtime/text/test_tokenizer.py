"""A release's tokenizer: files, refusals, ends of answers, both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzz.json_mutator import mutated_json
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from tokenizers import Tokenizer, decoders, models

from memopt.errors import ConfigError, ContentError, MalformedError, MemoptError, UnsupportedError, UsageError
from memopt.runtime.text.byte_alphabet import BYTE_CHARACTERS
from memopt.runtime.text.tokenizer import TextTokenizer, load_tokenizer, parse_tokenizer_json
from memopt.runtime.text.tokenizer_config import parse_tokenizer_config
from memopt.runtime.text.tokenizers_faults import tokenizers_faults

TINY = Path(__file__).parents[3] / "examples" / "tiny-glm5-fp8"
FILES = {
    name: (TINY / name).read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
}


def load(**changes: bytes | dict[str, Any] | None) -> TextTokenizer:
    """The tiny release's tokenizer, its files (named with _ for .) changed; None: the file is not there."""
    files = dict(FILES)
    for name, content in changes.items():
        file = f"{name}.json"
        if content is None:
            del files[file]
        else:
            files[file] = content if isinstance(content, bytes) else json.dumps(content).encode()
    return load_tokenizer(files.__getitem__, files.keys())


def test_the_tiny_release() -> None:
    tokenizer = load()
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.chat_template is None
    assert tokenizer.encode("def f(x):\n") == [485, 290, 10, 90, 310, 201]
    assert tokenizer.encode("<|user|>hi") == [1, 74, 75]


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_comes_back(text: str) -> None:
    tokenizer = load()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ends_of_answers_come_from_all_files() -> None:
    tokenizer = load(
        generation_config={"eos_token_id": [7, 9]},
        config={"eos_token_id": 5, "text_config": {"eos_token_id": 11}},
        tokenizer_config={"eos_token": {"content": "<|assistant|>", "lstrip": False}},
    )
    assert tokenizer.eos_token_ids == (2, 5, 7, 9, 11)
    assert load(generation_config=None, config={"eos_token_id": None}, tokenizer_config=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer": None}, UnsupportedError, ("neither tokenizer.json nor tiktoken.model", "token ids")),
        ({"tokenizer": b"{}"}, MalformedError, ("tokenizer.json", "Model missing")),
        ({"tokenizer": b"\xff"}, MalformedError, ("tokenizer.json",)),
        ({"tokenizer_config": b"[]"}, ConfigError, ("tokenizer_config.json", "object is needed")),
        ({"tokenizer_config": {"eos_token": 3}}, ConfigError, ("tokenizer_config.json", "eos_token")),
        ({"tokenizer_config": {"eos_token": "<nowhere>"}}, ConfigError, ("'<nowhere>'", "vocabulary")),
        ({"tokenizer_config": {"chat_template": 1}}, ConfigError, ("tokenizer_config.json", "chat_template")),
        ({"tokenizer_config": {"eos_token": "\ud800"}}, ConfigError, ("tokenizer_config.json", "surrogate")),
        ({"generation_config": {"eos_token_id": "0"}}, ConfigError, ("generation_config.json", "eos_token_id")),
        ({"config": {"eos_token_id": [1, -2]}}, ConfigError, ("config.json", "eos_token_id")),
        ({"config": {"eos_token_id": True}}, ConfigError, ("config.json", "eos_token_id")),
    ],
)
def test_files_that_are_wrong(changes: dict[str, Any], error: type[ConfigError], words: tuple[str, ...]) -> None:
    with refusal(error, *words):
        load(**changes)


def test_tokens_that_are_no_bytes_are_refused() -> None:
    tokenizer = Tokenizer.from_buffer(FILES["tokenizer.json"])
    tokenizer.decoder = decoders.Metaspace()
    with refusal(UnsupportedError, "tokenizer.json", "Metaspace", "token ids"):
        parse_tokenizer_json(tokenizer.to_str().encode())


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("pre_tokenizer", None, "no pre-tokenizer"),
        ("pre_tokenizer", {"type": "Digits", "individual_digits": True}, "no pre-tokenizer"),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "WordLevel"),
    ],
)
def test_a_text_that_would_not_become_bytes_is_refused(part: str, value: Any, words: str) -> None:
    """The library takes such files, and then drops or mixes up characters, or raises a bare Exception."""
    fields = json.loads(FILES["tokenizer.json"])
    fields[part] = value
    with refusal(UnsupportedError, "tokenizer.json", words, "token ids"):
        load(tokenizer=fields)


def test_a_byte_that_the_vocabulary_lacks_is_refused() -> None:
    fields = json.loads(FILES["tokenizer.json"])
    model = fields["model"]
    fields["model"] = {**model, "merges": [], "vocab": dict.fromkeys(BYTE_CHARACTERS, 0)}
    for place, name in enumerate(BYTE_CHARACTERS):
        fields["model"]["vocab"][name] = place
    # Real vocabularies lack rare bytes: this one is in every "é", and only texts that have it are refused.
    del fields["model"]["vocab"][BYTE_CHARACTERS[0xA9]]
    tokenizer = load(tokenizer=fields, tokenizer_config=None)
    assert tokenizer.encode("aà") == [ord("a"), 0xC3, 0xA0]
    with refusal(UsageError, "0xA9"):
        tokenizer.encode("aé")
    del fields["model"]["vocab"]["q"]
    with refusal(ContentError, "tokenizer.json", "1 bytes have no token", "0x71"):
        load(tokenizer=fields, tokenizer_config=None)


def test_whatever_the_library_raises_is_a_refusal() -> None:
    """It raises Exception itself while it encodes (bindings/python/src/error.rs)."""
    with refusal(MalformedError, "tokenizer.json", "WordLevel"), tokenizers_faults("tokenizer.json"):
        Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).encode("b")
    with pytest.raises(KeyboardInterrupt), tokenizers_faults("tokenizer.json"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("token_id", [-1, 2048, 2**32, 2**63])
def test_ids_that_the_vocabulary_lacks_have_no_text(token_id: int) -> None:
    assert load().decode([74, token_id, 75]) == "hi"


def test_an_id_of_thousands_of_digits_is_refused() -> None:
    """Python refuses to read it, with a ValueError."""
    config = parse_tokenizer_config({"added_tokens_decoder": {"9" * 5000: {"content": "a"}}})
    with refusal(ConfigError, "tokenizer_config.json", "not an id"):
        _ = config.added_tokens


def test_a_tokenizer_that_encodes_at_random_is_refused() -> None:
    fields = json.loads(FILES["tokenizer.json"])
    fields["model"]["dropout"] = 0.1
    with refusal(UnsupportedError, "dropout"):
        load(tokenizer=fields)


def test_a_panic_of_the_library_is_a_refusal() -> None:
    fields = json.loads(FILES["tokenizer.json"])
    # The library cuts this off the second part of every merge, whatever that begins with (models/bpe/model.rs).
    fields["model"]["continuing_subword_prefix"] = "a long prefix"
    with refusal(MalformedError, "tokenizer.json", "fetch the file again"):
        load(tokenizer=fields)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_changed_configs_are_read_or_refused(seed: int) -> None:
    values = {
        "eos_token": {"content": "<|user|>"},
        "chat_template": [{"name": "default", "template": "x"}],
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    }
    changed = mutated_json(json.dumps(values).encode(), seed)
    try:
        is_right = 0 in load(tokenizer_config=changed).eos_token_ids
    except MemoptError as problem:
        is_right = "tokenizer_config.json" in str(problem)
    assert is_right


def test_a_prompt_is_never_cut_or_padded_silently() -> None:
    tokenizer = Tokenizer.from_buffer(FILES["tokenizer.json"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert load(tokenizer=tokenizer.to_str().encode()).encode("def f(x):\n") == [485, 290, 10, 90, 310, 201]


def test_half_a_character_is_refused() -> None:
    with refusal(UsageError, "no Unicode text"):
        load().encode("a\ud800")


def test_a_text_too_long_to_be_encoded_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.runtime.text.tokenizer.MAX_PROMPT_BYTES", 10)
    assert load().decode(load().encode("漢字x ab")) == "漢字x ab"
    with refusal(UsageError, "11 bytes", "at most 10"):
        load().encode("漢字x abc")


def test_a_conversation_needs_a_template() -> None:
    with refusal(UsageError, "no chat template", "plain prompt"):
        load().encode_chat([{"role": "user", "content": "hi"}])


def test_a_conversation_is_encoded_with_its_control_tokens() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ eos_token }}"
    tokenizer = load(tokenizer_config={"chat_template": template, "eos_token": "<|endoftext|>"})
    try:
        assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [1, 74, 75, 0]
    finally:
        tokenizer.close()
