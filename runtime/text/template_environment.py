"""A release's chat template rendered as transformers renders it: jinja2's sandbox, no clock, no files, plain data only.

Source of the surroundings: transformers 5, utils/chat_template_utils.py, _compile_jinja_template. `strftime_now` is
left out: a prompt must not depend on the day. Templates that ask `strftime_now is defined` take their own default.

Runs in a process of its own (template_worker.py), because a sandbox bounds neither time nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """`{% generation %}`, which marks an assistant's words for training: here it only has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainNamespace(Namespace):
    """jinja2's namespace without names that begin with an underscore, which lead to Python's inside."""

    def __init__(*arguments: Any, **named: Any) -> None:  # `self` may be a name in the template
        self = arguments[0]
        values = dict(*arguments[1:], **named)
        for name in values:
            _refuse_hidden(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace keeps no {name!r}")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter writes <, > and & as escapes, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*arguments: Any, **named: Any) -> dict[Any, Any]:
    return dict(*arguments, **named)


@lru_cache(maxsize=4)
def compile_template(source: str) -> Template:
    """The template in its surroundings. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    # `dict` itself would hand out its attributes.
    environment.globals |= {"raise_exception": _raise_exception, "dict": _new_dict, "namespace": PlainNamespace}
    return environment.from_string(source)


def render(template: Template, variables: Mapping[str, Any], max_characters: int) -> str:
    """The text of a conversation; jinja2.TemplateError if it gets longer than `max_characters`, or as rendering fails.

    `variables`: plain JSON values.
    """
    pieces: list[str] = []
    num_left = max_characters
    for piece in template.generate(variables):
        num_left -= len(piece)
        if num_left < 0:
            raise TemplateError(f"the conversation has more than {max_characters:,} characters")
        pieces.append(piece)
    return "".join(pieces)
