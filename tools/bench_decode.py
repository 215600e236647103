#!/usr/bin/env python3
"""How near decoding on the CPU device comes to the machine's read bandwidth.

    python tools/bench_decode.py --model DIR [--steps 100] [--context 512]

A token has to read the active weights once: attention, routers, the chosen experts, the head. Steps
at batch 1 and plain reads of as many bytes by the same threads take turns, so whatever else the
machine does meets both; the share is the median over the pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from ftd.config import load_config
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.loading import load_core
from ftd.engine.preparing import prepare
from ftd.kernels.cpu.native import NativeOps
from ftd.model.decoder import Decoder
from ftd.model.spec import ModelSpec, MoeSpec


def active_bytes(spec: ModelSpec, record_bytes: int, weight_bytes: int = 2) -> int:
    """Bytes of weights that one token reads; norms and its own embedding row are left out."""
    total = spec.vocab * spec.hidden * weight_bytes
    for layer in spec.layers:
        a = layer.attention
        rows = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        total += rows * spec.hidden * weight_bytes
        if isinstance(layer.mlp, MoeSpec):
            total += layer.mlp.num_experts * spec.hidden * weight_bytes
            total += layer.mlp.experts_per_token * record_bytes
        else:
            total += 3 * layer.mlp.inner * spec.hidden * weight_bytes
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens before the steps")
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = {"model": str(args.model), "device": "cpu", "cpu_threads": args.threads}
    config = load_config(settings, {})
    prepared = prepare(args.model, config)
    core = load_core(config, prepared)
    model = core.model
    assert isinstance(model, Decoder)
    ops, head = model.head.ops, model.head.weight
    if not isinstance(ops, NativeOps):
        raise SystemExit("the C++ kernels are not built: there is nothing to compare")
    spec = prepared.spec
    num_bytes = active_bytes(spec, prepared.layout.payload_bytes)
    head_bytes = head.numel() * head.element_size()
    rng = random.Random(0)
    prompt = tuple(rng.randrange(spec.vocab) for _ in range(args.context))
    core.add(EngineRequest("bench", prompt, args.steps + 16, Sampling(temperature=1.0, seed=1)))
    while core.status().output_tokens == 0:  # the prompt
        core.step()
    step_s, read_s = [], []
    for _ in range(args.steps):
        began_s = time.perf_counter()
        core.step()
        step_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        left = num_bytes
        while left > 0:
            ops.read(torch.tensor([head.data_ptr()]), min(left, head_bytes))
            left -= head_bytes
        read_s.append(time.perf_counter() - began_s)
    shares = [read / step for read, step in zip(read_s, step_s, strict=True)]
    tenths = quantiles(shares, n=10)
    found = {
        "model": args.model.name,
        "kernels": core.kernels,
        "threads": ops.pool.threads,
        "active_bytes": num_bytes,
        "step_ms_p50": round(1e3 * median(step_s), 2),
        "tokens_per_s": round(1 / median(step_s), 1),
        "read_gb_per_s": round(num_bytes / median(read_s) / 1e9, 1),
        "share_p50": round(median(shares), 3),
        "share_p10": round(tenths[0], 3),
        "share_p90": round(tenths[-1], 3),
    }
    core.close()
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:16} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
