"""Kimi's tokenizer: `tiktoken.model`, the ranks of byte sequences, made a byte-level BPE of the `tokenizers` library.

A line is a token's bytes in base64, a space and its rank, which is its id too. tiktoken joins, again and again, the two
neighbours whose joint bytes have the lowest rank; `tokenizers` joins by a list of pairs. So every way to cut a token
into two tokens becomes a pair, in the order of the token's rank (as transformers' TikTokenConverter does).

Text is cut before by Moonshot's pattern (moonshotai/Kimi-K2-Instruct, tokenization_kimi.py, `pat_str`): runs of Han
characters, words, up to three digits, punctuation, white space.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from memopt.errors import ContentError, MalformedError, UnsupportedError
from memopt.runtime.text.byte_alphabet import NUM_BYTE_VALUES, token_text
from memopt.runtime.text.tokenizer_config import AddedTokenFields

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TIKTOKEN_NAME = "tiktoken.model"
# tokenization_kimi.py, num_reserved_special_tokens: ids behind the ranks, each with a name even where none is given.
NUM_CONTROL_TOKENS = 256
MAX_TOKEN_BYTES = 4096
# A vocabulary of 200,000 tokens has about half a million.
MAX_PAIRS = 1 << 22

_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (0|[1-9][0-9]{0,8})")


def parse_ranks(raw: bytes, file: str = TIKTOKEN_NAME) -> tuple[bytes, ...]:
    """The bytes of every token, by rank. MalformedError unless each line is one token and ranks go from 0 without gaps.

    ContentError for a byte sequence that has two ranks or a byte that has none: some text could not be encoded.
    """
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if match is None or not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise MalformedError(f"line {number} is not a token's base64 and its rank", file=file)
        if int(match[2]) in by_rank:
            raise MalformedError(f"line {number} gives rank {int(match[2])} again", file=file)
        by_rank[int(match[2])] = token
    if sorted(by_rank) != list(range(len(by_rank))):
        raise MalformedError(f"{len(by_rank):,} ranks with a gap: the highest is {max(by_rank):,}", file=file)
    tokens = tuple(by_rank[rank] for rank in range(len(by_rank)))
    known = set(tokens)
    if len(known) < len(tokens):
        raise ContentError("a token stands there twice, with two ranks", file=file)
    absent = [value for value in range(NUM_BYTE_VALUES) if bytes((value,)) not in known]
    if absent:
        raise ContentError(f"{len(absent)} bytes have no token, the first is 0x{absent[0]:02X}", file=file)
    return tokens


def merge_pairs(tokens: tuple[bytes, ...], file: str = TIKTOKEN_NAME) -> list[tuple[int, int]]:
    """Ranks of all pairs of tokens that make a token: in the order of its rank, then of the parts' ranks.

    MalformedError for more than MAX_PAIRS, as of tokens that are all one another's beginnings.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs: list[tuple[int, int]] = []
    for token in tokens:
        cuts = ((ranks.get(token[:place]), ranks.get(token[place:])) for place in range(1, len(token)))
        pairs += sorted((left, right) for left, right in cuts if left is not None and right is not None)
        if len(pairs) > MAX_PAIRS:
            raise MalformedError(f"its tokens join in more than {MAX_PAIRS:,} ways", file=file)
    return pairs


def build_tiktoken_tokenizer(
    raw: bytes, added_tokens: Mapping[int, AddedTokenFields], file: str = TIKTOKEN_NAME
) -> Tokenizer:
    """A Tokenizer of Kimi's ranks; ids behind them are the `added_tokens`, or reserved ones without a use.

    Raises as parse_ranks does, and UnsupportedError for an added token that another id has already.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = parse_ranks(raw, file)
    texts = [token_text(token) for token in tokens]
    vocabulary = {text: rank for rank, text in enumerate(texts)}
    merges = [(texts[left], texts[right]) for left, right in merge_pairs(tokens, file)]
    # tiktoken looks a whole word up before it joins anything.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    first = len(tokens)
    names = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(first, first + NUM_CONTROL_TOKENS)}
    unplaced = sorted(token_id for token_id in added_tokens if token_id not in names)
    if unplaced:
        raise UnsupportedError(
            f"added token {unplaced[0]} is not one of {first} to {first + NUM_CONTROL_TOKENS - 1}, behind the ranks",
            file=file,
            remedy="pass prompts as token ids",
        )
    names |= {token_id: fields.content for token_id, fields in added_tokens.items()}
    is_control = {token_id: fields.special for token_id, fields in added_tokens.items()}
    tokenizer.add_tokens(
        [
            AddedToken(name, normalized=False, special=is_control.get(token_id, True))
            for token_id, name in sorted(names.items())
        ]
    )
    for token_id, name in names.items():
        if tokenizer.token_to_id(name) != token_id:
            raise UnsupportedError(
                f"added token {name!r} is to be {token_id}, but {tokenizer.token_to_id(name)} is called so too",
                file=file,
                remedy="pass prompts as token ids",
            )
    return tokenizer
