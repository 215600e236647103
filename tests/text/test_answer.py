"""From outputs to pieces: text, logprobs, counts and the reason of the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.engine.api import Finish, Output, TokenLogprob
from ftd.text.answer import Answer, Reading, joined
from ftd.text.stops import StopSet
from ftd.text.textmodel import TextModel

TEXT = TextModel(Path(__file__).parents[2] / "ftd" / "demo")
EOS = 2


def run(
    tokens: list[int], finish: Finish = Finish.EOS, stops: tuple[str, ...] = (), per_output: int = 1
):
    answer = Answer(TEXT, Reading(StopSet(stops)))
    pieces = []
    for start in range(0, max(1, len(tokens)), per_output):
        part = tuple(tokens[start : start + per_output])
        last = start + per_output >= len(tokens)
        logprobs = tuple(TokenLogprob(token, -1.0) for token in part)
        pieces.append(answer.push(Output("r", part, logprobs, finish=finish if last else None)))
        if pieces[-1].finish:
            break
    return answer, pieces


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4100), max_size=30), st.integers(1, 5))
def test_text_is_decode_of_all_tokens(tokens: list[int], per_output: int):
    answer, pieces = run(tokens, Finish.LENGTH, per_output=per_output)
    whole = joined(pieces)
    assert whole.text == TEXT.decode(tokens)
    assert whole.finish == "length"
    assert [entry.token for entry in whole.logprobs] == tokens
    assert list(whole.offsets) == sorted(whole.offsets)
    assert answer.tokens == len(tokens)


def test_eos_is_counted_but_not_shown():
    tokens = TEXT.encode("hello")
    answer, pieces = run([*tokens, EOS])
    assert joined(pieces).text == "hello"
    assert joined(pieces).finish == "stop"
    assert answer.tokens == len(tokens) + 1
    assert len(joined(pieces).logprobs) == len(tokens)


def test_a_stop_id_with_text_is_not_shown():
    tokens = TEXT.encode("hello")
    _, pieces = run([*tokens, *TEXT.encode("!")], Finish.STOP)
    assert joined(pieces).text == "hello"


@pytest.mark.parametrize("per_output", [1, 2, 3, 50])
def test_a_stop_string_ends_text_and_logprobs(per_output: int):
    tokens = TEXT.encode("alpha END OF FILE omega")
    _, pieces = run([*tokens, EOS], stops=("END OF",), per_output=per_output)
    whole = joined(pieces)
    assert (whole.text, whole.finish, whole.stop) == ("alpha ", "stop", "END OF")
    assert TEXT.decode(e.token for e in whole.logprobs).startswith("alpha")
    assert "END" not in TEXT.decode(e.token for e in whole.logprobs)


def test_a_stop_string_completed_by_the_last_token_wins_over_length():
    _, pieces = run(TEXT.encode("say stop"), Finish.LENGTH, stops=("stop",))
    assert (joined(pieces).text, joined(pieces).finish) == ("say ", "stop")


def test_a_near_match_is_shown_at_the_end():
    _, pieces = run([*TEXT.encode("the END"), EOS], stops=("END OF",))
    assert joined(pieces).text == "the END"
    assert joined(pieces).stop is None


def test_logprobs_come_with_the_text_of_their_token():
    _, pieces = run(TEXT.encode("👋 hello"), Finish.LENGTH)
    for piece in pieces:
        if piece.text and piece.finish is None:
            assert piece.logprobs
    assert (
        b"".join(
            TEXT.token_bytes(entry.token) for piece in pieces for entry in piece.logprobs
        ).decode()
        == "👋 hello"
    )


def test_an_empty_answer_keeps_only_the_prompts_logprobs():
    answer = Answer(TEXT, Reading(StopSet([]), empty=True))
    piece = answer.push(Output("r", (5,), prompt_logprobs=(None,), finish=Finish.LENGTH))
    assert (piece.text, piece.finish, piece.prompt_logprobs) == ("", "length", (None,))
    assert answer.tokens == 0
