"""Which template a release brings, and what of a conversation reaches it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from refusals import refusal

from memopt.errors import ConfigError, MalformedError, UsageError
from memopt.runtime.text.chat_template import ChatTemplate, load_chat_template
from memopt.runtime.text.template_process import TemplateProcess
from memopt.runtime.text.tokenizer_config import parse_tokenizer_config

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def load(files: dict[str, bytes], **config: Any) -> ChatTemplate | None:
    return load_chat_template(files.__getitem__, files.keys(), parse_tokenizer_config(config))


def source(files: dict[str, bytes], **config: Any) -> str | None:
    template = load(files, **config)
    return None if template is None else template.source


def test_the_file_goes_before_the_configs_template() -> None:
    assert source({"chat_template.jinja": b"file"}, chat_template="config") == "file"
    assert source({}, chat_template="config") == "config"
    assert source({"tokenizer.json": b""}) is None


def test_of_several_templates_the_default_one_counts() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert source({}, chat_template=named) == "d"
    assert source({}, chat_template=named[:1]) is None


def test_templates_that_are_no_text() -> None:
    with refusal(MalformedError, "chat_template.jinja", "UTF-8"):
        load({"chat_template.jinja": b"\xff"})
    with refusal(MalformedError, "chat_template.jinja", "1,048,577"):
        load({"chat_template.jinja": b"x" * (2**20 + 1)})
    with refusal(ConfigError, "tokenizer_config.json: chat_template"):
        load({}, chat_template=[{"name": "default"}])


def test_control_tokens_and_variables_are_at_hand(process: TemplateProcess) -> None:
    config = parse_tokenizer_config({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools }}{{ effort }}{{ add_generation_prompt }}"
    template = ChatTemplate(text, "config.json", config.control_tokens, process)
    assert template.render(USER, variables={"effort": 3}) == "<s></s>FalseNone3True"
    assert template.render(USER, add_generation_prompt=False) == "<s></s>FalseNoneFalse"


def test_keys_that_are_none_are_left_out(process: TemplateProcess) -> None:
    template = ChatTemplate("{{ 'name' in messages[0] }}", "f", {}, process)
    assert template.render([{"role": "user", "content": "", "name": None}]) == "False"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ("without messages",)),
        ([{"content": "hi"}], ("message 0 has no role",)),
        ([*USER, {"role": 3}], ("message 1 has no role",)),
        (["hi"], ("message 0 has no role",)),
        ([{"role": "user", "content": b"hi"}], ("plain JSON",)),
        ([{"role": "user", "content": float("nan")}], ("plain JSON",)),
    ],
)
def test_messages_that_are_none(process: TemplateProcess, messages: list[Any], words: tuple[str, ...]) -> None:
    with refusal(UsageError, *words):
        ChatTemplate("x", "f", {}, process).render(messages)
