"""A release's tokenizer: text to token ids and back, conversations to prompts, and which tokens end an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memopt.errors import ConfigError, ContentError, MalformedError, UnsupportedError, UsageError
from memopt.kernels.layout import BITS_PER_BYTE
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.text.answer_text import AnswerText
from memopt.runtime.text.byte_alphabet import BYTE_CHARACTERS, token_bytes, token_text
from memopt.runtime.text.chat_template import ChatTemplate, load_chat_template
from memopt.runtime.text.tiktoken_ranks import TIKTOKEN_NAME, build_tiktoken_tokenizer
from memopt.runtime.text.tokenizer_config import (
    TOKENIZER_CONFIG_NAME,
    TokenizerConfig,
    parse_end_tokens,
    parse_tokenizer_config,
)
from memopt.runtime.text.tokenizers_faults import tokenizers_faults

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
END_TOKEN_FILES = ("generation_config.json", "config.json")
# Vocabularies of 150,000 tokens take some 20 MB.
MAX_TOKENIZER_BYTES = 1 << 28
MAX_CONFIG_BYTES = 1 << 24
# A million tokens are some 4 MB. The library takes 200 bytes of memory and 4 microseconds a byte.
MAX_PROMPT_BYTES = 1 << 24
# The library's ids are 32 bits without a sign.
_NUM_IDS = 1 << 32
# Without tokens for these a vocabulary is no byte-level one. Real ones lack rare bytes (SmolLM2's has no 0x04): a text
# with such a byte is refused when it is encoded, for the library would leave the byte out in silence.
_NEEDED_BYTES = (ord("\n"), *range(ord(" "), ord("~") + 1))
# A character of two bytes, and one that byte-level BPE spells otherwise.
_SPELLED = "é\n"
_IDS_REMEDY = "pass prompts as token ids"


class TextTokenizer:
    """A byte-level BPE of the `tokenizers` library. Not changed after it was made; any thread may use it."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Iterable[int] = (), chat_template: ChatTemplate | None = None
    ) -> None:
        """`tokenizer`: as load_tokenizer makes it, with ByteLevel's decoder. `eos_token_ids`: they end answers."""
        self._tokenizer = tokenizer
        self._control_ids = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._absent_bytes = _absent_bytes(tokenizer, range(1 << BITS_PER_BYTE))
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.chat_template = chat_template
        self.bytes_of = lru_cache(maxsize=None)(self._bytes_of)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what the tokenizer itself puts around it (often nothing).

        A control token that the text spells is that token, as in transformers and vLLM. UsageError for half a
        character (an unpaired surrogate), for a byte that the vocabulary lacks, and for more than MAX_PROMPT_BYTES.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; the template alone decides what stands around it. Raises as ChatTemplate.render.

        UsageError if the release has no chat template.
        """
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self._encode(text, add_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation (ChatTemplate.render). UsageError if the release has no chat template."""
        if self.chat_template is None:
            raise UsageError("the release has no chat template", remedy="pass a plain prompt")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Their text; control tokens have none, nor have ids that the vocabulary lacks (padding of an embedding)."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", errors="replace")

    def answer_text(self, stop: Iterable[str] = ()) -> AnswerText:
        """What turns one answer's tokens into text as they come."""
        return AnswerText(self.bytes_of, stop)

    def close(self) -> None:
        """End the process that renders chat templates, if there is one."""
        if self.chat_template is not None:
            self.chat_template.process.close()

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token's text; none for a control token and for an id that the vocabulary lacks."""
        if token_id in self._control_ids or not 0 <= token_id < _NUM_IDS:
            return b""
        text = self._tokenizer.id_to_token(token_id)
        return b"" if text is None else token_bytes(text)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as problem:
            raise UsageError(f"the prompt is no Unicode text: {problem}") from None
        if len(raw) > MAX_PROMPT_BYTES:
            raise UsageError(
                f"a prompt of {len(raw):,} bytes; at most {MAX_PROMPT_BYTES:,} are encoded", remedy="shorten it"
            )
        unknown = self._absent_bytes.intersection(raw)
        if unknown:
            raise UsageError(
                f"the prompt holds byte 0x{min(unknown):02X}, for which the vocabulary has no token", remedy="remove it"
            )
        with tokenizers_faults(TOKENIZER_NAME):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _absent_bytes(tokenizer: Tokenizer, values: Iterable[int]) -> frozenset[int]:
    """Those of `values` that have no token of their own."""
    return frozenset(value for value in values if tokenizer.token_to_id(BYTE_CHARACTERS[value]) is None)


