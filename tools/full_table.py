"""The table of ``bench_full.py``: which models, which runs, and how results are told."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench_report import Results

COLD = {"ttft2k": 2048, "ttft8k": 8000, "ttft32k": 32000}


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    name: str
    vram: str
    threads: int | None = None  # of the CPU; such runs decode only


@dataclass(frozen=True)
class Model:
    preset: str
    format: str
    budgets: tuple[str, ...]  # of GPU memory, the largest first: one start serves them all
    limited: tuple[str, ...] = ()  # of these, decoding alone with fewer CPU threads, too
    threads: int = 6  # then

    @property
    def starts(self) -> list[list[Run]]:
        """The runs of each start of ftd."""
        plain = [Run(vram, vram) for vram in self.budgets]
        few = [[Run(f"{v}, {self.threads} threads", v, self.threads)] for v in self.limited]
        return [plain, *few]

    @property
    def runs(self) -> list[Run]:
        return [run for start in self.starts for run in start]


QWEN = "qwen3.6-35b-a3b"
FULL = {
    "qwen3.6-bf16": Model(QWEN, "bf16", ("32G", "16G", "8G"), limited=("32G",)),
    "gpt-oss-120b": Model("gpt-oss-120b", "mxfp4", ("16G",)),
    "qwen3.6-nvfp4": Model(QWEN, "nvfp4", ("8G",)),
    "qwen3.6-fp8": Model(QWEN, "fp8", ("8G",)),
}
TRIALS = {  # to try this out without a GPU
    "trial": Model("tiny-qwen3.6", "nvfp4", ("1M", "800K"), limited=("1M",), threads=1),
    "trial-oss": Model("tiny-gpt-oss", "mxfp4", ("2M",)),
}
MODELS = FULL | TRIALS

_HEAD = (
    "model", "layers", "VRAM", "slots", "decode, tok/s", "simulated", "roofline", "hits",
    "on the CPU", "TTFT 2k", "8k", "32k", "64 appended", "start",
)  # fmt: skip


def told(results: Results) -> str:
    """The results as Markdown: a row for each run, how starts went, what is missing and why."""
    lines = [_row(_HEAD), "|" + " --- |" * len(_HEAD)]
    for name, model in MODELS.items():
        if shape := results.facts.get(name):
            lines += [_row(_cells(results, name, model, run, shape)) for run in model.runs
                      if results.values.get(f"{name}.{run.name}.decode")]  # fmt: skip
    starts = _starts(results)
    if starts:
        lines += ["", "Starts, seconds:", "", *starts]
    for key, fact in results.facts.items():
        if key.endswith(".reload"):
            lines += ["", _reload(key.removesuffix(".reload"), fact)]
    return "\n".join([*lines, *(f"\n**{key}**: {why}" for key, why in results.failed.items())])


def _cells(
    results: Results, name: str, model: Model, run: Run, shape: Mapping[str, Any]
) -> tuple[str, ...]:
    at = f"{name}.{run.name}"
    step = results.facts.get(f"{at}.step") or {}
    used = step.get("hits", 0) + step.get("misses", 0)
    predicted = results.facts.get(f"{at}.predicted")
    slots = results.facts.get(f"{at}.slots", 0)
    return (
        f"{model.preset} {model.format}",
        f"{shape['layers']} of {shape['published_layers']}",
        run.name,
        f"{slots} of {shape['layers'] * shape['experts']}",
        _median(results, f"{at}.decode", ""),
        f"{predicted['tokens_per_s']:.0f}" if predicted else "",
        _median(results, f"{at}.roofline", " %"),
        f"{100 * step['hits'] / used:.0f} %" if used else "",
        f"{step['on_cpu']:.1f} of {step['misses']:.1f}" if used else "",
        *(_median(results, f"{at}.{key}", " ms") for key in (*COLD, "append64")),
        _median(results, f"{at}.start", " s"),
    )


def _starts(results: Results) -> list[str]:
    found = {k.removesuffix(".phases"): v for k, v in results.facts.items() if ".phases" in k}
    phases = list(dict.fromkeys(phase for start in found.values() for phase in start))
    if not found:
        return []
    rows = [_row((at, *(f"{start[p]:.1f}" if p in start else "" for p in phases)))
            for at, start in found.items()]  # fmt: skip
    return [_row(("start", *phases)), "|" + " --- |" * (len(phases) + 1), *rows]


def _reload(name: str, fact: Mapping[str, Any]) -> str:
    def gaps(found: Mapping[str, Any]) -> str:
        return (
            f"{found['decoded_equal']} of {fact['decoded']} greedy tokens equal, "
            f"{found['bitwise']} of {found['compared']} log-probabilities to the last bit, "
            f"the largest gap {found['largest']:.2g} nat"
        )

    return (
        f"{name} → {fact['to']} → {name}: {fact['there_s']:.1f} s and {fact['back_s']:.1f} s; "
        f"before and after {gaps(fact['over'])}; twice without a reload {gaps(fact['without'])}"
    )


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _median(results: Results, key: str, unit: str) -> str:
    values = results.values.get(key)
    if not values:
        return ""
    spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{statistics.median(values):.4g}{unit}{spread}"
