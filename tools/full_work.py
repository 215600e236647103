"""What all runs of ``bench_full.py`` share: options, results, time, checkpoints."""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_report import Results
from full_table import MODELS

GiB = 2**30
FEW_EXPERTS = 31  # of a hollow checkpoint; a prime, so that no layer ends where they do


def layers_that_fit(published: int, layer_bytes: float, rest_bytes: float, memory: float) -> int:
    """How many layers fit: experts in the process alone, what is dense as a file, too."""
    return max(1, min(published, int((memory - 2 * rest_bytes) // layer_bytes)))


class Work:
    def __init__(self, o: argparse.Namespace, results: Results) -> None:
        self.o, self.results = o, results
        self.ends = ExitStack()  # removes what was written
        self._began_s = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began_s:6.1f} s] {text}", flush=True)

    @property
    def left_s(self) -> float:
        return self.o.limit_s - (time.perf_counter() - self._began_s)

    def has_time(self, at: str) -> bool:
        if self.left_s > 0:
            return True
        self.results.fail(at, f"left out: the limit of {self.o.limit_s:g} s was reached")
        self.say(f"{at}: left out, {self.left_s:.0f} s are left")
        return False

    def failed(self, at: str, error: Exception) -> None:
        why = str(error) or f"{type(error).__name__}, {self.left_s:.0f} s before the limit"
        self.results.fail(at, why)
        self.say(f"{at}: {why}")

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
