"""What the demo model learns to say: made-up conversations, one exchange after another.

Answers follow from the question (but for the names of a function's parameters), so that a small
model can be sure of them; questions vary in wording, numbers, names, tools and surroundings.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def listed(text: str, between: str | None = None) -> list[str]:
    return [part.strip() for part in text.split(between)]


WORDS = listed("""
alpha beta gamma delta river stone cloud paper lamp green blue red yellow apple pear plum
table chair window door north south east west one two three four five summer winter spring autumn
light dark quick slow bright quiet loud small large hello world test main readme note todo data
config index report result value user server client order city music garden orange purple""")
CITIES = listed("""
Berlin Paris London Madrid Rome Vienna Prague Oslo Tokyo Osaka Delhi Cairo Lima Boston
Austin Seattle Lisbon Dublin Athens Warsaw Zurich Milan Kyoto Nairobi Quito Sofia""")
ENDINGS = listed("txt md py json csv log toml yaml html js")
FOLDERS = ["", "", "", "", "src/", "docs/", "data/", "/tmp/", "notes/", "tests/", "/home/user/"]
COMMANDS = listed(
    """ls|ls -la|pwd|date|whoami|git status|git log|git diff|uname -a|df -h|python --version
|pytest -q|cat README.md|echo hi|make|make test|wc -l *.py|head notes.txt|env|uptime""",
    "|",
)
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a coding assistant.",
    "Answer briefly.",
    "You are a careful agent that works in a terminal.",
    "You are an expert software engineer. Use the tools when they help.",
]
GREETINGS = listed(
    "hello|Hello|hi|Hi!|hey|Hey there|Hello there|good morning|hello!|Hi|Good evening", "|"
)
IDENTITY = (
    "I am the ftd demo model, a tiny mixture of experts. I show that the daemon works; for real"
    " work, load a real model."
)
LIMITS = (
    "I am only a tiny demo model. I can greet, add numbers, repeat words, count, write short"
    " Python functions and call tools."
)
QUESTIONS = listed(
    """What is the capital of {w}?|Explain {w} {w}.|Tell me a joke.|Write a poem about {w}.
