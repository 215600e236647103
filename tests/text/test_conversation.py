"""Thinking in the words of each family's template, and tools as text."""

from __future__ import annotations

import json

import pytest

from ftd.text.conversation import TemplateFacts, Thinking, Tool, announcement
from ftd.text.template import ChatTemplate

# what templates do with thinking, cut down to that
QWEN = "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}"
DEEPSEEK = "{% if thinking %}on{% else %}off{% endif %}"
GPT_OSS = '{% if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}'
GPT_OSS += "{{ reasoning_effort }}"
MISTRAL = """{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('no') }}{% endif %}
{{- reasoning_effort }}"""
SEED = "{% if thinking_budget is defined %}{{ thinking_budget }}{% else %}free{% endif %}"


@pytest.mark.parametrize(
    ("source", "thinking", "text"),
    [
        (QWEN, Thinking(), "on"),
        (QWEN, Thinking(on=False), "off"),
        (QWEN, Thinking(effort="none"), "off"),
        (QWEN, Thinking(on=False, effort="high"), "off"),
        (QWEN, Thinking(effort="low"), "on"),
        (QWEN, Thinking(budget_tokens=100), "on"),
        (DEEPSEEK, Thinking(), "off"),
        (DEEPSEEK, Thinking(on=True), "on"),
        (DEEPSEEK, Thinking(effort="none"), "off"),
        (GPT_OSS, Thinking(), "medium"),
        (GPT_OSS, Thinking(on=False), "low"),
        (GPT_OSS, Thinking(effort="minimal"), "low"),
        (GPT_OSS, Thinking(effort="high"), "high"),
        (GPT_OSS, Thinking(effort="max"), "high"),
        (GPT_OSS, Thinking(on=True), "medium"),
        (GPT_OSS, Thinking(on=True, budget_tokens=2000), "low"),
        (GPT_OSS, Thinking(on=True, budget_tokens=31_999), "high"),
        (MISTRAL, Thinking(on=False), "none"),
        (MISTRAL, Thinking(effort="medium"), "high"),
        (SEED, Thinking(on=False), "0"),
        (SEED, Thinking(budget_tokens=512), "512"),
        (SEED, Thinking(on=True), "free"),
    ],
)
def test_thinking_in_the_templates_own_words(source: str, thinking: Thinking, text: str):
    template = ChatTemplate(source)
    assert template.render([], extra=thinking.variables(template.facts)) == text


def test_nothing_said_sets_nothing():
    assert Thinking().variables(TemplateFacts()) == {}


def test_an_announcement_holds_the_whole_declaration():
    tool = Tool.declare("find", "Finds ä.", {"type": "object", "properties": {"q": {}}})
    line = announcement([tool]).splitlines()[1]
    assert json.loads(line) == tool.declaration
    assert "ä" in line


def test_a_tool_without_parameters_is_declared_with_an_empty_object():
    for parameters in (None, {}, "nonsense"):
        tool = Tool.declare("now", None, parameters)
        assert tool.declaration["function"] == {
            "name": "now",
            "parameters": {"type": "object", "properties": {}},
        }
