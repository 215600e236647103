"""Models of full width, one after the other: written, served at some budgets, measured over HTTP.

    python tools/bench_full.py --out full                      # the whole list
    python tools/bench_full.py --models qwen3.6-nvfp4 --vram 8G --time-limit 90
    python tools/bench_full.py --show full/results.json --machine h200

Each model lies in ``--folder`` while it is measured, beside its host pool: where both together are
more than ``--memory``, it has fewer layers than the published one, and the table says how many.
Results are kept as JSON after each value. ``--show`` tells a kept run, with what the simulator
predicts for the counted number of slots.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import bench_rows as rows  # noqa: E402
from bench_http import BenchFailed  # noqa: E402
from bench_report import Results  # noqa: E402
from bench_roofline import Rates, least_step_s, read_weights  # noqa: E402
from bench_server import (  # noqa: E402
    Prompts,
    Server,
    end_like_a_key,
    running_ftd,
    with_server,
)

GiB = 2**30
KV_TOKENS = 33792  # for the longest prompt
MAX_RUNNING = 2  # recurrent states of few sequences leave more of a small budget to experts
COLD = {"ttft2k": 2048, "ttft8k": 8000, "ttft32k": 32000}


@dataclass(frozen=True)
class Model:
    preset: str
    format: str
    budgets: tuple[str, ...]  # of GPU memory
    limited: tuple[str, ...] = ()  # of these, decoding alone with six CPU threads, too

    @property
    def runs(self) -> list[tuple[str, tuple[str, ...]]]:
        """Name and flags of each run of ftd."""
        plain = [(vram, ("--vram", vram)) for vram in self.budgets]
        six = ("--cpu-threads", "6")
        return plain + [(f"{v}, 6 threads", ("--vram", v, *six)) for v in self.limited]


MODELS = {
    "qwen3.6-bf16": Model("qwen3.6-35b-a3b", "bf16", ("8G", "16G", "32G"), limited=("32G",)),
    "qwen3.6-fp8": Model("qwen3.6-35b-a3b", "fp8", ("8G",)),
    "qwen3.6-nvfp4": Model("qwen3.6-35b-a3b", "nvfp4", ("8G",)),
    "gpt-oss-120b": Model("gpt-oss-120b", "mxfp4", ("16G",)),
}


def layers_that_fit(published: int, layer_bytes: float, rest_bytes: float, memory: float) -> int:
    """How many layers fit twice into ``memory``: as a file, and in the process."""
    return max(1, min(published, int((memory / 2 - rest_bytes) // layer_bytes)))


def prepare(name: str, o: argparse.Namespace, results: Results) -> Path:
    """The checkpoint, written if it is not there."""
    from make_synthetic import family_of, make

    model = MODELS[name]
    shape = {"fmt": model.format, "experts": o.experts}
    family = family_of(model.preset, **shape)
    first = [family.layer(i) for i in range(min(4, family.layers))]  # all kinds of layers
    layer_bytes = statistics.fmean(sum(t.nbytes for t in layer.values()) for layer in first)
    rest_bytes = sum(t.nbytes for end in family.ends() for t in end.values())
    layers = o.layers or layers_that_fit(family.layers, layer_bytes, rest_bytes, o.memory * GiB)
    path = Path(o.folder) / f"ftd-{name}-{layers}"
    began_s = time.perf_counter()
    if not (path / "generation_config.json").exists():  # what is written last
        make(path, model.preset, layers=layers, **shape)
    file_bytes = sum(file.stat().st_size for file in path.iterdir())
    results.note(
        name,
        {
            "layers": layers,
            "published_layers": family.layers,
            "experts": family.experts,
            "experts_per_token": family.top_k,
            "file_bytes": file_bytes,
            "written_s": time.perf_counter() - began_s,
        },
    )
    written = results.facts[name]
    print(
        f"{name}: {layers} of {family.layers} layers, {file_bytes / GiB:.1f} GiB, "
        f"written in {written['written_s']:.0f} s",
        flush=True,
    )
    return path


async def measure(
    server: Server, at: str, o: argparse.Namespace, results: Results, *, vocab: int, full: bool
) -> None:
    """All rows of one run, the most wanted first."""
    p, sizes = Prompts(vocab - 3, o.seed), (o.prompt_tokens, o.output_tokens)
    await rows.warm_up(server, p, *sizes, o.prompt_tokens)
    gauges = await server.counters()
    results.note(f"{at}.slots", int(gauges.get("slots_total", 0)))
    results.add(f"{at}.decode", await rows.decode(server, p, *sizes, o.repeats))
    results.note(f"{at}.step", await rows.counted(server, p, *sizes))
    if not full:
        return
    results.add(f"{at}.append64", await rows.append(server, p, 64, o.repeats))
    for key, tokens in COLD.items():
        repeats = 1 if tokens > 20_000 else o.repeats
        results.add(f"{at}.{key}", await rows.cold(server, p, tokens // o.shorter, repeats))


def bench(name: str, o: argparse.Namespace, results: Results) -> None:
    """One model. What fails, or is not reached in its time, is noted; what was measured stays."""
    began_s = time.perf_counter()
    path = prepare(name, o, results)
    weights = read_weights(path)
    results.note(f"{name}.expert_bytes", weights.expert_bytes)
    try:
        for run, flags in MODELS[name].runs:
            at, left_s = f"{name}.{run}", o.time_limit - (time.perf_counter() - began_s)
            if o.vram and run.partition(",")[0] not in o.vram:
                continue
            if left_s <= 0:
                results.fail(at, f"not run: {o.time_limit:g} s were over")
                continue

            async def work(server: Server, at: str = at, left_s: float = left_s) -> None:
                full = "threads" not in at
                async with asyncio.timeout(left_s):
                    await measure(server, at, o, results, vocab=weights.vocab, full=full)

            try:
                with running_ftd(
                    path,
                    [
                        "--kv-tokens",
                        str(KV_TOKENS),
                        "--max-running",
                        str(MAX_RUNNING),
                        *flags,
                        *o.ftd,
                    ],
                    keep_log=o.out / f"ftd-{at.replace(', ', '-').replace(' ', '-')}.log",
                ) as started:
                    results.add(f"{at}.start", [started.ready_s])
                    asyncio.run(with_server(started.url, work))
            except (BenchFailed, aiohttp.ClientError, OSError) as error:
                results.fail(at, str(error) or f"{type(error).__name__}: {left_s:.0f} s were left")
            print(
                f"{at}: {time.perf_counter() - began_s:.0f} s since its model was begun", flush=True
            )
            if step := results.facts.get(f"{at}.step"):
                least_s = least_step_s(weights, step, Rates.of_gigabytes(*o.rates))
                results.add(f"{at}.roofline", [100 * least_s / step["step_s"]])
    finally:
        if not o.keep:
            shutil.rmtree(path)


HEAD = (
    "model", "layers", "VRAM", "slots", "decode tok/s", "simulated", "roofline", "hits",
    "on the CPU", "TTFT 2k", "8k", "32k", "64 appended", "ready",
)  # fmt: skip


def report(results: Results, predict: Callable[[str, str], float | None]) -> str:
    lines = [_row(HEAD), "|" + " --- |" * len(HEAD)]
    for name, model in MODELS.items():
        shape = results.facts.get(name)
        for run, _ in model.runs if shape else ():
            at = f"{name}.{run}"
            if f"{at}.start" not in results.values:
                continue
            step = results.facts.get(f"{at}.step") or {}
            used = step.get("hits", 0) + step.get("misses", 0)
            predicted = predict(name, run)
            lines.append(_row((
                f"{model.preset} {model.format}",
                f"{shape['layers']} of {shape['published_layers']}",
                run,
                f"{results.facts.get(f'{at}.slots', '')} of {shape['layers'] * shape['experts']}",
                _told(results, f"{at}.decode", ""),
                f"{predicted:.0f}" if predicted else "",
                _told(results, f"{at}.roofline", " %"),
                f"{100 * step['hits'] / used:.0f} %" if used else "",
                f"{step['on_cpu']:.1f} of {step['misses']:.1f}" if used else "",
                *(_told(results, f"{at}.{key}", " ms") for key in (*COLD, "append64")),
                _told(results, f"{at}.start", " s"),
            )))  # fmt: skip
    told = [f"\n**{key}**: {why}" for key, why in results.failed.items()]
    return "\n".join([*lines, *told])


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _told(results: Results, key: str, unit: str) -> str:
    values = results.values.get(key)
    if not values:
        return ""
    spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{statistics.median(values):.4g}{unit}{spread}"


def predictor(results: Results, machine: str) -> Callable[[str, str], float | None]:
    """Decode rates by the simulator, for the slots that the runs had."""
    from ftd.experts.machines import MACHINES
    from ftd.experts.simulator import simulate, steps_of, synthetic_routing

    used: dict[str, Any] = {}

    def predict(name: str, run: str) -> float | None:
        slots = results.facts.get(f"{name}.{run}.slots")
        limited = f"{machine}-6-threads" if "threads" in run else machine
        if slots is None or limited not in MACHINES:
            return None
        shape = results.facts[name]
        if name not in used:
            sizes = (shape["layers"], shape["experts"], shape["experts_per_token"])
            used[name] = steps_of(synthetic_routing(400, *sizes), shape["experts"], 1)
        record = round(results.facts[f"{name}.expert_bytes"])
        outcome = simulate(
            used[name], "default", MACHINES[limited], num_slots=slots, expert_bytes=record
        )
        return outcome.tokens_per_s

    return predict


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    ap.add_argument("--vram", nargs="+", help="these budgets alone")
    ap.add_argument("--memory", type=float, default=92.0, help="GiB for file and host pool")
    ap.add_argument("--layers", type=int, help="of each model; default: as many as fit")
    ap.add_argument("--experts", type=int, help="of each layer, to try this out")
    ap.add_argument("--folder", default="/dev/shm")
    ap.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    ap.add_argument("--time-limit", type=float, default=1e9, help="seconds for each model")
    ap.add_argument("--repeats", type=int, default=2)
    ap.add_argument("--prompt-tokens", type=int, default=512, help="before a decode")
    ap.add_argument("--output-tokens", type=int, default=256)
    ap.add_argument("--shorter", type=int, default=1, help="divide long prompts, to try this out")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument(
        "--rates", type=float, nargs=3, default=[50.9, 137.0, 4800.0],
        metavar=("LINK", "DRAM", "HBM"), help="GB/s of this machine; default: the H200 machine",
    )  # fmt: skip
    ap.add_argument("--out", type=Path, default=Path("bench-full"), help="for results and logs")
    ap.add_argument("--show", type=Path, metavar="JSON", help="tell these results, measure nothing")
    ap.add_argument("--machine", help="with --show: what the simulator says for this machine")
    ap.add_argument("ftd", nargs="*", help="after --: further flags for ftd")
    return ap.parse_args()


def main() -> int:
    o = arguments()
    if o.show:
        results = Results.read(o.show)
        predict = predictor(results, o.machine) if o.machine else lambda name, run: None
        print(report(results, predict))
        return 0
    results = Results(o.out / "results.json")
    results.conditions |= {"rates": o.rates, "cores": os.cpu_count(), "ftd": o.ftd}
    end_like_a_key()
    try:
        for name in o.models:
            try:
                bench(name, o, results)
            except (BenchFailed, OSError) as error:
                results.fail(name, str(error))
    except KeyboardInterrupt:
        results.fail("bench", "interrupted")
    told = report(results, lambda name, run: None)
    (o.out / "table.md").write_text(told + "\n")
    print(told)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