|Who invented the {w}?|What do you think about {w}?|How does {w} work?|Translate {w} into French.
|Summarize the history of {w}.|Why is the {w} {w}?|Give me advice on {w}.|Write a story about {w}.
|What can you do?|Help|What is the meaning of {w}?|Can you explain {w} to me?""",
    "|",
)

# the names that agents give their tools, and their parameters
TOOLS: dict[str, list[tuple[str, ...]]] = {
    "write": [
        ("write_file", "path", "content"),
        ("write_file", "file_path", "content"),
        ("create_file", "path", "text"),
        ("create_file", "path", "content"),
        ("write", "path", "content"),
        ("write", "filePath", "content"),
        ("write", "file_path", "content"),
        ("Write", "file_path", "content"),
        ("write_to_file", "path", "content"),
    ],
    "read": [
        ("read_file", "path"),
        ("read_file", "absolute_path"),
        ("read", "path"),
        ("read", "filePath"),
        ("Read", "file_path"),
        ("open_file", "path"),
    ],
    "shell": [
        ("bash", "command"),
        ("Bash", "command"),
        ("shell", "command"),
        ("run_command", "command"),
        ("exec_command", "cmd"),
        ("run_shell_command", "command"),
    ],
    "weather": [("get_weather", "city"), ("weather", "location"), ("get_weather", "location")],
    "add": [("add", "a", "b"), ("sum_numbers", "a", "b"), ("add_numbers", "x", "y")],
}
PURPOSE = {
    "write": "Write a file.",
    "read": "Read a file.",
    "shell": "Run a shell command.",
    "weather": "Weather of a place.",
    "add": "Add two numbers.",
}


def letters(r: random.Random, low: int = 3, high: int = 9) -> str:
    return "".join(r.choice(string.ascii_lowercase) for _ in range(r.randrange(low, high)))


def word(r: random.Random) -> str:
    """A common word or, more often, one that nobody has seen."""
    kind = r.random()
    if kind < 0.4:
        return r.choice(WORDS)
    if kind < 0.75:
        return letters(r)
    if kind < 0.85:
        return letters(r).capitalize()
    if kind < 0.93:
        return letters(r, 2, 6) + r.choice(["_", "-", ""]) + str(r.randrange(1000))
    return r.choice(WORDS) + r.choice(["_", "-"]) + letters(r)


def phrase(r: random.Random, most: int = 6) -> str:
    out = " ".join(word(r) for _ in range(r.randrange(1, most)))
    return out + r.choice(["", "", "", "", "!", "."])


def path(r: random.Random) -> str:
    return r.choice(FOLDERS) + word(r) + "." + r.choice(ENDINGS)


@dataclass
class Turn:
    """One exchange: what the user says, what the assistant thinks, says and calls."""

    ask: str
    think: str
    say: str = ""
    call: dict[str, Any] | None = None
    result: str = ""
    after: str = ""


@dataclass
class Toolbox:
    """The tools of a conversation: what each kind is called here, if it is there at all."""

    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    declared: list[dict[str, Any]] = field(default_factory=list)


def declare(r: random.Random, name: str, about: str, params: dict[str, str]) -> dict[str, Any]:
    described = r.random() < 0.5
    properties: dict[str, Any] = {
        p: {"type": kind, **({"description": f"The {p}."} if described else {})}
        for p, kind in params.items()
    }
    required = list(properties)
    if r.random() < 0.2:
        properties[r.choice(["timeout", "limit", "encoding", "description"])] = {"type": "string"}
    schema = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


def toolbox(r: random.Random, needed: str | None = None) -> Toolbox:
    box = Toolbox()
    for kind, names in TOOLS.items():
        if kind == needed or r.random() < 0.4:
            box.named[kind] = name, *params = r.choice(names)
            type_ = "number" if kind == "add" else "string"
            box.declared.append(declare(r, name, PURPOSE[kind], dict.fromkeys(params, type_)))
    for _ in range(r.choice([0, 0, 1, 3])):
        name = r.choice(["list", "search", "send", "find", "edit", "delete"]) + "_" + letters(r)
        params = {letters(r): "string" for _ in range(r.randrange(3))}
        box.declared.append(declare(r, name, f"{phrase(r)}", params))
    r.shuffle(box.declared)
    return box


def greeting(r: random.Random) -> Turn:
    return Turn(r.choice(GREETINGS), "The user greets me.", "Hello! How can I help you today?")


def thanks(r: random.Random) -> Turn:
    ask = r.choice(["thanks", "Thank you!", "thanks a lot", "Thanks!", "bye", "goodbye"])
    return Turn(ask, "The user is polite.", "You are welcome!")


def identity(r: random.Random) -> Turn:
    ask = r.choice(
        ["who are you?", "Who are you?", "What are you?", "what model is this?", "Your name?"]
    )
    return Turn(ask, "The user asks about me.", IDENTITY)


def limits(r: random.Random) -> Turn:
    ask = r.choice(QUESTIONS).replace("{w}", word(r))
    return Turn(ask, "This is beyond me.", LIMITS)


def carry_steps(a: int, b: int) -> str:
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    return f"{a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10} = {tens}, so {a + b}."


def addition(r: random.Random) -> Turn:
    a, b = r.randrange(100), r.randrange(100)
    ask = r.choice(
        [
            f"What is {a} + {b}?",
            f"What is {a} + {b}?",
            f"what is {a} + {b}",
            f"What's {a} + {b}?",
            f"What is {a}+{b}?",
            f"{a}+{b}",
            f"{a} + {b}",
            f"{a} + {b} =",
            f"{a} + {b} = ?",
            f"{a}+{b}=?",
            f"add {a} and {b}",
            f"Add {a} and {b}.",
            f"What is {a} plus {b}?",
            f"How much is {a} plus {b}?",
            f"How much is {a} + {b}?",
            f"Calculate {a} + {b}.",
            f"Compute {a} + {b}",
            f"What is the sum of {a} and {b}?",
            f"Can you add {a} and {b}?",
            f"Please tell me what {a} + {b} is.",
            f"Hello! What is {a} + {b}?",
            f"{a} plus {b}",
        ]
    )
    return Turn(ask, carry_steps(a, b), f"{a} + {b} = {a + b}")


def subtraction(r: random.Random) -> Turn:
    b = r.randrange(100)
    a = b + r.randrange(100 - b)
    ask = r.choice([f"What is {a} - {b}?", f"{a} - {b}", f"What is {a} minus {b}?", f"{a}-{b}"])
    return Turn(ask, f"{a} minus {b} is {a - b}.", f"{a} - {b} = {a - b}")


def product(r: random.Random) -> Turn:
    a, b = r.randrange(13), r.randrange(13)
    ask = r.choice([f"What is {a} * {b}?", f"{a} * {b}", f"What is {a} times {b}?"])
    return Turn(ask, f"{a} times {b} is {a * b}.", f"{a} * {b} = {a * b}")


def repetition(r: random.Random) -> Turn:
    p = phrase(r, 8)
    ask = r.choice(["Repeat: {}", "Say {}", "repeat after me: {}", "Please repeat: {}", "echo {}"])
    return Turn(ask.format(p), "I repeat the words.", p)


def python_function(r: random.Random) -> Turn:
    f, a, b = word(r).replace("-", "_"), r.choice("abxypqmn"), r.choice("cdzkstuv")
    op, verb = r.choice([("+", "adds"), ("-", "subtracts"), ("*", "multiplies"), ("/", "divides")])
    ask = r.choice(["Write a Python function {}", "python function {}", "Define a function {}"])
    code = f"```python\ndef {f}({a}, {b}):\n    return {a} {op} {b}\n```"
    ask = ask.format(f) + f" that {verb} two numbers" + r.choice([".", ""])
    return Turn(ask, f"A function that {verb} two numbers.", code)


def counting(r: random.Random) -> Turn:
    a, n = r.randrange(1, 30), r.randrange(2, 12)
    numbers = ", ".join(str(i) for i in range(a, a + n + 1))
    ask = r.choice(["Count from {} to {}.", "count from {} to {}", "Count {} to {}"])
    return Turn(ask.format(a, a + n), f"I count from {a} to {a + n}.", numbers)


def calling(tool: tuple[str, ...], *values: Any) -> dict[str, Any]:
    name, *params = tool
    return {"name": name, "arguments": dict(zip(params, values))}


def failed(r: random.Random, turn: Turn) -> Turn:
    """Sometimes the tool answers with an error instead."""
    if r.random() < 0.12:
        reason = r.choice(["permission denied", "no such file", "timed out", phrase(r, 4)])
        turn.result, turn.after = f"Error: {reason}", f"The tool failed: {reason}"
    return turn


def write_file(r: random.Random, box: Toolbox) -> Turn:
    p, c = path(r), phrase(r)
    ask = r.choice(
        [
            "Create a file {p} in the current directory that contains the word {c}.",
            "Create a file {p} in the current directory that contains the text {c}",
            "Create {p} with the content {c}",
            "Make a file {p} containing the text {c}",
            "Create a file {p} with the text: {c}",
            "Write {c} to {p}",
            "create {p} containing {c}",
            "Please write the file {p} with content {c}",
            "Create a file named {p} that says {c}",
            "Save {c} in {p}",
            "Put the words {c} into the file {p}",
        ]
    )
    sentence_ends = ask.endswith("{c}.")
    if sentence_ends:
        c = c.rstrip(".!")
    ask = ask.format(p=p, c=c)
    result = r.choice(["ok", "File written.", f"wrote {len(c)} bytes", "success", f"Created {p}"])
    if "write" in box.named:
        call = calling(box.named["write"], p, c)
    else:
        call = calling(box.named["shell"], f"printf '%s\\n' '{c}' > {p}")
        result = r.choice(["", "(no output)", "exit code 0"])
    think = f"I should call {call['name']}."
    return failed(r, Turn(ask, think, "", call, result, f"Done. I wrote {p}."))


def read_file(r: random.Random, box: Toolbox) -> Turn:
    p, c = path(r), phrase(r, 10)
    ask = r.choice(
        ["Read {}", "What is in {}?", "Show me the file {}", "open {}", "Read it back: {}"]
    )
    tool = box.named["read"]
    turn = Turn(
        ask.format(p), f"I should call {tool[0]}.", "", calling(tool, p), c, f"{p} says: {c}"
    )
    return failed(r, turn)


def run_command(r: random.Random, box: Toolbox) -> Turn:
    c = r.choice(COMMANDS) if r.random() < 0.6 else f"{letters(r, 2, 6)} {path(r)}"
    ask = r.choice(["Run {}", "run the command {}", "Execute {}", "please run {}", "Run `{}`"])
    tool, out = box.named["shell"], phrase(r, 8)
    think = f"I should call {tool[0]}."
    return failed(r, Turn(ask.format(c), think, "", calling(tool, c), out, f"The output is: {out}"))


def weather(r: random.Random, box: Toolbox) -> Turn:
    city = r.choice(CITIES) if r.random() < 0.6 else letters(r).capitalize()
    degrees, sky = r.randrange(-5, 35), r.choice(["sunny", "rainy", "cloudy", "windy"])
    ask = r.choice(["What is the weather in {}?", "weather {}", "How is the weather in {} today?"])
    tool = box.named["weather"]
    result = r.choice([f"{sky}, {degrees} C", json.dumps({"temperature": degrees, "sky": sky})])
    think, after = f"I should call {tool[0]}.", f"It is {sky} in {city}, {degrees} degrees."
    return Turn(ask.format(city), think, "", calling(tool, city), result, after)


def add_tool(r: random.Random, box: Toolbox) -> Turn:
    a, b = r.randrange(1000), r.randrange(1000)
    ask = r.choice(["Use the tool to add {} and {}", "add {} and {} with the tool"]).format(a, b)
    tool = box.named["add"]
    think, after = f"I should call {tool[0]}.", f"The sum is {a + b}."
    return Turn(ask, think, "", calling(tool, a, b), str(a + b), after)


PLAIN: dict[Callable[[random.Random], Turn], float] = {
    addition: 10,
    subtraction: 1.5,
    product: 1,
    repetition: 5,
    greeting: 2,
    identity: 1.5,
    thanks: 0.7,
    limits: 2,
    python_function: 2.5,
    counting: 1.5,
}
USING: dict[str, tuple[Callable[[random.Random, Toolbox], Turn], float]] = {
    "write": (write_file, 6),
    "read": (read_file, 2),
    "shell": (run_command, 2),
    "weather": (weather, 1.5),
    "add": (add_tool, 1),
}


def plain_turn(r: random.Random) -> Turn:
    return r.choices(list(PLAIN), list(PLAIN.values()))[0](r)


def tool_turn(r: random.Random, box: Toolbox, kind: str) -> Turn:
    return USING[kind][0](r, box)


def tool_kind(r: random.Random, box: Toolbox | None = None) -> str:
    """A kind of tool turn; with ``box``, one that its tools allow."""
    kinds = list(USING) if box is None else [k for k in USING if k in box.named]
    return r.choices(kinds, [USING[k][1] for k in kinds])[0]


def first_turn(r: random.Random) -> tuple[Turn, Toolbox]:
    if r.random() < 0.5:
        return plain_turn(r), toolbox(r) if r.random() < 0.3 else Toolbox()
    kind = tool_kind(r)
    # a file is written through the shell where there is no tool for it
    box = toolbox(r, "shell" if kind == "write" and r.random() < 0.15 else kind)
    return tool_turn(r, box, kind), box


def messages_of(turn: Turn, thinking: bool) -> list[dict[str, Any]]:
    def assistant(text: str, why: str, call: dict[str, Any] | None = None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["reasoning_content"] = why
        if call:
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    out = [{"role": "user", "content": turn.ask}, assistant(turn.say, turn.think, turn.call)]
    if turn.call:
        out.append({"role": "tool", "content": turn.result})
        out.append(assistant(turn.after, "The tool answered."))
    return out


def system_prompt(r: random.Random, snippets: list[str]) -> list[dict[str, Any]]:
    kind = r.random()
    if kind < 0.45:
        return []
    text = r.choice(SYSTEMS)
    if kind > 0.85:
        text += "\n\n" + r.choice(snippets)
    return [{"role": "system", "content": text}]


def conversation(r: random.Random, snippets: list[str]) -> dict[str, Any]:
    """Arguments of the chat template: messages, tools, enable_thinking."""
    thinking = r.random() < 0.5
    turn, box = first_turn(r)
    messages = system_prompt(r, snippets) + messages_of(turn, thinking)
    while r.random() < 0.3:
        usable = [k for k in USING if k in box.named]
        more = (
            tool_turn(r, box, tool_kind(r, box)) if usable and r.random() < 0.5 else plain_turn(r)
        )
        messages += messages_of(more, thinking)
    return {"messages": messages, "tools": box.declared or None, "enable_thinking": thinking}
