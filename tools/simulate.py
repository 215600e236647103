#!/usr/bin/env python3
"""Predict decode speed of expert policies on machines, from recorded or synthetic routing.

    tools/simulate.py                                  synthetic Qwen3-30B-A3B, every machine
    tools/simulate.py --trace routing.npy --experts 128 --machine h200 --budget 37
    tools/simulate.py --layers 16 --batch 1 4 --plot speed.svg
    tools/simulate.py --profile ~/.cache/ftd/profiles/*.json    what ftctl profile has measured
    tools/simulate.py --lost --budget 10 37 60 90 --batch 1 2 4 8     where the default policy loses

Prints Markdown. "default" is the policy that serves; the oracle knows the future and is a bound for
policies that fetch only what was missed. GB/token counts misses and background fills by link, and
misses computed by the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ftd.experts.machines import MACHINES, Machine
from ftd.experts.profile import from_json
from ftd.experts.simulator import (
    CONTENDERS,
    RIVALS,
    Outcome,
    compare,
    steps_of,
    synthetic_routing,
)

GB = 1e9
EXPERT_BYTES = 3 * 2048 * 768 * 2  # Qwen3-30B-A3B in bfloat16
BAR, GAP, ROW, LEFT, WIDTH = 14, 18, 4, 150, 420  # of the plot, in pixels
COLOURS = ("#1b6ca8", "#9aa5b1", "#c3b091", "#d9d9d9", "#7fb77e", "#b05f6d")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--trace", type=Path, nargs="+", help=".npy of [tokens, L, K] expert numbers")
    ap.add_argument("--experts", type=int, default=128, help="E, in each layer")
    ap.add_argument("--layers", type=int, default=48, help="L, synthetic routing only")
    ap.add_argument("--top-k", type=int, default=8, help="K, synthetic routing only")
    ap.add_argument("--tokens", type=int, default=600, help="synthetic, or at most of a trace")
    ap.add_argument("--skew", type=float, default=1.0, help="of the synthetic router")
    ap.add_argument("--drift", type=float, default=0.0, help="of the synthetic router, per token")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument(
        "--expert-bytes", type=int, help="of one record; default: the profile's, else 3*2048*768*2"
    )
    ap.add_argument(
        "--budget", type=float, nargs="+", default=[37.0], help="%% of experts in slots"
    )
    ap.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences decoded together")
    ap.add_argument("--machine", choices=MACHINES, nargs="+", help="default: all, or the profiles")
    ap.add_argument("--profile", type=Path, nargs="+", default=[], help="what was measured of one")
    ap.add_argument(
        "--lost", action="store_true", help=f"only where the default loses to {' or '.join(RIVALS)}"
    )
    ap.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the tokens/s as bars")
    args = ap.parse_args(argv)
    if not all(0 <= budget <= 100 for budget in args.budget):
        ap.error(f"--budget is a share from 0 to 100 %, not {args.budget}")
    if args.trace is None and not 0 < args.top_k < args.experts:
        ap.error(f"--top-k must lie between 1 and --experts - 1 = {args.experts - 1}")
    return args


def machines(args: argparse.Namespace, batch: int) -> list[tuple[Machine, int]]:
    """Those asked for, with the bytes of an expert."""
    names = args.machine or ([] if args.profile else MACHINES)
    found = [(MACHINES[name], args.expert_bytes or EXPERT_BYTES) for name in names]
    for path in args.profile:
        try:
            profile = from_json(path.read_text())
        except (OSError, ValueError) as error:
            sys.exit(f"{path}: {error}")
        size = args.expert_bytes or profile.expert_bytes
        found.append((profile.machine(path.stem, batch), size))
    return found


def workloads(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Name → routing [tokens, L, K]."""
    if args.trace is None:
        name = f"synthetic, skew {args.skew:g}" + (f", drift {args.drift:g}" if args.drift else "")
        shape = (args.tokens, args.layers, args.experts, args.top_k)
        return {name: synthetic_routing(*shape, skew=args.skew, drift=args.drift, seed=args.seed)}
    routing = {path.stem: np.load(path)[: args.tokens] for path in args.trace}
    for name, trace in routing.items():
        if trace.ndim != 3 or not trace.size:
            sys.exit(f"{name}: expected [tokens, layers, experts per token], found {trace.shape}")
        if trace.max() >= args.experts:
            sys.exit(f"{name} names expert {trace.max()}, the model has {args.experts}: --experts")
    return routing


