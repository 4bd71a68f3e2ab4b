"""What a release's JSON files say of its tokenizer: control tokens, chat template, tokens that end an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, ValidationError

from memopt.errors import ConfigError

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
# A tokenizer file's name for its one template; others are for calls that name them.
DEFAULT_TEMPLATE = "default"
_ID = re.compile(r"[0-9]{1,9}", re.ASCII)


class AddedTokenFields(BaseModel):
    """One entry of `added_tokens_decoder`."""

    model_config = ConfigDict(strict=True, frozen=True)

    content: Annotated[str, Field(min_length=1)]
    special: bool = False


class NamedTemplate(BaseModel):
    """One of several chat templates."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: str
    template: str


def _content(value: Any) -> Any:
    """A control token is written as its text, or as an added token's fields."""
    return value.get("content") if isinstance(value, dict) else value


ControlToken = Annotated[str | None, BeforeValidator(_content)]


class TokenizerConfig(BaseModel):
    """tokenizer_config.json, as far as text is concerned; what is not named here is not looked at."""

    model_config = ConfigDict(strict=True, frozen=True)

    bos_token: ControlToken = None
    eos_token: ControlToken = None
    unk_token: ControlToken = None
    pad_token: ControlToken = None
    added_tokens_decoder: dict[str, AddedTokenFields] = {}
    chat_template: str | list[NamedTemplate] | None = None

    @property
    def control_tokens(self) -> dict[str, str]:
        """The tokens that a chat template may use by name, those that there are."""
        named = {name: getattr(self, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def added_tokens(self) -> dict[int, AddedTokenFields]:
        """Added tokens by id. ConfigError for an id that is not a number."""
        wrong = [name for name in self.added_tokens_decoder if not _ID.fullmatch(name)]
        if wrong:
            raise ConfigError(f"added_tokens_decoder has {wrong[0]!r:.40}, not an id", file=TOKENIZER_CONFIG_NAME)
        return {int(name): fields for name, fields in self.added_tokens_decoder.items()}

    @property
    def default_template(self) -> str | None:
        """The chat template, or the default one of several."""
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return next((named.template for named in self.chat_template if named.name == DEFAULT_TEMPLATE), None)


def _ids(value: Any) -> Any:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


class EndTokens(BaseModel):
    """`eos_token_id` of config.json or generation_config.json: an id, several, or none."""

    model_config = ConfigDict(strict=True, frozen=True)

    eos_token_id: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_ids)] = ()


Fields = TypeVar("Fields", bound=BaseModel)


def _parse(fields: type[Fields], values: Mapping[str, Any], file: str) -> Fields:
    try:
        return fields.model_validate(dict(values))
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {first['msg']}", file=file) from None


def parse_tokenizer_config(values: Mapping[str, Any]) -> TokenizerConfig:
    """The fields of tokenizer_config.json; ConfigError names the one that is wrong."""
    return _parse(TokenizerConfig, values, TOKENIZER_CONFIG_NAME)


def parse_end_tokens(values: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """Ids that end an answer, of config.json or generation_config.json; a `text_config` counts too (Kimi K2.5)."""
    ids = _parse(EndTokens, values, file).eos_token_id
    inner = values.get("text_config")
    return ids + (_parse(EndTokens, inner, file).eos_token_id if isinstance(inner, dict) else ())
