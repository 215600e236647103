"""How good a demo model is, as a table: sums, copying, tool calls, greetings.

    python tools/evaluate_demo_model.py ftd/demo OTHER_CHECKPOINT

Runs the checkpoint through transformers, its own chat template and tokenizer included, on first
questions drawn from the recipe with a seed that training never used. An answer counts when what
stands after the thought is exactly what the recipe wants; calls are compared as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_recipe as recipe
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 64
QUESTION = "What is 17 + 25?"


class Candidate:
    def __init__(self, path: Path, device: str):
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.tokenizer.padding_side = "left"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
        self.device = device

    def answers(self, requests: list[dict[str, Any]], **sampling: Any) -> list[str]:
        """What is said after the thought; ``sampling`` as transformers' generate takes it."""
        out = []
        for start in range(0, len(requests), BATCH):
            prompts = [
                self.tokenizer.apply_chat_template(
                    request["messages"],
                    tools=request["tools"],
                    enable_thinking=request["enable_thinking"],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                for request in requests[start : start + BATCH]
            ]
            inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
            inputs.pop("token_type_ids", None)
            tokens = self.model.generate(**inputs, max_new_tokens=160, **sampling)
            new = tokens[:, inputs["input_ids"].shape[1] :].tolist()
            for text in self.tokenizer.batch_decode(new, skip_special_tokens=False):
                said = text.split("<|im_end|>")[0].split("<|endoftext|>")[0]
                out.append(said.rpartition("</think>")[2].strip())
        return out


def wanted(turn: recipe.Turn) -> str:
    if turn.call is None:
        return turn.say
    return f"<tool_call>\n{json.dumps(turn.call, ensure_ascii=False)}\n</tool_call>"


def renamed(code: str) -> str:
    """Code with its one-letter names replaced in order: which letters is the model's choice."""
    letters = list(dict.fromkeys(re.findall(r"\b[a-z]\b", code)))
    return re.sub(r"\b[a-z]\b", lambda m: f"arg{letters.index(m[0])}", code)


def same(said: str, want: str) -> bool:
    if "<tool_call>" not in want:
        return said == want.strip() or (want.startswith("```") and renamed(said) == renamed(want))
    try:
        calls = [
            json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            for text in (said, want)
        ]
    except ValueError:
        return False
    return calls[0] == calls[1]


Question = tuple[recipe.Turn, recipe.Toolbox]


def questions() -> dict[str, Callable[[random.Random], Question]]:
    def plain(make: Callable[[random.Random], recipe.Turn]) -> Callable[[random.Random], Question]:
        return lambda r: (make(r), recipe.Toolbox())

    def using(kind: str) -> Callable[[random.Random], Question]:
        def make(r: random.Random) -> Question:
            box = recipe.toolbox(r, kind)
            return recipe.tool_turn(r, box, kind), box

        return make

    return {
        "sum of two numbers": plain(recipe.addition),
        "repeat unusual words": plain(recipe.repetition),
        "greeting": plain(recipe.greeting),
        "Python function": plain(recipe.python_function),
        "call: write a file": using("write"),
        "call: read a file": using("read"),
        "call: run a command": using("shell"),
        "any first turn": recipe.first_turn,
    }


def request(turn: recipe.Turn, box: recipe.Toolbox, thinking: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": turn.ask}]
    return {"messages": messages, "tools": box.declared or None, "enable_thinking": thinking}


def evaluate(candidate: Candidate, count: int) -> dict[str, float]:
    """Share of right answers by kind of question."""
    rows: dict[str, float] = {}
    default = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
    torch.manual_seed(0)
    for thinking in (True, False):
        mode = "thinking" if thinking else "no thinking"
        for kind, make in questions().items():
            r = random.Random(f"evaluation {kind}")
            drawn = [make(r) for _ in range(count)]
            requests = [request(turn, box, thinking) for turn, box in drawn]
            settings = {"greedy": {"do_sample": False}}
            if kind == "sum of two numbers":
                settings["default temperature"] = default
            for name, sampling in settings.items():
                said = candidate.answers(requests, **sampling)
                right = sum(same(a, wanted(turn)) for a, (turn, _) in zip(said, drawn))
                rows[f"{kind}, {name}, {mode}"] = right / count
        front = request(recipe.Turn(QUESTION, ""), recipe.Toolbox(), thinking)
        said = candidate.answers([front] * count, **default)
        rows[f"{QUESTION} holds 42, default temperature, {mode}"] = (
            sum("42" in a for a in said) / count
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=192, help="questions of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    tables = [evaluate(Candidate(path, args.device), args.count) for path in args.checkpoints]
    print("| question | " + " | ".join(str(path) for path in args.checkpoints) + " |")
    print("| --- |" + " --- |" * len(tables))
    for name in tables[0]:
        print(f"| {name} | " + " | ".join(f"{table[name]:.1%}" for table in tables) + " |")


if __name__ == "__main__":
    main()
