"""Histories in the tokens that were generated, whatever a family's template makes of them."""

# ruff: noqa: E501 - templates stand here as the families write them

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_parse as written  # how the families write answers
from held_answers import EOS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.text.conversation import Conversation, Thinking, Tool
from ftd.text.echo import Call, EchoMemory, Said
from ftd.text.messages import normalise
from ftd.text.textmodel import Rendered, TextModel

# What stands around answers in the families' own templates, as short as can be. All but kimi_k2 and
# glm45 leave out thinking that came before the last message of a user.
TEMPLATES = {
    "hermes": """
{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' -%}
<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><eos>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<eos>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}""",
    "qwen3_coder": """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n\n' if m.content and loop.first else '\n' }}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<eos>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}""",
    "glm45": """[gMASK]<sop>
{%- for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% elif m.role == 'assistant' %}<|assistant|>
<think>{{ m.reasoning_content }}</think>
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    "mistral": """<s>
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] -%}
[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}<eos>
{%- endif %}{% endfor %}""",
    "deepseek_v31": """
{%- set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'user' -%}
<｜User｜>{{ m.content }}{% set ns.tool = false %}{% elif m.role == 'tool' -%}
<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% set ns.tool = true %}{% else -%}
{% if not ns.tool %}<｜Assistant｜></think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] -%}
{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}{% endfor %}<eos>
{%- endif %}{% endfor %}
{%- if add_generation_prompt and not ns.tool %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}""",
    "kimi_k2": """
{%- for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<eos>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}""",
    "harmony": """
{%- for m in messages %}{% if m.role == 'tool' -%}
<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}{% if m.content and m.reasoning_content %}{{ raise_exception('both') }}{% endif -%}
{% if m.content or m.reasoning_content -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.reasoning_content }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
}
ENDS = {
    "glm45": ["<|user|>", "<|observation|>"],
    "harmony": ["<|call|>", "<|return|>"],
}
MARKERS = {
    "hermes": ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    "deepseek_v31": ["<｜Assistant｜>", "<｜User｜>", "<think>", "</think>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]"],
}
TOOL = Tool.declare("f", None, {})
ARGUMENTS = {"path": "a/\u00e9 b", "n": 1.0, "text": "x  \ny\t\n"}
RETURNED = {"text": "x\ny\n", "path": "a/\u00e9 b", "n": 1}


def model(name: str, folder: Path, source: str = "") -> TextModel:
    markers = [*MARKERS.get(name, written.TOKENS[name]), *ENDS.get(name, [])]
    tokenizer = byte_tokenizer(dict.fromkeys(markers))
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(end) for end in ENDS.get(name, [EOS])]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    source = source or TEMPLATES[name]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return TextModel(folder)


