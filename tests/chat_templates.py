"""Chat templates in the manner of GLM's and Kimi's, with the constructs that theirs use."""

from __future__ import annotations

from typing import Any

GLM_LIKE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = visible_text(m.content) %}
{%- if '</think>' in content %}
    {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning -%}
{{ '\\n<think>' + reasoning.strip() + '</think>' }}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- generation -%}{{ '\\n' + content.strip() }}{%- endgeneration -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- elif m.role == 'skipped' -%}
    {%- continue -%}
{%- else -%}
    {{ raise_exception('no role ' + m.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""

KIMI_LIKE = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are Kimi.<|im_end|>
  {%- endif %}
  {%- set role_name = message.get('name') or message['role'] -%}
  <|im_{{ message['role'] }}|>{{ role_name }}<|im_middle|>
  {%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
    {%- for part in message['content'] -%}{{ part['text'] | trim }}{%- endfor -%}
  {%- endif -%}
  <|im_end|>{{ eos_token if eos_token is defined }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  what is <b>1 & 1</b>?  \n"}],
    [
        {"role": "user", "content": [{"type": "text", "text": " 漢字 é "}, {"type": "text", "text": "🌍"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\nyes", "name": None},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<think>more</think> no "},
    ],
]
