"""Borders of messages, found in what templates of several families write."""

import re

import pytest

from ftd.kv.anchors import AnchorKind
from ftd.text.borders import find_borders
from ftd.text.template import ChatTemplate

CHATML = """{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """<bos>{% for m in messages %}<|head|>{{ m.role }}<|headed|>

{{ m.content }}{% for c in m.tool_calls or [] %}
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}
{%- if m.tool_calls %}<|eom|>{% else %}<|eot|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|headed|>

{% endif %}"""
MISTRAL = """<s>{% for m in messages %}{% if m.role == 'system' %}[SYS]{{ m.content }}[/SYS]
{%- elif m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[RESULTS]{{ m.content }}[/RESULTS]
{%- else %}{{ m.content }}{% for c in m.tool_calls or [] %}[CALLS]{{ c.function.name }}[ARGS]
{{- c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"""
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}
{%- if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}
{%- if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>
{%- else %}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
PLAIN = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"

SYSTEM = {"role": "system", "content": "Be good."}
CALL = {"id": "a", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}
TASK = [
    {"role": "user", "content": "\nLook."},
    {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "x y"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "More."},
]


def encode(text):
    """A token of its own for all that looks special, one for each other character."""
    found = re.findall(r"<[^<>\s]+>|\[/?[A-Z]+\]|.", text, re.DOTALL)
    return [hash(t) % 10**6 + 2000 if len(t) > 1 else ord(t) for t in found]


def borders_of(source):
    template = ChatTemplate(source)
    added = frozenset(encode("".join(re.findall(r"<[^<>\s]+>|\[/?[A-Z]+\]", source))))
    return template, find_borders(template.render, encode, added)


def pieces(source, messages):
    """Kind of each border, and the text up to it since the one before."""
    template, borders = borders_of(source)
    text = template.render(messages)
    found = re.findall(r"<[^<>\s]+>|\[/?[A-Z]+\]|.", text, re.DOTALL)
    at, out = 0, []
    for anchor in borders.anchors(encode(text)):
        out.append((str(anchor.kind), "".join(found[at : anchor.position])))
        at = anchor.position
    return out


def test_chatml_has_every_kind_of_border():
    assert pieces(CHATML, [SYSTEM, *TASK]) == [
        ("system", "<|im_start|>system\nBe good.<|im_end|>\n"),
        ("role", "<|im_start|>user\n\nLook.<|im_end|>\n"),
        ("thought", "<|im_start|>assistant\n<think>\nHm.\n</think>"),
        ("call", "\n\nOk."),
        ("call end", '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'),
        ("turn", "<|im_end|>\n"),
        ("result", "<|im_start|>user\n<tool_response>\nx y\n</tool_response><|im_end|>\n"),
        ("user", "<|im_start|>assistant\nDone.<|im_end|>\n"),
        ("role", "<|im_start|>user\nMore.<|im_end|>\n"),
    ]


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (LLAMA, "system role turn result user role"),
        (MISTRAL, "system call role user"),  # an answer begins without a marker
        (HARMONY, "system role turn result user role"),
        (PLAIN, ""),  # nothing that text could not run into: no borders are claimed
    ],
    ids=["llama", "mistral", "harmony", "plain"],
)
def test_borders_of_other_families(source, kinds):
    assert [kind for kind, _ in pieces(source, [SYSTEM, *TASK])] == kinds.split()


def test_a_system_message_in_the_middle_is_a_border():
    messages = [*TASK[:1], {"role": "assistant", "content": "Ok."}, SYSTEM, TASK[4]]
    assert [kind for kind, _ in pieces(CHATML, messages)] == [
        "role", "turn", "user", "role"
    ]  # fmt: skip


def test_positions_rise_and_lie_within_the_prompt():
    template, borders = borders_of(CHATML)
    ids = encode(template.render([SYSTEM, *TASK * 40]))
    positions = [anchor.position for anchor in borders.anchors(ids)]
    assert positions == sorted(set(positions))
    assert positions[0] > 0 and positions[-1] < len(ids)
    users = [a for a in borders.anchors(ids) if a.kind is AnchorKind.USER]
    assert len(users) == 1


def test_a_beginning_has_the_same_borders_whatever_follows():
    template, borders = borders_of(CHATML)
    ids = encode(template.render([SYSTEM, *TASK]))
    whole = [a.position for a in borders.anchors(ids)]
    for end in range(len(ids)):
        cut = {a.position for a in borders.anchors(ids[:end])}
        marker = len("<|im_start|>assistant")  # what has to be there to tell
        assert {p for p in whole if p < end - marker} <= cut <= set(whole)