def row(machine: str, budget: float, batch: int, outcome: Outcome) -> str:
    return (
        f"| {machine} | {budget:g} % | {batch} | {outcome.policy} | {outcome.tokens_per_s:.1f} "
        f"| {100 * outcome.miss_share:.1f} % | {outcome.link_bytes_per_token / GB:.3f} "
        f"| {outcome.cpu_bytes_per_token / GB:.3f} |"
    )


def plot(results: list[tuple[str, list[Outcome]]]) -> str:
    """Bars of tokens/s, one group for each row of conditions, as SVG."""
    most = max(outcome.tokens_per_s for _, group in results for outcome in group)
    step = len(CONTENDERS) * BAR + GAP
    parts = []
    for n, (label, group) in enumerate(results):
        top = n * step + GAP
        parts.append(f'<text x="{LEFT - 8}" y="{top + BAR}" text-anchor="end">{label}</text>')
        for i, outcome in enumerate(group):
            y, width = top + i * BAR, WIDTH * outcome.tokens_per_s / most
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[i % len(COLOURS)]}"/>'
                f'<text x="{LEFT + width + ROW:.1f}" y="{y + BAR - ROW}">'
                f"{outcome.tokens_per_s:.0f} {outcome.policy}</text>"
            )
    size = f'width="{LEFT + WIDTH + 160}" height="{len(results) * step + GAP}"'
    style = 'font-family="sans-serif" font-size="11"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def ratio(outcomes: Sequence[Outcome]) -> float:
    """The default's speed, as a multiple of the better of its rivals'."""
    default, *others = outcomes
    return default.tokens_per_s / max(other.tokens_per_s for other in others)


def tally(ratios: Sequence[float]) -> str:
    worst, *_, best = sorted([*ratios, *ratios])
    return (
        f"{len(ratios)} configurations, lost in {sum(r < 1 for r in ratios)}; against the better "
        f"of {' and '.join(RIVALS)} {100 * (worst - 1):+.2f} % at worst, "
        f"{100 * (statistics.median(ratios) - 1):+.1f} % in the middle, "
        f"{100 * (best - 1):+.0f} % at best"
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    drawn: list[tuple[str, list[Outcome]]] = []
    ratios: list[float] = []
    names = ("default", *RIVALS) if args.lost else tuple(CONTENDERS)
    for name, routing in workloads(args).items():
        print(f"\n{name}: {len(routing)} tokens, {routing.shape[1]} layers, {args.experts} experts")
        print("\n| machine | resident | batch | policy | tok/s | misses | GB/token link | CPU |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for batch in args.batch:
            used = steps_of(routing, args.experts, batch)
            for budget in args.budget:
                num_slots = int(budget / 100 * used[0].size)
                for machine, size in machines(args, batch):
                    outcomes = []
                    for outcome in compare(
                        used, machine, names, num_slots=num_slots, expert_bytes=size, batch=batch
                    ):
                        outcomes.append(outcome)
                        if not args.lost:
                            print(row(machine.name, budget, batch, outcome), flush=True)
                    if args.lost:
                        ratios.append(ratio(outcomes))
                        for outcome in outcomes if ratios[-1] < 1 else ():
                            print(row(machine.name, budget, batch, outcome), flush=True)
                    drawn.append((f"{machine.name} {budget:g} % x{batch}", outcomes))
    if args.lost:
        print(f"\n{tally(ratios)}")
    if args.plot:
        args.plot.write_text(plot(drawn))


if __name__ == "__main__":
    main()
