#!/usr/bin/env python3
"""How long streams pause when memory moves under them, and what the tiers below the KV pool save.

    python tools/bench_budget.py --model DIR --gib 4 [-- --vram 24G --host-kv 8G]

Four greedy streams run all the time. Each change of the budget is carried out between two of their
steps, as ``ftctl budget`` does: slots less and more, KV less and more, memory from one to the other
and back. Then a long prompt is asked for while three streams run: cold, known in the pool, and
known in host memory alone. At last the pool is filled with prompts that have ended, and halved.
Prints Markdown; what follows ``--`` are settings of ftd.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ftd.config import load_config
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.core import EngineCore
from ftd.engine.loading import load_core
from ftd.engine.preparing import Prepared, prepare
from ftd.engine.resize import Resizing, resize
from ftd.errors import BudgetExceeded
from ftd.units import GiB, format_bytes, format_count

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    pages: int
    slots: int


class Streams:
    """Streams that never end, and when each of their tokens came."""

    def __init__(self, core: EngineCore, vocab: int, context: int, prompt_tokens: int) -> None:
        self._core, self._rng, self._vocab = core, random.Random(0), vocab
        self._context, self._prompt_tokens = context, prompt_tokens
        self._streams: set[str] = set()
        self._seen: dict[str, float] = {}
        self.tokens, self.longest_s, self._count = 0, 0.0, 0

    def start(self, streams: int) -> None:
        for _ in range(streams):
            self._start_one()

    def _start_one(self) -> None:
        tokens = self._context - self._prompt_tokens
        self._streams.add(self.ask(self.prompt(self._prompt_tokens), tokens))

    def prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab) for _ in range(tokens))

    def ask(self, prompt: tuple[int, ...], tokens: int) -> str:
        self._count += 1
        name = f"r{self._count}"
        self._core.add(EngineRequest(name, prompt, tokens, GREEDY))
        return name

    def clear(self) -> None:
        """Look at gaps from here on: between the tokens of each stream that has begun."""
        self.tokens, self.longest_s = 0, 0.0

    def step(self, *, settle: bool = False) -> set[str]:
        """Who got a token."""
        outputs = self._core.settle() if settle else self._core.step()
        now_s, served = time.perf_counter(), set()
        for output in outputs:
            if output.error:
                raise output.error
            served.add(output.request_id)
            self.tokens += len(output.tokens)
            if output.request_id in self._seen:
                gap_s = now_s - self._seen[output.request_id]
                self.longest_s = max(self.longest_s, gap_s)
            self._seen[output.request_id] = now_s
            if output.finish:
                del self._seen[output.request_id]
                if output.request_id in self._streams:
                    self._streams.remove(output.request_id)
                    self._start_one()
        return served

    def run(self, seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self.step()

    def wait_for(self, name: str) -> float:
        began_s = time.perf_counter()
        while name not in self.step():
            pass
        return time.perf_counter() - began_s


def used_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def changes(core: EngineCore, prepared: Prepared, gib: float) -> Iterator[tuple[str, Sizes]]:
    """Names and sizes to have next, each a step of so many GiB from the one before."""
    plan, moved = prepared.plan, gib * GiB
    pages, slots = int(moved // plan.page_bytes), int(moved // plan.record_bytes)
    base = Sizes(core.pages.num_pages, core.experts.counters().slots_total)
    fewer = Sizes(base.pages, max(0, base.slots - slots))
    more = Sizes(base.pages + pages, fewer.slots)
    yield f"slots -{gib:g} GiB", fewer
    yield f"KV +{gib:g} GiB", more
    yield f"KV -{gib:g} GiB", fewer
    yield f"slots +{gib:g} GiB", base
    yield f"{gib:g} GiB from slots to KV", more
    yield f"{gib:g} GiB from KV to slots", base
    yield "half of both", Sizes(base.pages // 2, base.slots // 2)
    yield "both restored", base


def budget_table(core: EngineCore, prepared: Prepared, streams: Streams, gib: float) -> None:
    print("| change | pause, ms | longest gap of a stream, ms | GPU before | GPU after | moved |")
    print("|---|---|---|---|---|---|")
    streams.run(2.0)
    streams.clear()
    streams.run(2.0)
    print(f"| none | | {1e3 * streams.longest_s:.1f} | {format_bytes(used_bytes())} | | |")
    for name, sizes in changes(core, prepared, gib):
        streams.run(1.0)
        streams.clear()
        streams.run(0.2)
        before = used_bytes()
        began_s = time.perf_counter()
        streams.step(settle=True)
        done = resize(core, sizes.pages, sizes.slots)
        paused_s = time.perf_counter() - began_s
        after = used_bytes()
        streams.run(0.5)
        print(
            f"| {name} | {1e3 * done.paused_s:.1f} (with settling {1e3 * paused_s:.1f}) "
            f"| {1e3 * streams.longest_s:.1f} | {format_bytes(before)} | {format_bytes(after)} "
            f"| {told(done)} |",
            flush=True,
        )
    streams.step(settle=True)
    with suppress(BudgetExceeded):
        resize(core, 2, 0)
        raise SystemExit("a budget that cannot hold what runs was not refused")
    print("\nA budget of two pages under these streams is refused, and nothing changes.")


def told(done: Resizing) -> str:
    parts = {
        "experts evicted": done.experts_evicted,
        "pages evicted": done.pages_evicted,
        "pages moved": done.pages_moved,
        "preempted": done.preempted,
    }
    return ", ".join(f"{format_count(n)} {what}" for what, n in parts.items() if n)


def tier_table(core: EngineCore, streams: Streams, prompt_tokens: int) -> None:
    """First tokens of one prompt, while others stream."""
    prompt = streams.prompt(prompt_tokens)
    print(f"\n| {format_count(prompt_tokens)} tokens known | first token, ms | longest gap, ms |")
    print("|---|---|---|")
    for name in ("nowhere", "in the pool", "in host memory"):
        if name == "in host memory":
            if core.held.host is None:
                return
            streams.step(settle=True)
            core.tree.evict(core.pages.idle)
            core.kv.join()
        streams.run(0.5)
        streams.clear()
        first_s = streams.wait_for(streams.ask(prompt, 1))
        print(f"| {name} | {1e3 * first_s:.1f} | {1e3 * streams.longest_s:.1f} |", flush=True)


def full_table(core: EngineCore, streams: Streams, prompt_tokens: int) -> None:
    """A pool full of prompts that have ended gives up half, and later has it again."""
    pages, slots = core.pages.num_pages, core.experts.counters().slots_total
    while core.pages.free > 2 * prompt_tokens // core.kv.page_tokens:
        streams.wait_for(streams.ask(streams.prompt(prompt_tokens), 1))
    print("\n| a pool full of cached prompts | pause, ms | longest gap, ms | cached | after |")
    print("|---|---|---|---|---|")
    for name, num_pages in (("halved", pages // 2), ("restored", pages)):
        streams.run(0.5)
        streams.clear()
        streams.step(settle=True)
        idle, saved = core.pages.idle, _saved(core)
        done = resize(core, num_pages, slots)
        cached = [format_bytes(n * core.kv.page_bytes) for n in (idle, core.pages.idle)]
        kept = format_bytes((_saved(core) - saved) * core.kv.page_bytes)
        streams.run(0.5)
        print(
            f"| {name} | {1e3 * done.paused_s:.1f} | {1e3 * streams.longest_s:.1f} | {cached[0]} "
            f"| {cached[1]}, {kept} more in host memory, {told(done)} |",
            flush=True,
        )


def _saved(core: EngineCore) -> int:
    return core.held.host.pages_saved if core.held.host else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=4.0, help="that each change moves")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before each stream's own")
    parser.add_argument("--long", type=int, default=8192, help="tokens of the prompt for tiers")
    parser.add_argument("--full", type=int, default=2048, help="tokens of what fills the pool")
    parser.add_argument("settings", nargs="*", help="of ftd, behind --")
    args = parser.parse_args()
    pairs = zip(args.settings[::2], args.settings[1::2], strict=True)
    settings = {name.lstrip("-").replace("-", "_"): value for name, value in pairs}
    config = load_config({"model": str(args.model), **settings}, {})
    prepared = prepare(args.model, config)
    core = load_core(config, prepared)
    context = min(prepared.plan.context_tokens, prepared.plan.kv_tokens // 5)
    streams = Streams(core, prepared.spec.vocab, context, min(args.prompt, context // 2))
    try:
        streams.start(4)
        budget_table(core, prepared, streams, args.gib)
        long = min(args.long, prepared.plan.context_tokens - 2)
        tier_table(core, streams, long)
        full_table(core, streams, min(long, args.full))
    finally:
        core.close()


if __name__ == "__main__":
    main()
