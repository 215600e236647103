"""Reload an ftd of our own between two models many times, a request to each: what memory stays?

    python tools/bench_reloads.py MODEL OTHER --reloads 20 --device auto

Resident memory is the process's own; GPU memory is what the driver shows beyond what it showed
before ftd was started. Each model's last load is compared with its first by a reload; exit 1 beyond
``--most`` per cent. Further flags go to ftd.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_server import Started, running_ftd

from ftd.control.client import Client
from ftd.control.protocol import Reload
from ftd.units import MiB

SILENCE_S = 120.0
PROMPT = list(range(1, 200))


@dataclass(frozen=True)
class Memory:
    resident_bytes: int
    gpu_bytes: int


def gpu_used_bytes() -> int:
    """Of the first GPU, by whomever; 0 without one."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout) * MiB
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0


def pid_of(path: Path) -> int:
    """Of whoever listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", packed)[0])


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def ask(url: str) -> None:
    """Any model: token ids are as good as words."""
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


def measure(ftd: Started, models: Sequence[Path], reloads: int, gpu_before: int) -> list[Memory]:
    """After the start, and after each reload and the request to the new model."""
    found = []
    pid = pid_of(ftd.socket)
    for count in range(reloads + 1):
        if count:
            with Client(ftd.socket, timeout_s=SILENCE_S) as control:
                control.call(Reload(model=str(models[count % 2])))
        ask(ftd.url)
        found.append(Memory(resident_bytes(pid), gpu_used_bytes() - gpu_before))
    return found


def growth(found: Sequence[Memory]) -> dict[str, float]:
    """In per cent from a model's first load by a reload to its last; the larger of both models."""
    pairs = [(found[first], found[first:][::2][-1]) for first in (1, 2)]
    return {
        "resident": max(100 * (b.resident_bytes / a.resident_bytes - 1) for a, b in pairs),
        "GPU": max(100 * (b.gpu_bytes / a.gpu_bytes - 1) if a.gpu_bytes else 0.0 for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--reloads", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--most", type=float, default=2.0, help="per cent of growth")
    given, flags = parser.parse_known_args()
    models = [given.model.resolve(), given.other.resolve()]
    gpu_before = gpu_used_bytes()
    with running_ftd(models[0], ["--device", given.device, *flags]) as ftd:
        found = measure(ftd, models, max(3, given.reloads), gpu_before)
    print("| after reload | model | GPU | resident |\n| --- | --- | --- | --- |")
    last = len(found) - 1
    for count in sorted({0, 1, 2, 3, 10, last - 1, last} & set(range(last + 1))):
        memory = found[count]
        gpu, resident = memory.gpu_bytes / MiB, memory.resident_bytes / MiB
        print(f"| {count} | {models[count % 2].name} | {gpu:,.0f} MiB | {resident:,.1f} MiB |")
    grown = growth(found)
    print(", ".join(f"{name} {percent:+.1f} %" for name, percent in grown.items()))
    sys.exit(any(percent > given.most for percent in grown.values()))


if __name__ == "__main__":
    main()
