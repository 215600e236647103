"""Models of full width and depth, one after the other: served at some budgets, measured over HTTP.

    python tools/bench_full.py --out full                      # the whole list
    python tools/bench_full.py --models qwen3.6-nvfp4 --vram 8G --limit-s 90
    python tools/bench_full.py --show full/results.json

The checkpoints are hollow (``tools/hollow.py``): true headers and dense weights, and a few experts
that are read over and over, each to a record of its own. A model that does not fit ``--memory``
has fewer layers than the published one, and the table says how many. One start of ftd serves all
budgets of a model: they are changed by what ``ftctl budget`` sends. Each start measures the
machine's profile; the simulator's prediction and the roofline are of that.

Results are kept as JSON after each value, with the log of every start, and what is done is told
with the seconds that have passed: a run that is cut says where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_http import BenchFailed  # noqa: E402
from bench_report import Results  # noqa: E402
from bench_roofline import Weights, read_weights  # noqa: E402
from bench_server import end_like_a_key, running_ftd, with_server  # noqa: E402
from full_runs import Phases, Runs  # noqa: E402
from full_table import FULL, MODELS, Run, told  # noqa: E402
from full_work import Work  # noqa: E402

KV_TOKENS = 33792  # for the longest prompt
MAX_RUNNING = 2  # recurrent states of few sequences leave more of a small budget to experts
START_S = 200.0  # of a start that ends at all


def serve(work: Work, name: str, path: Path, weights: Weights, runs: Sequence[Run]) -> None:
    """One ftd, and all runs that it can serve."""
    o, first = work.o, f"{name}.{runs[0].name}"
    flags = [
        "--vram", runs[0].vram, "--kv-tokens", str(KV_TOKENS // o.shorter),
        "--max-running", str(MAX_RUNNING), "--profile-dir", str((o.out / "profiles").resolve()),
    ]  # fmt: skip
    if runs[0].threads:
        flags += ["--cpu-threads", str(runs[0].threads)]
    phases = Phases(work.say, first)
    work.say(f"{first}: starting ftd {' '.join(flags)}")
    try:
        with running_ftd(
            path,
            [*flags, *o.ftd],
            keep_log=o.out / f"ftd-{first.replace(', ', '-').replace(' ', '-')}.log",
            program=[str(ROOT / "tools" / "serve_hollow.py")],
            told=phases.told,
            within_s=min(START_S, work.left_s),
        ) as started:
            work.results.add(f"{first}.start", [started.ready_s])
            work.results.note(f"{first}.phases", phases.seconds)
            work.say(f"{first}: ready after {started.ready_s:.1f} s: {phases}")
            asyncio.run(with_server(started.url, Runs(work, name, path, started, weights, runs)))
    except (BenchFailed, aiohttp.ClientError, OSError) as error:
        work.failed(first, error)


def measure(work: Work, name: str) -> None:
    """What fails, or is not reached in time, is noted; what was measured stays."""
    if not work.has_time(name):
        return
    path, facts = work.prepare(name)
    work.results.note(name, facts)
    weights = read_weights(path)
    for together in MODELS[name].starts:
        runs = [run for run in together if not work.o.vram or run.vram in work.o.vram]
        runs = [run for run in runs if work.has_time(f"{name}.{run.name}")]
        if runs:
            serve(work, name, path, weights, runs)


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--models", nargs="+", choices=MODELS, default=list(FULL))
    ap.add_argument("--vram", nargs="+", help="these budgets alone")
    ap.add_argument(
        "--reload", nargs=2, metavar=("MODEL", "OTHER"), default=(),
        help="after MODEL's runs: reload to OTHER with two layers and back, compare answers",
    )  # fmt: skip
    ap.add_argument("--memory", type=float, default=100.0, help="GiB for a model")
    ap.add_argument("--layers", type=int, help="of each model; default: as many as fit")
    ap.add_argument("--experts", type=int, help="of each layer, to try this out")
    ap.add_argument("--folder", default="/dev/shm")
    ap.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    ap.add_argument("--prepare", action="store_true", help="write them for a later run, no more")
    ap.add_argument("--limit-s", type=float, default=1e9, help="what is left then is left out")
    ap.add_argument("--repeats", type=int, default=2)
    ap.add_argument("--prompt-tokens", type=int, default=512, help="before a decode")
    ap.add_argument("--output-tokens", type=int, default=256)
    ap.add_argument("--shorter", type=int, default=1, help="divide long prompts, to try this out")
    ap.add_argument("--no-profile", action="store_true", help="do not measure the machine first")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument(
        "--rates", type=float, nargs=3, default=[50.9, 137.0, 4800.0],
        metavar=("LINK", "DRAM", "HBM"),
        help="GB/s for the roofline; without a profile, of link and memory too",
    )  # fmt: skip
    ap.add_argument("--out", type=Path, default=Path("bench-full"), help="for results and logs")
    ap.add_argument("--show", type=Path, metavar="JSON", help="tell these results, measure nothing")
    ap.add_argument("ftd", nargs="*", help="after --: further flags for ftd")
    o = ap.parse_args()
    o.reload = dict([o.reload]) if o.reload else {}
    o.keep |= o.prepare
    return o


def main() -> int:
    o = arguments()
    if o.show:
        print(told(Results.read(o.show)))
        return 0
    results = Results(o.out / "results.json")
    results.conditions |= {"rates": o.rates, "cores": os.cpu_count(), "ftd": o.ftd}
    work = Work(o, results)
    if o.prepare:
        for name in o.models:
            work.prepare(name)
        return 0
    end_like_a_key()
    with work.ends:
        try:
            for name in o.models:
                try:
                    measure(work, name)
                except (BenchFailed, OSError) as error:
                    results.fail(name, str(error))
        except KeyboardInterrupt:
            results.fail("bench", "interrupted")
    text = told(results)
    (o.out / "table.md").write_text(text + "\n")
    print(text)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
