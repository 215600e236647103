"""Chat templates render as transformers renders them, and cannot take a thread for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftd.errors import CheckpointError, RequestInvalid
from ftd.text.template import ChatTemplate, TemplateRefused, TemplateRunaway

DEMO = Path(__file__).parents[2] / "ftd" / "demo"
USER = {"role": "user", "content": "Hi <b> & 'you' — 世界"}
TOOL = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {"ü<": {}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": {"p": "ä&<"}}}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be terse."}, USER],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "a\nb", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done", "reasoning_content": "hm"},
        USER,
    ],
]
TEMPLATES = {
    "demo": json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"],
    "blocks": """
{%- for m in messages %}
    {% if m.role == 'system' -%} [{{ m.content }}]
    {%- else %}
  {{ loop.index0 }} {{ m.role }}: {{ m.content | trim }}
        {% if loop.index > 3 %}{% break %}{% endif %}
    {%- endif %}
{% endfor %}
{{ tools | tojson(indent=2) }} {{ bos_token }}|{{ missing }}|""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "namespace": """{%- set ns = namespace(n=0, last='') %}
{%- macro show(m) %}<{{ m.role }}>{{ caller() if caller else '' }}{% endmacro %}
{%- for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}
{%- call show(m) %}{{ m.content | length }}{% endcall %}{% endfor %}{{ ns.n ~ ns.last }}
{%- set d = dict(a=1) %}{{ d | tojson }}{{ '-' * 3 }}{{ 2 ** 3 }}
{%- if add_generation_prompt %}{{ 'go' if enable_thinking }}{% endif %}""",
}


@pytest.mark.parametrize("chat", CHATS, ids=len)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(name: str, chat: list[dict]):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    extra = {"enable_thinking": True, "bos_token": "<s>"}
    for tools in (None, [TOOL]):
        (theirs,), _ = utils.render_jinja_template(
            [chat], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **extra
        )
        ours = ChatTemplate(TEMPLATES[name]).render(chat, tools=tools, extra=extra)
        assert ours == theirs


def test_the_demo_tokenizer_gives_the_ids_transformers_gives():
    transformers = pytest.importorskip("transformers")
    from ftd.text.textmodel import TextModel

    theirs = transformers.AutoTokenizer.from_pretrained(DEMO)
    ours = TextModel(DEMO)
    for chat in CHATS:
        for tools in (None, [TOOL]):
            ids = theirs.apply_chat_template(
                chat, tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert ours.encode(ours.render(chat, tools=tools)) == ids
        assert ours.encode(chat[0]["content"], special_tokens=True) == theirs.encode(
            chat[0]["content"]
        )


def test_a_refusal_has_the_templates_reason_and_the_message():
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools!') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    chat = [USER, USER, {"role": "tool", "content": ""}, USER, USER]
    with pytest.raises(TemplateRefused, match=r"messages\[2\]: no tools!") as caught:
        template.render(chat)
    assert caught.value.param == "messages[2]"
    assert template.render(chat[:2]) == USER["content"] * 2


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[0]['x']['y'] }}", "{{ ''.__class__.mro() }}"],
)
def test_a_template_that_fails_is_a_refusal(source: str):
    with pytest.raises(TemplateRefused):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_a_runaway_template_is_cut(source: str):
    with pytest.raises(TemplateRunaway):
        ChatTemplate(source, cpu_limit_s=0.05).render([USER])


def test_endless_recursion_is_a_refusal():
    template = ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(RequestInvalid):
        template.render([USER])


def test_a_syntax_error_names_file_and_line():
    with pytest.raises(CheckpointError, match=r"dir/chat_template.jinja.*line 2"):
        ChatTemplate("ok\n{% if %}", where="dir/chat_template.jinja")


def test_the_sandbox_keeps_messages_as_they_are():
    with pytest.raises(TemplateRefused):
        ChatTemplate("{{ messages.append(1) }}").render([USER])
    with pytest.raises(TemplateRefused, match="may not hold the name"):
        ChatTemplate("{% set n = namespace(__class__=1) %}").render([USER])


@pytest.mark.parametrize(
    "source", ["{{ m.thinking }}", "{{ m['reasoning'] }}", "{{ m.reasoning_content }}", "{{ 1 }}"]
)
def test_thinking_is_given_under_the_name_the_template_reads(source: str):
    template = ChatTemplate(f"{{% for m in messages %}}{source}{{% endfor %}}")
    chat = [{"role": "assistant", "content": "", "reasoning_content": "why"}]
    assert template.render(chat) == ("1" if "1" in source else "why")
    assert chat[0]["reasoning_content"] == "why"