class Session:
    """A conversation with a model that writes as its family does, but never quite as its template.

    ``answer`` keeps what was generated; ``say`` and ``result`` go on from there.
    """

    def __init__(self, text: TextModel, name: str) -> None:
        self.text, self.name = text, name
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]

    def prompt(self, messages: list[dict[str, Any]] | None = None) -> Rendered:
        conversation = Conversation(normalise(messages or self.messages), [TOOL])
        return self.text.prompt(conversation, self.name)

    def answer(self, thinking: str, text: str, arguments: dict[str, Any] | None) -> list[int]:
        """The tokens that the next prompt has to begin with."""
        prompt = self.prompt()
        calls = [] if arguments is None else [("f", arguments)]
        generated = self.text.encode(written.TEMPLATES[self.name](thinking, text, calls))
        if generated[-1] in self.text.eos_ids:
            del generated[-1]
        call_id = f"{len(self.messages):032x}"
        arguments_text = json.dumps(arguments, indent=1)
        told = [Call(call_id, "f", arguments_text)] if calls else []
        assert prompt.place is not None
        self.text.echoes.keep(prompt.place, generated, Said(text, [thinking], told))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            function = {"name": "f", "arguments": json.dumps(RETURNED)}
            message["tool_calls"] = [{"id": f"call_{call_id}", "function": function}]
        self.messages.append(message)
        return [*prompt.ids, *generated]

    def result(self, content: str) -> None:
        call_id = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def say(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_begins_with_all_that_was_generated(name: str, tmp_path: Path):
    session = Session(model(name, tmp_path), name)
    sees = session.text.text_of
    for i in range(2):
        known = session.answer("I think  so.", f"Look {i}: ", ARGUMENTS)
        session.result(f"result {i}")
        assert session.prompt().ids[: len(known)] == known, sees(session.prompt().pieces)
        known = session.answer("", "", ARGUMENTS)
        session.result(f"{EOS} <|im_start|>assistant [/INST] result")
        known = session.answer("Now I know.", f" Said {i}.\n", None)
        session.say(f"Go on {i}.")
        assert session.prompt().ids[: len(known)] == known, sees(session.prompt().pieces)
    text = sees(session.prompt().pieces)
    places = [
        text.index(word)
        for word in ("Do it.", "Look 0", "result 0", "Said 0", "Go on 0.", "Look 1", "Go on 1.")
    ]
    assert places == sorted(places), "nothing that was said is lost or moved"
    assert text.count("I think  so.") == text.count("Now I know.") == 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_around_answers_stays(name: str, tmp_path: Path):
    session = Session(model(name, tmp_path), name)
    session.answer("", "Said so.", None)
    session.say("Go on.")
    remembered = session.text.text_of(session.prompt().pieces)
    session.text.echoes = EchoMemory()
    by_template = session.text.text_of(session.prompt().pieces)
    behind = by_template[by_template.index("Said so.") :]
    assert remembered.endswith(behind)
    assert session.text.encode(behind) == session.prompt().ids[-len(session.text.encode(behind)) :]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_client_changed_is_rendered_as_changed(name: str, tmp_path: Path):
    session = Session(model(name, tmp_path), name)
    session.answer("I think.", "I look.", ARGUMENTS)
    session.result("done")
    forgetful = Session(session.text, name)
    for change in (
        {"content": "I look!"},
        {"content": ""},
        {"reasoning_content": "I thought."},
        {"reasoning_content": None},
        {"tool_calls": None},
    ):
        messages = [dict(m) for m in session.messages]
        messages[1] |= change
        assert not has_tokens(session.prompt(messages))
        assert all(word not in shown(session, messages) for word in changed(session, change))
    for value in ({**RETURNED, "n": 2}, {**RETURNED, "more": 1}, {"path": ""}, "no object"):
        messages = json.loads(json.dumps(session.messages))
        arguments = value if isinstance(value, str) else json.dumps(value)
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        assert not has_tokens(forgetful.prompt(messages))
    assert has_tokens(session.prompt()), "it is remembered all the same"


def has_tokens(prompt: Rendered) -> bool:
    return any(not isinstance(piece, str) for piece in prompt.pieces)


def shown(session: Session, messages: list[dict[str, Any]]) -> str:
    return session.text.text_of(session.prompt(messages).pieces)


def changed(session: Session, change: dict[str, Any]) -> list[str]:
    """The words that must be gone."""
    (field,) = change
    return [session.messages[1][field]] if isinstance(session.messages[1][field], str) else []


def test_more_or_other_messages_before_an_answer_are_all_rendered(tmp_path: Path):
    session = Session(model("mistral", tmp_path), "mistral")  # nothing announces its answers
    session.answer("", "I look.", None)
    session.say("And?")
    inserted = [*session.messages]
    inserted.insert(1, {"role": "user", "content": "Wait!"})
    assert "Wait!" in shown(session, inserted)
    replaced = [{"role": "user", "content": "Do that."}, *session.messages[1:]]
    assert "Do that." in shown(session, replaced) and "Do it." not in shown(session, replaced)


def test_a_template_that_hides_where_answers_stand_is_obeyed(tmp_path: Path):
    text = model("hermes", tmp_path)
    session = Session(text, "hermes")
    session.answer("", "I look.", ARGUMENTS)
    session.result("done")
    config = tmp_path / "tokenizer_config.json"
    source = TEMPLATES["hermes"].replace(
        "</tool_call>{% endfor %}", "</tool_call>{% endfor %}, said {{ m.content }}"
    )
    config.write_text(json.dumps({"chat_template": source}))
    odd = TextModel(tmp_path)
    odd.echoes = text.echoes
    session.text = odd
    prompt = session.prompt()
    assert not has_tokens(prompt)
    assert odd.text_of(prompt.pieces).count("I look.") == 2
    assert text.echoes.size_bytes == 0, "it is not tried again"


def test_marks_that_a_template_refuses_cost_nothing_but_time(tmp_path: Path):
    session = Session(model("hermes", tmp_path), "hermes")
    session.answer("", "I look.", ARGUMENTS)
    session.result("done")
    source = "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
    source += "{% if 'path' not in c.function.arguments %}{{ raise_exception('no path') }}"
    source += "{% endif %}{% endfor %}{% endfor %}" + TEMPLATES["hermes"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    odd = TextModel(tmp_path)
    odd.echoes = session.text.echoes
    session.text = odd
    assert not has_tokens(session.prompt())


FIELDS = ("thinking", "words", "argument", "result", "nothing")


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_edited_history_never_yields_the_old_words(name: str, tmp_path: Path):
    text = model(name, tmp_path)

    @settings(max_examples=30, deadline=None)
    @given(edits=st.lists(st.sampled_from(FIELDS), min_size=3, max_size=3))
    def check(edits: list[str]) -> None:
        session = Session(text, name)
        for i in range(3):
            session.answer(f"old-thinking-{i}", f"old-words-{i}", {"path": f"old-argument-{i}"})
            function = session.messages[-1]["tool_calls"][0]["function"]
            function["arguments"] = json.dumps({"path": f"old-argument-{i}"})
            session.result(f"old-result-{i}")
        edited = json.dumps(session.messages)
        for i, field in enumerate(edits):
            edited = edited.replace(f"old-{field}-{i}", f"new-{field}-{i}")
        prompt = shown(session, json.loads(edited))
        for i, field in enumerate(edits):
            assert f"old-{field}-{i}" not in prompt
            assert f"new-{field}-{i}" in prompt or field in ("thinking", "nothing")
            others = {"words", "argument", "result"} - {field}
            assert all(f"old-{other}-{i}" in prompt for other in others)
            # a result that is not what it was says nothing against the answers before it
            as_it_was = set(edits[:i]) <= {"nothing"} and field in ("result", "nothing")
            assert not as_it_was or f"old-thinking-{i}" in prompt

    check()


def test_results_that_a_template_writes_within_an_answer_are_not_lost(tmp_path: Path):
    """Gemma's writes text behind the results of the calls it comes with."""
    source = """
{%- for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>
{%- set id = c.id %}{% for r in messages if r.tool_call_id == id %}({{ r.content }}){% endfor %}
{%- endfor %}{{ m.content }}<eos>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    text = model("hermes", tmp_path, source)
    session = Session(text, "hermes")
    session.answer("", "I look.", ARGUMENTS)
    session.result("It is there.")
    assert "(It is there.)" in shown(session, session.messages)
    assert not has_tokens(session.prompt())
    session.answer("", "", ARGUMENTS)
    session.result("And there.")
    assert "(And there.)" in shown(session, session.messages)


def test_an_answer_is_not_taken_to_an_earlier_place_that_looks_alike(tmp_path: Path):
    """Command R's announces thinking in a prompt, and something else before text of the past."""
    source = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}<think></think><tool_call>{{ m.tool_calls[0].function.arguments | tojson }}
{%- elif m.role == 'assistant' %}[[{{ m.content }}]]
{%- else %}{{ m.content }}{% endif %}<eos>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think></think>{% endif %}"""
    session = Session(model("hermes", tmp_path, source), "hermes")
    session.answer("", "", ARGUMENTS)
    session.text.echoes = EchoMemory()  # this one is forgotten
    session.result("done")
    session.answer("", "So it is.", None)
    session.say("Go on.")
    assert shown(session, session.messages).count("done") == 1


def test_words_about_thinking_at_the_end_of_a_prompt_belong_to_it(tmp_path: Path):
    """Seed's says there how much it may think."""
    source = TEMPLATES["hermes"].replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\nI may not.\n</think>",
    )
    source = source.replace("{% if enable_thinking is false %}", "{% if false %}")
    session = Session(model("hermes", tmp_path, source), "hermes")
    known = session.answer("", "So it is.", None)
    session.say("Go on.")
    assert session.prompt().ids[: len(known)] == known
    assert shown(session, session.messages).count("I may not.") == 2


def test_of_a_conversation_that_is_forgotten_in_part_the_beginning_stays(tmp_path: Path):
    session = Session(model("hermes", tmp_path), "hermes")
    session.text.echoes = EchoMemory(6000)
    known = []
    for i in range(9):
        known.append(session.answer("", f"{i}  ", ARGUMENTS))
        session.result("done")
    tokens = [piece for piece in session.prompt().pieces if not isinstance(piece, str)]
    assert 1 < len(tokens) < 9
    assert session.prompt().ids[: len(known[0])] == known[0]
    assert session.prompt().ids[: len(known[1])] == known[1]


def test_a_request_with_other_variables_costs_the_conversation_nothing(tmp_path: Path):
    source = TEMPLATES["hermes"].replace("{{ m.content }}", "{{ m.content }}{{ enable_thinking }}")
    session = Session(model("hermes", tmp_path, source), "hermes")
    session.answer("", "I look.", ARGUMENTS)
    session.result("done")
    messages = normalise(session.messages)
    off = Conversation(messages, [TOOL], Thinking(on=False))
    assert not has_tokens(session.text.prompt(off, "hermes"))
    assert has_tokens(session.prompt())