def load_tokenizer(read_file: Callable[[str], bytes], names: Collection[str]) -> TextTokenizer:
    """The tokenizer of a release; `read_file` gives the verified bytes of one of its files `names`.

    tokenizer.json, else Kimi's tiktoken.model. Answers end with the tokens of `eos_token_id` in generation_config.json
    and config.json and with tokenizer_config.json's eos_token. MalformedError, ConfigError and ContentError name the
    file that is wrong; UnsupportedError if there is no tokenizer that memopt reads.
    """
    config = parse_tokenizer_config(_read_object(read_file, names, TOKENIZER_CONFIG_NAME))
    tokenizer = _build(read_file, names, config)
    ends = {
        token_id
        for name in END_TOKEN_FILES
        for token_id in parse_end_tokens(_read_object(read_file, names, name), name)
    }
    if config.eos_token is not None:
        token_id = tokenizer.token_to_id(config.eos_token)
        if token_id is None:
            raise ConfigError(
                f"eos_token {config.eos_token!r} is not in the vocabulary",
                file=TOKENIZER_CONFIG_NAME,
                remedy=_IDS_REMEDY,
            )
        ends.add(token_id)
    return TextTokenizer(tokenizer, ends, load_chat_template(read_file, names, config))


def _read_object(read_file: Callable[[str], bytes], names: Collection[str], name: str) -> dict[str, Any]:
    if name not in names:
        return {}
    return parse_json_object(_capped(read_file(name), MAX_CONFIG_BYTES, name), name, ConfigError)


def _capped(raw: bytes, max_size_bytes: int, name: str) -> bytes:
    if len(raw) > max_size_bytes:
        raise MalformedError(f"{len(raw):,} bytes, at most {max_size_bytes:,} are read", file=name)
    return raw


def _build(read_file: Callable[[str], bytes], names: Collection[str], config: TokenizerConfig) -> Tokenizer:
    if TOKENIZER_NAME in names:
        return parse_tokenizer_json(_capped(read_file(TOKENIZER_NAME), MAX_TOKENIZER_BYTES, TOKENIZER_NAME))
    if TIKTOKEN_NAME in names:
        raw = _capped(read_file(TIKTOKEN_NAME), MAX_TOKENIZER_BYTES, TIKTOKEN_NAME)
        return build_tiktoken_tokenizer(raw, config.added_tokens)
    raise UnsupportedError(
        f"there is neither {TOKENIZER_NAME} nor {TIKTOKEN_NAME}: text cannot be encoded", remedy=_IDS_REMEDY
    )


def parse_tokenizer_json(raw: bytes) -> Tokenizer:
    """The Tokenizer that tokenizer.json describes, without its truncation and padding.

    MalformedError for a file that is none; UnsupportedError for one whose tokens are not bytes (SentencePiece), or that
    encodes at random (BPE dropout); ContentError for a printable ASCII character without a token.
    """
    from tokenizers import Tokenizer, decoders, models

    with tokenizers_faults(TOKENIZER_NAME):
        tokenizer = Tokenizer.from_buffer(raw)
        before = tokenizer.pre_tokenizer
        spelled = _SPELLED if before is None else "".join(part for part, _ in before.pre_tokenize_str(_SPELLED))
    model, decoder = tokenizer.model, tokenizer.decoder
    if not (isinstance(model, models.BPE) and isinstance(decoder, decoders.ByteLevel)):
        raise UnsupportedError(
            f"the model is {type(model).__name__}, the decoder {type(decoder).__name__}; byte-level BPE is supported",
            file=TOKENIZER_NAME,
            remedy=_IDS_REMEDY,
        )
    # A space may be put before.
    if not spelled.endswith(token_text(_SPELLED.encode())):
        raise UnsupportedError("no pre-tokenizer spells texts in bytes", file=TOKENIZER_NAME, remedy=_IDS_REMEDY)
    absent = _absent_bytes(tokenizer, _NEEDED_BYTES)
    if absent:
        raise ContentError(f"{len(absent)} bytes have no token, the first is 0x{min(absent):02X}", file=TOKENIZER_NAME)
    if model.dropout:
        raise UnsupportedError("BPE dropout encodes at random", file=TOKENIZER_NAME, remedy=_IDS_REMEDY)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
