"""Kinds of contexts that a script of the script model must survive, and how surely it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from script_book import Book, Encoder, Script
from script_conversations import Filler, random_tools
from tiny_qwen3_moe import Model, chat_template

LEAST_MARGIN = 2.0  # logits between the right token and the next best, in a check


@dataclass(frozen=True)
class Check:
    """A kind of context: makes the messages and tools that a script must survive."""

    name: str
    make: Callable[[random.Random, Script, Callable[[int], str]], dict[str, Any]]
    thinking: bool = True
    after_tool: bool = False


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def call_round(script: Script, result: str) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": call} for call in script.calls]
    assistant = {"role": "assistant", "content": script.text or None, "tool_calls": calls}
    return [assistant, {"role": "tool", "content": result}]


def checks(book: Book) -> list[Check]:
    def other(r: random.Random) -> Script:
        return r.choice([s for s in book.scripts.values() if len(s.answer()) < 400])

    def history(r: random.Random, turns: int) -> list[dict[str, Any]]:
        out = []
        for script in (other(r) for _ in range(turns)):
            out += [user(script.key), {"role": "assistant", "content": script.answer(False)}]
        return out

    def bare(r, s, text):
        return {"messages": [user(s.key)]}

    def agent(r, s, text):
        messages = [system(text(1500)), user(f"{text(60)} {s.key} {text(60)}"), system(text(300))]
        return {"messages": messages, "tools": random_tools(r, 12)}

    def far(r, s, text):
        return {"messages": [system(text(r.randrange(12_000, 20_000))), user(s.key)]}

    def gap(tokens):
        return lambda r, s, text: {"messages": [user(s.key + " " + text(tokens))]}

    def long_reminder(r, s, text):
        messages = [system(text(3000)), user([{"type": "text", "text": s.key}]), system(text(2400))]
        return {"messages": messages}

    def turns(r, s, text):
        return {"messages": [*history(r, 4), user(s.key)]}

    def tool_result(r, s, text):
        messages = [*history(r, 1), user(s.key), *call_round(s, text(r.randrange(1, 150)))]
        return {"messages": messages, "tools": random_tools(r, 3)}

    def tool_result_note(r, s, text):
        messages = [user(s.key), *call_round(s, "ok"), user(text(70))]
        return {"messages": messages, "tools": random_tools(r, 3)}

    return [
        Check("key alone", bare),
        Check("key alone, thinking off", bare, thinking=False),
        Check("agent prompt with tools", agent),
        Check("agent prompt with tools, thinking off", agent, thinking=False),
        Check("12,000 to 20,000 tokens before", far),
        Check("300 tokens after the key", gap(300)),
        Check("2,400 tokens of system message after", long_reminder),
        Check("four other turns before", turns),
        Check("tool result", tool_result, after_tool=True),
        Check("tool result, then a note", tool_result_note, after_tool=True),
    ]


@torch.no_grad()
def least_margin(model: Model, prompt: list[int], answer: list[int], dtype: torch.dtype) -> float:
    """Least logits between a token of the answer and the next best; above 0, greedy is exact."""
    device = next(model.parameters()).device
    ids = torch.tensor([prompt + answer], device=device)
    with torch.autocast(device.type, torch.bfloat16, dtype == torch.bfloat16):
        hidden, _ = model(ids[:, :-1])
        logits = model.logits(hidden[0, len(prompt) - 1 :]).float()
    want = torch.tensor(answer, device=device)[:, None]
    best_other = logits.scatter(1, want, -torch.inf).max(-1).values
    return float((logits.gather(1, want)[:, 0] - best_other).min())


def run_checks(model: Model, book: Book, encoder: Encoder, filler: Filler, seed: int) -> bool:
    """Print the table of checks; says whether all were exact with the least margin."""
    device = next(model.parameters()).device.type
    template = chat_template()
    rng, r = np.random.default_rng(seed), random.Random(seed)
    end = encoder.text("<|im_end|>")
    print(f"{'context':42} {'dtype':8} {'exact':>7} {'least margin':>13}", flush=True)
    good = True

    def text(tokens: int) -> str:
        return encoder.whole.decode(filler.take(rng, tokens).tolist())

    # in bfloat16 too where that is quick
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    for check in checks(book):
        scripts = [s for s in book.scripts.values() if s.calls or not check.after_tool]
        asked = []
        for script in scripts:
            context = check.make(r, script, text)
            options = {} if check.thinking else {"enable_thinking": False}
            prompt = template.render(**context, **options, add_generation_prompt=True)
            answer = encoder.answer(script, check.thinking)
            if check.after_tool:
                answer = encoder.text(script.after_tool, False)
            asked.append((encoder.text(prompt), answer + end))
        for dtype in dtypes:
            margins = [least_margin(model, *pair, dtype) for pair in asked]
            wrong = [s.key for s, margin in zip(scripts, margins) if margin <= 0]
            exact = f"{len(scripts) - len(wrong)}/{len(scripts)}"
            name = str(dtype).removeprefix("torch.")
            row = f"{check.name:42} {name:8} {exact:>7} {min(margins):13.2f} {' '.join(wrong)}"
            print(row.rstrip(), flush=True)
            good &= min(margins) >= LEAST_MARGIN
    return good
