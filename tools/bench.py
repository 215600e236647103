"""Measure ftd on this machine: one command makes a checkpoint, starts ftd, measures over HTTP.

    python tools/bench.py                   # the whole table: Qwen3-30B-A3B widths, 16 layers
    python tools/bench.py --only decode cold --quick
    python tools/bench.py --model PATH --resident-share 0.25
    python tools/bench.py --url http://127.0.0.1:8080 --vocab 151936   # any OpenAI-like server
    python tools/bench.py --show ftd.json --machine h200   # an earlier run, beside the simulator
    python tools/bench.py --show ftd.json peer.json --plot both.svg     # several, side by side

ftd runs four times, each with a profile of its own, calibrated at the start: 37 % of the experts in
slots, its compiled kernels not cached; all resident; 37 % again with six CPU threads, kernels
cached; and with a budget of 8 GiB. Prompts are random token ids, different each time, so that no
cache helps unless the row says so. Answers are drawn at temperature 1: greedy decoding of random
weights runs into loops. The answers of the first two are compared: the same tokens have the same
log-probabilities but for rounding.

``--out`` keeps the results as JSON after each value, the logs, and a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import bench_rows as rows  # noqa: E402
from bench_http import BenchFailed  # noqa: E402
from bench_plot import plot, side_by_side  # noqa: E402
from bench_report import Line, Results, table  # noqa: E402
from bench_roofline import Rates, Weights, least_step_s, read_weights  # noqa: E402
from bench_server import (  # noqa: E402
    Prompts,
    Server,
    end_like_a_key,
    running_ftd,
    with_server,
)

from ftd.control.client import Client, ControlError  # noqa: E402
from ftd.control.protocol import Profile  # noqa: E402

KV_TOKENS = 32768
SCORED_TOKENS = 160
LIMITED_THREADS = 6
LIMIT_OF_BEST = 0.85  # of the best policy in the simulator: the bar of runs without one
SMALL_BUDGET = "8G"
PROFILE_TIMEOUT_S = 120

# How far two runs may be apart, in nat. Where a router's choice is close, rounding can pick another
# expert, and that row differs legitimately: such rows are few.
MEAN_TOLERANCE, FAR, FAR_SHARE = 0.05, 0.25, 0.02

MS = "ms to first token"
LINES = (
    Line("offloaded.decode", "decode, 1 stream", "tok/s", 325, 430),
    Line("threads.decode", "decode, 6 CPU threads", "tok/s"),
    Line("offloaded.streams", "decode, 4 streams together", "tok/s", 400, 550),
    Line("resident.decode", "decode, all resident", "tok/s", 545, 650),
    Line("resident.streams", "decode, 4 streams, all resident", "tok/s"),
    Line("offloaded.cold", "prompt of 2048 tokens, cold", MS, 300, 250, "less"),
    Line("offloaded.long", "prompt of 8000 tokens, cold", MS),
    Line("offloaded.append64", "64 tokens behind a cached prefix", MS, 150, 80, "less"),
    Line("offloaded.append20", "20 tokens behind a cached prefix", MS, 60, 30, "less"),
    Line("resident.cold", "prompt of 2048, cold, all resident", MS),
    Line("resident.append20", "20 tokens appended, all resident", MS),
    Line("threads.start", "start to ready, kernels cached", "s", 12, 8, "less"),
    Line("offloaded.start", "start to ready, kernels not cached", "s", 40, 20, "less"),
    Line("resident.start", "start to ready, all resident", "s"),
    Line("offloaded.roofline", "share of the bandwidth roofline, decode", "%", 55, 70),
    Line("resident.roofline", "share of the roofline, all resident", "%"),
    Line("threads.roofline", "share of the roofline, 6 CPU threads", "%"),
    Line("offloaded.kept", "a stream's speed kept beside 8000 tokens", "%", 25),
    Line("offloaded.slower", "that prompt's TTFT against its own alone", "x", 1.5, None, "less"),
    Line("vram.decode", f"decode, --vram {SMALL_BUDGET}", "tok/s"),
    Line("vram.cold", f"prompt of 2048 tokens, --vram {SMALL_BUDGET}", MS),
    Line("vram.append20", f"20 tokens appended, --vram {SMALL_BUDGET}", MS),
)
PEER_LINES = tuple(
    Line(f"url.{line.key.partition('.')[2]}", *(getattr(line, f) for f in
         ("work", "unit", "bar", "stretch", "better")))
    for line in LINES if line.key.startswith("offloaded.")
)  # fmt: skip
NAMES = ("decode", "streams", "counts", "cold", "append64", "append20", "beside")
RUNS: dict[str, tuple[str, ...]] = {  # which of them each run of ftd measures
    "offloaded": NAMES,
    "resident": ("decode", "streams", "counts", "cold", "append64", "append20"),
    "threads": ("decode", "counts"),
    "vram": ("decode", "counts", "cold", "append20"),
}


@dataclass
class Bench:
    """One invocation: what to measure, how often, until when, and what came out."""

    o: argparse.Namespace
    results: Results
    prompts: Prompts
    began_s: float = field(default_factory=time.perf_counter)
    answers: dict[str, rows.Answers] = field(default_factory=dict)

    def left_s(self) -> float:
        return self.o.time_limit - (time.perf_counter() - self.began_s)

    def wanted(self, name: str) -> bool:
        return not self.o.only or name in self.o.only

    async def measure(self, run: str, server: Server) -> None:
        """Each wanted row of a run, as long as there is time; one that fails is noted."""
        o, p = self.o, self.prompts
        sizes = (o.prompt_tokens, o.output_tokens)
        some = o.repeats if run in ("offloaded", "url") else max(2, o.repeats - 1)
        few = max(1, some - 1)
        work: dict[str, Callable[[], Awaitable[Any]]] = {
            "decode": lambda: rows.decode(server, p, *sizes, some),
            "streams": lambda: rows.streams(server, p, *sizes, few),
            "counts": lambda: rows.counted(server, p, *sizes, some),
            "cold": lambda: rows.cold(server, p, o.long_prompt, some),
            "append64": lambda: rows.append(server, p, 64, some, o.long_prompt),
            "append20": lambda: rows.append(server, p, 20, some, o.long_prompt),
            "beside": lambda: rows.beside(server, p, o.prompt_tokens, o.beside_prompt, few),
        }
        names = [name for name in RUNS.get(run, NAMES) if self.wanted(name)]
        if names and self.left_s() > 0:
            await rows.warm_up(server, p, *sizes, o.long_prompt)
        for name in names:
            key = f"{run}.{name}"
            if self.left_s() <= 0:
                self.results.fail(key, f"not measured: {o.time_limit:g} s were over")
                continue
            try:
                async with asyncio.timeout(max(5.0, self.left_s() + o.grace)):
                    self.take(run, name, await work[name]())
            except (BenchFailed, aiohttp.ClientError, TimeoutError) as error:
                self.results.fail(key, str(error) or f"{type(error).__name__} of the time limit")

    def take(self, run: str, name: str, found: Any) -> None:
        if name == "counts":
            if found:
                self.results.note(f"{run}.steps", found)
                self.results.note(f"{run}.step", rows.middle(found))
        elif name == "beside":
            self.results.add(f"{run}.long", [turn.alone_ms for turn in found])
            self.results.add(f"{run}.kept", [turn.kept for turn in found])
            self.results.add(f"{run}.slower", [turn.slower for turn in found])
        else:
            self.results.add(f"{run}.{name}", found)

    async def compare(self, run: str, server: Server, scored: Sequence[list[int]]) -> None:
        if not self.wanted("answers") or self.left_s() <= 0 or run not in ("offloaded", "resident"):
            return
        self.answers[run] = await rows.answers(server, scored)
        if len(self.answers) == 2:
            self.results.note("agreement", rows.agreement(*self.answers.values(), FAR))


def bench_own(o: argparse.Namespace, results: Results) -> None:
    model = prepare_model(o)
    weights = read_weights(model)
    slots = int(weights.num_experts * o.resident_share)
    results.conditions |= {
        "model": str(model), "slots": slots, "experts": weights.num_experts, "ftd": o.ftd,
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "prompt_tokens": o.prompt_tokens, "output_tokens": o.output_tokens,
        "shape": {
            "layers": weights.layers, "experts": weights.num_experts,
            "top_k": weights.experts_per_token, "expert_bytes": round(weights.expert_bytes),
        },
    }  # fmt: skip
    bench = Bench(o, results, Prompts(weights.vocab - 3, o.seed))
    scored = [bench.prompts.new(SCORED_TOKENS) for _ in range(3)]
    kv = ("--kv-tokens", str(KV_TOKENS))
    flags: dict[str, tuple[str, ...]] = {
        "offloaded": (*kv, "--expert-slots", str(slots)),
        "resident": (*kv, "--expert-slots", str(weights.num_experts)),
        "threads": (*kv, "--expert-slots", str(slots), "--cpu-threads", str(LIMITED_THREADS)),
        "vram": (*kv, "--vram", SMALL_BUDGET),
    }
    with tempfile.TemporaryDirectory(prefix="ftd-bench-triton-") as cache:
        for run in o.runs:
            if bench.left_s() <= 0:
                results.fail(run, f"not run: {o.time_limit:g} s were over")
                continue

            async def work(server: Server, run: str = run) -> None:
                await bench.measure(run, server)
                await bench.compare(run, server, scored)

            try:
                with running_ftd(
                    model,
                    [*flags[run], "--profile-dir", f"{cache}/profiles-{run}", *o.ftd],
                    env={"TRITON_CACHE_DIR": cache},
                    keep_log=o.out / f"ftd-{run}.log" if o.out else None,
                ) as started:
                    results.add(f"{run}.start", [started.ready_s])
                    asyncio.run(with_server(started.url, work))
                    add_roofline(o, results, run, weights, started.socket)
            except (BenchFailed, ControlError, aiohttp.ClientError, OSError) as error:
                results.fail(run, str(error))


def add_roofline(
    o: argparse.Namespace, results: Results, run: str, weights: Weights, socket: Path
) -> None:
    """Of each counted stream, by the rates that ftd now measures of link and memory."""
    steps = results.facts.get(f"{run}.steps", [])
    rates = [*(o.rates or (0.0, 0.0)), o.hbm]
    if any(step["misses"] for step in steps) and not o.rates:
        with Client(socket, PROFILE_TIMEOUT_S) as client:
            measured = client.call(Profile())
        rates[:2] = (
            measured.rows[0].link_bytes_per_s / 1e9,
            (measured.read_bytes_per_s or measured.rows[0].cpu_bytes_per_s) / 1e9,
        )
    if steps:
        least = Rates.of_gigabytes(*rates)
        shares = [100 * least_step_s(weights, step, least) / step["step_s"] for step in steps]
        results.note(f"{run}.rates", rates)
        results.add(f"{run}.roofline", shares)


def bench_url(o: argparse.Namespace, results: Results) -> None:
    results.conditions["url"] = o.url
    bench = Bench(o, results, Prompts(o.vocab, o.seed))
    work = lambda server: bench.measure("url", server)  # noqa: E731
    asyncio.run(with_server(o.url.rstrip("/").removesuffix("/v1"), work))


def prepare_model(o: argparse.Namespace) -> Path:
    from make_synthetic import make

    if o.model is not None:
        return o.model.resolve()  # ftd runs elsewhere
    model = Path(o.folder) / f"ftd-{o.preset}-{o.layers}"
    if not (model / "generation_config.json").exists():  # what is written last
        make(model, o.preset, layers=o.layers)
    return model


def report(results: Results, machine: str | None = None) -> str:
    lines, predicted = LINES + PEER_LINES, {}
    if machine:
        predicted = predictions(results, machine)
        bars = {f"{run}.decode": LIMIT_OF_BEST * best for run, (_, best) in predicted.items()}
        lines = tuple(
            replace(line, bar=bars[line.key]) if line.bar is None and line.key in bars else line
            for line in lines
        )
    parts = [table(lines, {"": results})]
    steps = {run: fact for run in RUNS if (fact := results.facts.get(f"{run}.step"))}
    if steps:
        parts += ["", "A decode step, counted:", "", step_table(steps)]
    for run in steps:
        if (rates := results.facts.get(f"{run}.rates")) and rates[0]:
            link, dram, hbm = rates
            read = f"{link:.1f} over the link, {dram:.1f} by the CPU, {hbm:g} of GPU memory"
            parts += ["", f"Rates of the roofline, {run}, GB/s: {read}."]
    if predicted:
        parts += ["", "Beside the simulator:", "", predicted_table(results, predicted)]
    if gaps := results.facts.get("agreement"):
        parts += ["", told(gaps)]
    parts += [f"\n**{key}**: {why}" for key, why in results.failed.items()]
    return "\n".join(parts)


def step_table(steps: dict[str, dict[str, float]]) -> str:
    head = "| run | step | hits | misses | over the link | on the CPU | came into slots |"
    lines = [head, "|" + " --- |" * 7]
    for run, step in steps.items():
        used = max(1e-9, step["hits"] + step["misses"])
        misses = max(1e-9, step["misses"])
        lines.append(
            f"| {run} | {1e3 * step['step_s']:.2f} ms | {step['hits']:.1f} "
            f"({100 * step['hits'] / used:.1f} %) | {step['misses']:.1f} "
            f"| {step['fetched']:.1f} ({100 * step['fetched'] / misses:.0f} %) "
            f"| {step['on_cpu']:.1f} ({100 * step['on_cpu'] / misses:.0f} %) "
            f"| {step['fill_bytes'] / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def predictions(results: Results, machine: str) -> dict[str, tuple[float, float]]:
    """For each run: decoding by the policy that serves, and by the best that knows no future."""
    from ftd.experts.machines import MACHINES
    from ftd.experts.simulator import compare, steps_of, synthetic_routing

    found = {}
    shape = results.conditions["shape"]
    layers, experts = shape["layers"], shape["experts"] // shape["layers"]
    used = steps_of(synthetic_routing(600, layers, experts, shape["top_k"]), experts, 1)
    for run in RUNS:
        name = f"{machine}-{LIMITED_THREADS}-threads" if run == "threads" else machine
        step = results.facts.get(f"{run}.step")
        if not step or not step["misses"] or name not in MACHINES:
            continue
        outcomes = compare(
            used, MACHINES[name], num_slots=int(step["slots"]), expert_bytes=shape["expert_bytes"]
        )
        rates = {outcome.policy: outcome.tokens_per_s for outcome in outcomes}
        found[run] = rates["default"], max(r for name, r in rates.items() if name != "oracle")
    return found


def predicted_table(results: Results, predicted: dict[str, tuple[float, float]]) -> str:
    lines = ["| run | measured | simulated | measured / simulated |", "|" + " --- |" * 4]
    for run, (default, _) in predicted.items():
        if values := results.values.get(f"{run}.decode"):
            measured = statistics.median(values)
            share = 100 * measured / default
            lines.append(f"| {run} | {measured:.0f} tok/s | {default:.0f} tok/s | {share:.0f} % |")
    return "\n".join(lines)


def agrees(gaps: dict[str, float]) -> bool:
    return gaps["mean"] <= MEAN_TOLERANCE and gaps["far"] <= FAR_SHARE


def told(gaps: dict[str, float]) -> str:
    return (
        f"Answers {'agree' if agrees(gaps) else 'DISAGREE'}: {gaps['compared']} log-probabilities, "
        f"resident against offloaded: {gaps['bitwise']} equal to the last bit, mean gap "
        f"{gaps['mean']:.4f}, 99 % within {gaps['p99']:.4f}, largest {gaps['largest']:.4f} nat; "
        f"{100 * gaps['far']:.1f} % beyond {FAR} nat, where a router's choice was close; "
        f"{gaps['decoded_equal']} decoded tokens equal, {gaps['answers_parted']} answers parted."
    )


def show(paths: Sequence[Path], machine: str | None, drawn: Path | None) -> int:
    found = {
        path.resolve().parent.name if path.stem == "results" else path.stem: Results.read(path)
        for path in paths
    }
    if len(found) == 1:
        print(report(*found.values(), machine))
        return 0
    for result in found.values():  # a peer's rows beside those of ftd that they compare with
        for key in [key for key in result.values if key.startswith("url.")]:
            result.values["offloaded." + key.removeprefix("url.")] = result.values.pop(key)
    print(table(LINES, found))
    if drawn:
        drawn.write_text(side_by_side(LINES, found))
    return 0


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--model", type=Path, help="default: a synthetic one is made")
    ap.add_argument("--preset", default="qwen3-30b-a3b", help="of the synthetic one")
    ap.add_argument("--layers", type=int, default=16, help="of the synthetic one")
    ap.add_argument("--folder", default="/dev/shm", help="for the synthetic one")
    ap.add_argument("--resident-share", type=float, default=0.37)
    ap.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    ap.add_argument("--only", nargs="+", choices=(*NAMES, "answers"), help="these rows alone")
    ap.add_argument("--quick", action="store_true", help="two values a row")
    ap.add_argument("--repeats", type=int, default=4, help="values a row")
    ap.add_argument("--time-limit", type=float, default=1e9, help="seconds; the rest is left out")
    ap.add_argument("--grace", type=float, default=10.0, help="seconds that a begun row may add")
    ap.add_argument("--url", help="measure this server instead of an ftd of our own")
    ap.add_argument("--vocab", type=int, default=30000, help="with --url: token ids below it")
    ap.add_argument("--prompt-tokens", type=int, default=512, help="before a decode")
    ap.add_argument("--output-tokens", type=int, default=256)
    ap.add_argument("--long-prompt", type=int, default=rows.PREFIX_TOKENS, help="cold, and prefix")
    ap.add_argument("--beside-prompt", type=int, default=rows.LONG_TOKENS, help="beside a stream")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument(
        "--rates", type=float, nargs=2, metavar=("LINK", "DRAM"),
        help="GB/s, for the roofline; default: ftd measures them at the end of each run",
    )  # fmt: skip
    ap.add_argument("--hbm", type=float, default=4800.0, help="GB/s of the GPU; default: H200")
    ap.add_argument("--machine", help="what the simulator says for this one, e.g. h200")
    ap.add_argument("--out", type=Path, help="folder for results.json, plot.svg and logs")
    ap.add_argument("--show", type=Path, nargs="+", metavar="JSON", help="print these results")
    ap.add_argument("--plot", type=Path, metavar="SVG", help="with --show: draw them side by side")
    ap.add_argument("ftd", nargs="*", help="after --: further flags for ftd")
    o = ap.parse_args()
    if o.quick:
        o.repeats = 2
    return o


def main() -> int:
    o = arguments()
    if o.show:
        return show(o.show, o.machine, o.plot)
    end_like_a_key()
    results = Results(o.out / "results.json" if o.out else None)
    try:
        (bench_url if o.url else bench_own)(o, results)
    except (BenchFailed, aiohttp.ClientError, TimeoutError) as error:
        results.fail("bench", str(error) or type(error).__name__)
    except KeyboardInterrupt:
        results.fail("bench", "interrupted")
    text = report(results, o.machine)
    print(text)
    if o.out:
        (o.out / "plot.svg").write_text(plot(LINES, results))
        (o.out / "table.md").write_text(text + "\n")
    gaps = results.facts.get("agreement")
    return 1 if results.failed or (gaps and not agrees(gaps)) else 0


if __name__ == "__main__":
    sys.exit(main())
