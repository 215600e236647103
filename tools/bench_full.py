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
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_http import BenchFailed  # noqa: E402
from bench_report import Results  # noqa: E402
from bench_roofline import Weights, read_weights  # noqa: E402
from bench_server import (  # noqa: E402
    end_like_a_key,
    running_ftd,
    with_server,
)
from full_runs import Phases, Runs  # noqa: E402
from full_table import FULL, MODELS, Run, told  # noqa: E402

GiB = 2**30
KV_TOKENS = 33792  # for the longest prompt
MAX_RUNNING = 2  # recurrent states of few sequences leave more of a small budget to experts
FEW_EXPERTS = 31  # of a hollow checkpoint; a prime, so that no layer ends where they do
START_S = 200.0  # of a start that ends at all


def layers_that_fit(published: int, layer_bytes: float, rest_bytes: float, memory: float) -> int:
    """How many layers fit: experts in the process alone, what is dense as a file, too."""
    return max(1, min(published, int((memory - 2 * rest_bytes) // layer_bytes)))


class FullBench:
    def __init__(self, o: argparse.Namespace, results: Results) -> None:
        self.o, self.results = o, results
        self.ends = ExitStack()  # removes what was written
        self._began_s = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began_s:6.1f} s] {text}", flush=True)

    @property
    def left_s(self) -> float:
        return self.o.limit_s - (time.perf_counter() - self._began_s)

    def has_time(self, at: str, need_s: float = 0.0) -> bool:
        if self.left_s > need_s:
            return True
        self.results.fail(at, f"left out: the limit of {self.o.limit_s:g} s was reached")
        self.say(f"{at}: left out, {self.left_s:.0f} s are left")
        return False

    # ---- one model

    def model(self, name: str) -> None:
        """What fails, or is not reached in time, is noted; what was measured stays."""
        if not self.has_time(name):
            return
        path, facts = self.prepare(name)
        self.results.note(name, facts)
        weights = read_weights(path)
        for start in MODELS[name].starts:
            runs = [run for run in start if not self.o.vram or run.vram in self.o.vram]
            runs = [run for run in runs if self.has_time(f"{name}.{run.name}")]
            if runs:
                self.start(name, path, weights, runs)

    def prepare(self, name: str, layers: int | None = None) -> tuple[Path, dict[str, Any]]:
        """The checkpoint, written if it is not there, and what it is."""
        from make_synthetic import family_of, make

        began_s, model = time.perf_counter(), MODELS[name]
        shape = {"fmt": model.format, "experts": self.o.experts}
        family = family_of(model.preset, **shape)
        first = [family.layer(i) for i in range(min(4, family.layers))]  # all kinds of layers
        layer_bytes = statistics.fmean(sum(t.nbytes for t in layer.values()) for layer in first)
        rest_bytes = sum(t.nbytes for end in family.ends() for t in end.values())
        fit = layers_that_fit(family.layers, layer_bytes, rest_bytes, self.o.memory * GiB)
        layers = layers or self.o.layers or fit
        path = Path(self.o.folder) / f"ftd-{name}-{layers}"
        if not (path / "generation_config.json").exists():  # what is written last
            make(path, model.preset, layers=layers, hollow=FEW_EXPERTS, **shape)
        if not self.o.keep:
            self.ends.callback(shutil.rmtree, path, ignore_errors=True)
        file_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        took_s = time.perf_counter() - began_s
        self.say(
            f"{name}: {layers} of {family.layers} layers, {file_bytes / GiB:.1f} GiB of weights, "
            f"written in {took_s:.1f} s"
        )
        return path, {
            "layers": layers,
            "published_layers": family.layers,
            "experts": family.experts,
            "experts_per_token": family.top_k,
            "file_bytes": file_bytes,
            "written_s": took_s,
        }

    def start(self, name: str, path: Path, weights: Weights, runs: Sequence[Run]) -> None:
        """One ftd, and all runs that it can serve."""
        o, first = self.o, f"{name}.{runs[0].name}"
        flags = [
            "--vram", runs[0].vram, "--kv-tokens", str(KV_TOKENS // o.shorter),
            "--max-running", str(MAX_RUNNING), "--profile-dir", str((o.out / "profiles").resolve()),
        ]  # fmt: skip
        if runs[0].threads:
            flags += ["--cpu-threads", str(runs[0].threads)]
        phases = Phases(self.say, first)
        self.say(f"{first}: starting ftd {' '.join(flags)}")
        try:
            with running_ftd(
                path,
                [*flags, *o.ftd],
                keep_log=o.out / f"ftd-{first.replace(', ', '-').replace(' ', '-')}.log",
                program=[str(ROOT / "tools" / "serve_hollow.py")],
                told=phases.told,
                within_s=min(START_S, self.left_s),
            ) as started:
                self.results.add(f"{first}.start", [started.ready_s])
                self.results.note(f"{first}.phases", phases.seconds)
                self.say(f"{first}: ready after {started.ready_s:.1f} s: {phases}")
                asyncio.run(
                    with_server(started.url, Runs(self, name, path, started, weights, runs))
                )
        except (BenchFailed, aiohttp.ClientError, OSError) as error:
            self.failed(first, error)

    def failed(self, at: str, error: Exception) -> None:
        why = str(error) or f"{type(error).__name__}, {self.left_s:.0f} s before the limit"
        self.results.fail(at, why)
        self.say(f"{at}: {why}")


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
    bench = FullBench(o, results)
    if o.prepare:
        for name in o.models:
            bench.prepare(name)
        return 0
    end_like_a_key()
    with bench.ends:
        try:
            for name in o.models:
                try:
                    bench.model(name)
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
