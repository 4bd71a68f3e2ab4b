"""Kimi's ranks: the tokens that tiktoken's own rule gives, and files that are none."""

from __future__ import annotations

import base64
import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from memopt.errors import ContentError, MalformedError, UnsupportedError
from memopt.runtime.text import tiktoken_ranks
from memopt.runtime.text.byte_alphabet import token_bytes
from memopt.runtime.text.tiktoken_ranks import KIMI_PATTERN, build_tiktoken_tokenizer, merge_pairs, parse_ranks
from memopt.runtime.text.tokenizer import load_tokenizer
from memopt.runtime.text.tokenizer_config import AddedTokenFields

DOCS = Path(__file__).parents[3] / "docs"
CUT = pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated")
BYTES = [bytes((value,)) for value in range(256)]


def written(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@cache
def trained_ranks() -> tuple[bytes, ...]:
    """700 ranks of a vocabulary trained on this repository's pages and some Chinese."""
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([CUT, pre_tokenizers.ByteLevel(False, use_regex=False)])
    texts = [path.read_text() for path in sorted(DOCS.glob("*.md"))] + ["你好，世界！机器学习，学习机器。" * 20]
    tokenizer.train_from_iterator(texts, trainer)
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return tuple(token_bytes(token) for _, token in by_id)


@cache
def trained() -> Tokenizer:
    return build_tiktoken_tokenizer(written(list(trained_ranks())), {})


def tiktoken_ids(text: str) -> list[int]:
    """tiktoken's rule (src/lib.rs, byte_pair_merge): join the neighbours of lowest rank, leftmost first, to the end."""
    ranks = {token: rank for rank, token in enumerate(trained_ranks())}
    ids: list[int] = []
    for piece, _ in CUT.pre_tokenize_str(text):
        parts = [bytes((value,)) for value in piece.encode()]
        if piece.encode() in ranks:
            parts = [piece.encode()]
        while True:
            pairs = [left + right for left, right in pairwise(parts)]
            joined = [(ranks[pair], place) for place, pair in enumerate(pairs) if pair in ranks]
            if not joined:
                break
            _, place = min(joined)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


TEXTS = st.text(max_size=30) | st.text("the scale of a 学习机器你好 \n'sTHE12", max_size=60)


@given(text=TEXTS)
@settings(max_examples=300, deadline=None)
def test_tokens_are_those_of_tiktokens_rule(text: str) -> None:
    ids = trained().encode(text, add_special_tokens=False).ids
    assert ids == tiktoken_ids(text)
    assert b"".join(trained_ranks()[token_id] for token_id in ids).decode() == text


def test_a_whole_page() -> None:
    text = (DOCS / "threat-model.md").read_text()
    ids = trained().encode(text, add_special_tokens=False).ids
    assert ids == tiktoken_ids(text)
    assert len(ids) < 0.6 * len(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # ml-rust/splintr, tests of Kimi's tokenizer, made with tiktoken and Moonshot's pattern.
        ("中文English混合", ["中文", "English", "混合"]),
        ("汉字abc", ["汉字", "abc"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        ("I'll don't HTTPServer's", ["I'll", " don't", " HTTPServer's"]),
        ("1234567", ["123", "456", "7"]),
        ("  a\n\n b!!\n", [" ", " a", "\n\n", " b", "!!\n"]),
    ],
)
def test_where_text_is_cut(text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in CUT.pre_tokenize_str(text)] == pieces


def test_every_cut_of_a_token_is_a_pair() -> None:
    tokens = (*BYTES, b"ab", b"bc", b"abc")
    pairs = [(tokens[left], tokens[right]) for left, right in merge_pairs(tokens)]
    assert pairs == [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc"), (b"ab", b"c")]


def test_a_vocabulary_that_joins_in_too_many_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one byte, each a token: a file of some megabytes would make pairs of many gigabytes."""
    runs = tuple(b"a" * length for length in range(2, 12))
    # A run of n bytes is cut in n - 1 places.
    num_pairs = sum(range(1, 11))
    monkeypatch.setattr(tiktoken_ranks, "MAX_PAIRS", num_pairs)
    assert len(merge_pairs((*BYTES, *runs))) == num_pairs
    monkeypatch.setattr(tiktoken_ranks, "MAX_PAIRS", num_pairs - 1)
    with refusal(MalformedError, "tiktoken.model", "54 ways"):
        build_tiktoken_tokenizer(written([*BYTES, *runs]), {})


def test_ids_behind_the_ranks_are_control_tokens() -> None:
    files = {
        "tiktoken.model": written(list(trained_ranks())),
        "tokenizer_config.json": json.dumps(
            {
                "eos_token": "[EOS]",
                "added_tokens_decoder": {
                    "701": {"content": "[EOS]", "special": True},
                    "702": {"content": "<think>", "special": False},
                },
            }
        ).encode(),
    }
    tokenizer = load_tokenizer(files.__getitem__, files.keys())
    assert tokenizer.eos_token_ids == (701,)
    ids = tokenizer.encode("the [EOS]<think><|reserved_token_955|>x")
    assert ids[-4:-1] == [701, 702, 955]
    assert tokenizer.decode(ids) == "the <think>x"


@pytest.mark.parametrize(("token_id", "content", "words"), [(5, "[X]", ("added token 5",)), (703, "a", ("'a'", "703"))])
def test_added_tokens_in_the_wrong_place(token_id: int, content: str, words: tuple[str, ...]) -> None:
    with refusal(UnsupportedError, "tiktoken.model", "token ids", *words):
        build_tiktoken_tokenizer(written(list(trained_ranks())), {token_id: AddedTokenFields(content=content)})


@given(raw=st.binary(max_size=60) | st.text("YWI= 012\n", max_size=60).map(str.encode), start=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_ranks_or_refused(raw: bytes, start: int) -> None:
    whole = written(BYTES) + raw if start else raw
    try:
        is_right = written(list(parse_ranks(whole))).splitlines() == whole.splitlines()
    except (MalformedError, ContentError) as problem:
        is_right = str(problem).startswith("tiktoken.model: ")
    assert is_right


@pytest.mark.parametrize(
    ("raw", "error", "words"),
    [
        (b"", ContentError, ("256 bytes have no token",)),
        (written(BYTES[:65] + BYTES[66:]), ContentError, ("1 bytes", "0x41")),
        (written([*BYTES, b"ab", b"ab"]), ContentError, ("twice",)),
        (written(BYTES) + b"YWI= 300\n", MalformedError, ("gap", "300")),
        (written(BYTES) + b"YWI= 255\n", MalformedError, ("line 257", "255 again")),
        (written(BYTES) + b"YWI 256\n", MalformedError, ("line 257",)),
        (written(BYTES) + b"YWI= 0256\n", MalformedError, ("line 257",)),
        (written(BYTES) + b"YWI=\n", MalformedError, ("line 257",)),
        (b"version https://git-lfs.github.com/spec/v1\n", MalformedError, ("line 1",)),
    ],
)
def test_files_that_are_no_ranks(raw: bytes, error: type[MalformedError], words: tuple[str, ...]) -> None:
    with refusal(error, "tiktoken.model", *words):
        parse_ranks(raw)
