"""From messages to a prompt's text, by the template that the release brings."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memopt.errors import MalformedError, UsageError
from memopt.runtime.text.template_process import TemplateProcess
from memopt.runtime.text.tokenizer_config import TOKENIZER_CONFIG_NAME, TokenizerConfig

TEMPLATE_NAME = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`source`: jinja2. `file`: where it stands. `control_tokens`: bos_token and the like, by name."""

    source: str
    file: str
    control_tokens: Mapping[str, str]
    process: TemplateProcess = field(default_factory=TemplateProcess, compare=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        `messages`: {"role": …, "content": …} and what else the template knows; keys that are None are left out.
        `add_generation_prompt`: end where the assistant begins to speak. `variables`: tools, enable_thinking and the
        like. UsageError for messages that are none, are not plain JSON values, or that the template refuses.
        """
        chat = [_checked(message, place) for place, message in enumerate(messages)]
        if not chat:
            raise UsageError("a conversation without messages", remedy="give at least one")
        chosen = {"tools": None, "documents": None, **self.control_tokens, **(variables or {})}
        values = {**chosen, "messages": chat, "add_generation_prompt": add_generation_prompt}
        try:
            plain = json.loads(json.dumps(values, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as problem:
            raise UsageError(f"a conversation holds plain JSON values only: {problem}") from None
        return self.process.render(self.source, plain, self.file)


def _checked(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f"message {place} has no role", remedy='a message is {"role": "user", "content": "…"}')
    return {name: value for name, value in message.items() if value is not None}


def load_chat_template(
    read_file: Callable[[str], bytes], names: Collection[str], config: TokenizerConfig
) -> ChatTemplate | None:
    """The template of chat_template.jinja, else of tokenizer_config.json; None if neither has one.

    MalformedError for one that is no text or is larger than 1 MiB.
    """
    if TEMPLATE_NAME in names:
        raw, file = read_file(TEMPLATE_NAME), TEMPLATE_NAME
    elif config.default_template is not None:
        raw, file = config.default_template.encode("utf-8"), TOKENIZER_CONFIG_NAME
    else:
        return None
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise MalformedError(f"a chat template of {len(raw):,} bytes, at most {MAX_TEMPLATE_BYTES:,}", file=file)
    try:
        source = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise MalformedError(f"the chat template is not UTF-8: {problem}", file=file) from None
    return ChatTemplate(source, file, config.control_tokens)
