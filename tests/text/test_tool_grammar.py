"""Text of free-form tools, held to the client's grammar in every dialect."""

from __future__ import annotations

from typing import Any

import pytest
from held_answers import DIALECTS_HELD, MUST, Bench, bench_for, tool, written

from ftd.errors import RequestInvalid
from ftd.text.conversation import Demand, Tool

HERMES = Bench("hermes", ["<tool_call>", "</tool_call>"])
S = {"type": "string"}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
FREE_FORM = {
    "type": "object",
    "properties": {"input": S},
    "required": ["input"],
    "additionalProperties": False,
}
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk  // and no other
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " LINE) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
LINE: /[^\n]+/
%import common.LF
"""
GOOD_PATCH = """*** Begin Patch
*** Update File: src/a "b".py
@@ def f():
-    print("Hi\\n")
+\tprint('ü')
*** Add File: hello.txt
+Hello </parameter> world
*** End Patch"""


@pytest.mark.parametrize("name", [n for n in DIALECTS_HELD if n != "llama4"])
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (("lark", PATCH), GOOD_PATCH, GOOD_PATCH.replace("@@", "@")),
        (("regex", r'[a-z"]+\n\d{2}/[^x]'), 'ab"c\n42/\\', "ab\n42/x"),
    ],
    ids=["lark", "regex"],
)
def test_a_tools_text_is_held_to_its_grammar(name: str, grammar: Any, good: str, bad: str):
    bench, write = bench_for(name), written.TEMPLATES[name]
    tools = [Tool("patch", FREE_FORM, {}, grammar=grammar), tool("now", NOW)]
    for text, allowed in ((good, True), (bad, False)):
        whole = write("", "", [("patch", {"input": text})]).lstrip("\n")
        assert bench.accepts(bench.make(MUST, tools), whole) is allowed


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (("lark", "start: missing"), "missing"),
        (("lark", 'start: "a" <|im_end|>'), "< has no meaning"),
        (("lark", '%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance has no meaning"),
        (("lark", "start: @other"), "@ has no meaning"),
        (("regex", "(?=a)b"), "look-ahead"),
        (("regex", "("), "regex parse error"),
        (("gbnf", "root ::= x"), "lark and regex are known"),
        (("lark", "x" * 70_000), "70,000 characters"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(grammar: Any, words: str):
    with pytest.raises(RequestInvalid, match=f"(?s)tool patch: its grammar: .*{words}"):
        HERMES.make(Demand(), [Tool("patch", FREE_FORM, {}, grammar=grammar)])


QUOTE, BACKSLASH = '"', "\\"


@pytest.mark.parametrize(
    ("lark", "texts", "others"),
    [
        (
            ["start: /[^\\n]*/ LF WORD", "%import common (LF, WORD)"],
            [f"a {QUOTE}b{BACKSLASH}\nxy", "\nab"],
            ["a\n1", "a"],
        ),
        (
            [r'start: A B | "\\"', r'A: /[a-c"]+/', r"B: /[\n\t]/"],
            [f"a{QUOTE}b\n", f"{QUOTE}\t", BACKSLASH],
            ["ab", "x\n"],
        ),
        ([r'start: (/\w+/ | /\s/)+ "\""'], [f"a b\tc{QUOTE}", f"\n{QUOTE}"], [f"a{QUOTE}b", ""]),
        (
            [r'start: /a\tb|"\\\x41/i /./s'],
            ["A\tB\n", f"{QUOTE}{BACKSLASH}a{QUOTE}"],
            ["a b.", "a\tb"],
        ),
        (['start: "x"i WS "y"', "%import common.WS -> WS"], ["X \n\ty", "x y"], ["xy", "x y "]),
    ],
)
def test_a_grammar_holds_the_same_texts_within_a_json_string(lark: Any, texts: Any, others: Any):
    tools = [Tool("f", FREE_FORM, {}, grammar=("lark", "\n".join(lark)))]
    for text in [*texts, *others]:
        call = written.hermes("", "", [("f", {"input": text})])
        assert HERMES.accepts(HERMES.make(MUST, tools), call) is (text in texts), text


def test_a_grammar_that_cannot_stand_in_json_is_let_go():
    lark = r'start: /"[^"]*"x/ LF' + "\n%import common.LF"
    tools = [Tool("f", FREE_FORM, {}, grammar=("lark", lark))]
    for input, allowed in {'"whatever"': True, "5": False}.items():
        call = f'<tool_call>{{"name": "f", "arguments": {{"input": {input}}}}}</tool_call>'
        assert HERMES.accepts(HERMES.make(MUST, tools), call) is allowed
    bench = bench_for("qwen3_coder")
    for text, allowed in {'"a\n"x\n': True, "a": False}.items():
        call = written.qwen3_coder("", "", [("f", {"input": text})])
        assert bench.accepts(bench.make(MUST, tools), call) is allowed
