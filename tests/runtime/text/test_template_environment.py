"""Chat templates: the text that transformers renders, and nothing that leads out of the sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import CONVERSATIONS, GLM_LIKE, KIMI_LIKE
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from memopt.runtime.text.template_environment import compile_template, render

TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": "<&>"}}}]


def rendered(source: str, **variables: Any) -> str:
    return render(compile_template(source), variables, 1 << 20)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"eos_token": "</s>"}], ids=str)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("source", [GLM_LIKE, KIMI_LIKE], ids=["glm", "kimi"])
def test_the_text_is_the_one_of_transformers(
    source: str, tools: list[dict[str, Any]] | None, variables: dict[str, Any], add_generation_prompt: bool
) -> None:
    for messages in CONVERSATIONS:
        texts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **variables
        )
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        prompt = add_generation_prompt
        ours = rendered(source, messages=plain, tools=tools, documents=None, add_generation_prompt=prompt, **variables)
        assert ours == texts[0]
        assert len(ours) > 20


@pytest.mark.parametrize(
    "source",
    [
        "{% if true %}\n  x\n{% endif %}\ny\n",
        "{{ {'ä<': [1, none]} | tojson }} {{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}",
        "{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ ns.self }}",
        "{{ dict(a=1) }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ messages | length }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}{{ x }}",
    ],
)
def test_constructs(source: str) -> None:
    texts, _ = render_jinja_template([[{"role": "user", "content": "hi"}]], chat_template=source)
    assert rendered(source, messages=[{"role": "user", "content": "hi"}]) == texts[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'x' %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ strftime_now('%Y') }}",
        "{% if %}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    with pytest.raises((TemplateError, OverflowError, TypeError)):
        rendered(source, messages=[])


def test_a_template_asks_for_the_day_in_vain() -> None:
    assert rendered("{% if strftime_now is defined %}today{% else %}1970{% endif %}") == "1970"


def test_a_long_text_is_refused_while_it_grows() -> None:
    with pytest.raises(TemplateError, match="more than 1,000 characters"):
        render(compile_template("{% for i in range(10000) %}0123456789{% endfor %}"), {}, 1000)
