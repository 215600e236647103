"""Events put into blocks."""

from __future__ import annotations

import pytest

from ftd.text.events import (
    Blocks,
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
    blocks_of,
)

CALL: list[Event] = [CallStart(0, "f"), CallArguments(0, "{"), CallArguments(0, "}")]
DONE = CallEnd(0, "{}", valid=True)


def shown(events: list[Event]) -> list[tuple[str, str]]:
    return [(block.kind, block.text) for block in blocks_of(events)]


def test_runs_of_one_kind_are_one_block():
    events = [Reasoning("a"), Reasoning("b"), Text("c"), Text("d"), *CALL, DONE, Text("e")]
    assert shown(events) == [("reasoning", "ab"), ("text", "cd"), ("call", "{}"), ("text", "e")]
    assert [block.index for block in blocks_of(events)] == [0, 1, 2, 3]


def test_every_block_opens_and_closes_once_in_order():
    blocks, steps = Blocks(), []
    for event in [Reasoning("a"), Text("\n"), Text("b"), *CALL, DONE, *CALL, DONE]:
        steps += blocks.push(event)
    steps += blocks.end()
    borders = [(step.kind, step.block.index) for step in steps if step.kind != "grow"]
    assert borders == [(kind, index) for index in range(4) for kind in ("open", "close")]


@pytest.mark.parametrize(
    ("events", "blocks"),
    [
        ([Reasoning("a"), Text("\n\n"), *CALL, DONE], [("reasoning", "a"), ("call", "{}")]),
        ([Text("\n"), Text(" "), Text("x\n")], [("text", "\n x\n")]),
        ([Text("a"), Text("\n\n"), Text("b")], [("text", "a\n\nb")]),
        ([Text("a"), *CALL, DONE, Text("\n"), *CALL, DONE], [("text", "a"), *[("call", "{}")] * 2]),
        ([Text("\n")], []),
        ([Text("\n"), Reasoning("a")], [("reasoning", "a")]),
    ],
)
def test_blanks_alone_between_blocks_are_layout(events, blocks):
    assert shown(events) == blocks


def test_a_call_that_did_not_end_is_not_valid():
    (block,) = blocks_of(CALL)
    assert (block.text, block.valid) == ("{}", False)
    assert blocks_of([*CALL, DONE])[0].valid
