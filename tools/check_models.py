"""Checks each family in each format it is published in against transformers; writes docs/models.md.

    python tools/check_models.py [FAMILY ...] [--out docs/models.md]

For each family and format the oracle generator (it needs ``pip install -e '.[reference]'``) writes
a tiny checkpoint into a temporary folder, spelled as published, with what transformers computes
from it in float32. Then, in float32 on the CPU device, with the C++ kernels and with torch:

- logits, hidden states and the choice of experts of all prompts, as one prefill, token by token and
  in uneven chunks: within the oracle's tolerances, and equal to each other bit for bit;
- greedy continuations of 32 tokens; the chat template and its token ids;
- the same with NaN in every tensor that text generation must not read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ftd.checkpoint.headers import read_checkpoint
from ftd.config import load_config
from ftd.errors import CheckpointError, FtdError, UnsupportedModel
from ftd.kernels.cpu import native
from ftd.kernels.formats import FORMATS, ExpertLayout, expert_layout
from ftd.kernels.ops import Ops
from ftd.kernels.reference import TorchOps
from ftd.memory.machine import Gpu, Machine
from ftd.memory.plan import MemoryPlan
from ftd.memory.planner import plan_memory
from ftd.model.registry import ARCHITECTURES, architecture_for
from ftd.model.spec import ModelSpec, MoeSpec
from ftd.text.messages import normalise
from ftd.text.textmodel import TextModel
from ftd.units import GiB, MiB

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "model"), str(ROOT / "tests" / "oracles")]

from against_oracle import check_prompt  # noqa: E402
from lone_model import LoneModel  # noqa: E402
from oracle_check import Oracle, OracleMismatch  # noqa: E402

SEED = 1
CONTEXT = 32768  # tokens of KV for which the least memory is told
CHUNKS = (5, 1, 2, 19, 16, 2, 33, 1)
REFUSED, FAILED = "refused", "**failed**"
BEGIN, END = "<!-- made by tools/check_models.py -->", "<!-- end -->"
# what the generator calls a format → what docs/models.md calls it
COLUMNS = {
    "none": "bf16",
    "fp8": "FP8 tiles",
    "fp8-ct": "FP8 rows",
    "mxfp4": "MXFP4 stacked",
    "nvfp4": "NVFP4 ModelOpt",
    "nvfp4-ct": "NVFP4 c-t",
    "int4-ct": "int4 c-t",
    "gptq": "GPTQ",
    "awq": "AWQ",
}


def check(directory: Path, ops: Ops) -> float:
    """Everything the oracle knows of a checkpoint; the largest error of a logit.

    Raises:
        OracleMismatch: the first difference that is too large.
    """
    oracle, worst = Oracle(directory), 0.0
    model = LoneModel(directory, ops)
    if list(model.spec.moe_layers) != oracle.moe_layers:
        raise OracleMismatch(f"layers {model.spec.moe_layers} have experts: {oracle.moe_layers}")
    for prompt in oracle.prompts:
        ways = {}
        for way, chunks in {"prefill": (), "decode": [1] * 999, "chunks": CHUNKS}.items():
            ways[way] = check_prompt(oracle, prompt, model, chunks)
            worst = max(worst, oracle.check_logits(prompt, ways[way]))
        if not all(torch.equal(logits, ways["prefill"]) for logits in ways.values()):
            raise OracleMismatch(f"{prompt.name}: chunks change bits")
        oracle.check_greedy(prompt, model.greedy(prompt.ids, len(prompt.greedy)))
    _check_text(directory, oracle)
    _check_ignored(directory, oracle, ops)
    return worst


def _check_text(directory: Path, oracle: Oracle) -> None:
    text, chat = TextModel(directory), oracle.info["chat"]
    if text.render(normalise(chat["messages"])) != chat["rendered"]:
        raise OracleMismatch("the chat template gives another text")
    if text.encode(chat["rendered"], special_tokens=True) != chat["ids"]:
        raise OracleMismatch("the tokenizer gives other ids")


def _check_ignored(directory: Path, oracle: Oracle, ops: Ops) -> None:
    """Tensors that must not influence the output may hold anything."""
    copy = directory.with_name(f"{directory.name}-ignored")
    shutil.copytree(directory, copy)
    checkpoint = read_checkpoint(copy)
    for tensor in (checkpoint.tensors[name] for name in oracle.info["ignored_tensors"]):
        with tensor.file.open("r+b") as file:
            file.seek(tensor.begin)
            file.write(b"\xff" * tensor.nbytes)  # NaN in every float
    prompt = oracle.prompts[0]
    oracle.check_logits(prompt, LoneModel(copy, ops).run(prompt.sequence))
    shutil.rmtree(copy)


def cell(generator: Any, family: str, fmt: str, kernels: list[Ops]) -> str:
    """What the table says of a family in a format."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        built = generator.build(family, SEED, Path(scratch), fmt, [])
        directory = Path(built["directory"])
        try:
            said = f"{max(check(directory, ops) for ops in kernels):.0e}"
        except UnsupportedModel as e:
            print(f"{family} {fmt}: {e}")
            return REFUSED
        except (OracleMismatch, CheckpointError) as e:
            print(f"{family} {fmt}: {e}")
            return FAILED
    print(f"{family} {fmt}: {said} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return said


def matrix(generator: Any, families: list[str], kernels: list[Ops]) -> Iterator[str]:
    quant = sys.modules["tiny_quant"]
    yield "| family | " + " | ".join(COLUMNS.values()) + " |"
    yield "| --- |" + " --- |" * len(COLUMNS)
    for family in families:
        cells = [
            cell(generator, family, fmt, kernels) if quant.supports(fmt, family) else ""
            for fmt in COLUMNS
        ]
        yield f"| `{family}` | " + " | ".join(cells) + " |"


def releases() -> Iterator[str]:
    """Memory that published checkpoints need, computed from their config.json."""
    yield (
        "| checkpoint | family | weights | of it dense | KV of 1,000 tokens "
        "| host memory | least GPU memory |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    published = json.loads((ROOT / "tests" / "data" / "releases.json").read_text())
    for name, release in published.items():
        architecture = architecture_for(release["config"])
        spec = architecture.spec(release["config"])
        dense = 2 * sum(map(_product, architecture.dense_tensors(spec).values()))
        for fmt, suffix in release["formats"].items():
            layout = layout_of(spec, fmt)
            total = dense + layout.record_bytes * num_experts(spec)
            vram, plan = least_memory(spec, layout, dense)
            ram = plan.pool_bytes + dense + plan.headroom_bytes
            kv_bytes = 1000 * plan.page_bytes / plan.page_tokens
            yield (
                f"| {name}{suffix} | `{spec.model_type}`, {fmt} | {total / GiB:.1f} GiB "
                f"| {dense / GiB:.1f} GiB | {kv_bytes / MiB:.0f} MiB "
                f"| {ram / GiB:.0f} GiB | {vram / GiB:.1f} GiB |"
            )


def moe(spec: ModelSpec) -> MoeSpec:
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp


def num_experts(spec: ModelSpec) -> int:
    return moe(spec).num_experts * len(spec.moe_layers)


def layout_of(spec: ModelSpec, fmt: str) -> ExpertLayout:
    return expert_layout(FORMATS[fmt], spec.hidden, moe(spec).inner, bias=moe(spec).bias)


def least_memory(spec: ModelSpec, layout: ExpertLayout, dense_bytes: int) -> tuple[int, MemoryPlan]:
    """Bytes of a GPU that holds ``CONTEXT`` tokens of KV, and the plan for it.

    With so little nearly every expert stays in host memory: more of the GPU is faster.
    """
    plenty = 4096 * GiB
    machine = Machine(16, plenty, plenty, "the machine", (0,), "always")
    gpu = Gpu(0, "GPU", "", (9, 0), total_bytes=plenty, free_bytes=plenty)

    def plan(vram: int) -> MemoryPlan:
        flags = {"model": "model", "kv_tokens": str(CONTEXT), "vram": str(vram)}
        return plan_memory(spec, layout, dense_bytes, load_config(flags, {}), machine, gpu)

    low, high = 0, 512 * GiB
    while high - low > 64 * MiB:
        middle = (low + high) // 2
        try:
            plan(middle)
            high = middle
        except FtdError:
            low = middle
    return high, plan(high)


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def write(out: Path, parts: list[list[str]]) -> None:
    """Put the tables between the marks of the page, in order; the last ones, if there are fewer."""
    pieces = out.read_text().split(BEGIN)
    kept = len(pieces) - len(parts)
    assert kept > 0, f"{out} has {len(pieces) - 1} places for a table"
    text = BEGIN.join(pieces[:kept])
    for lines, piece in zip(parts, pieces[kept:], strict=True):
        text += "\n".join((BEGIN, "", *lines, "", END)) + piece.split(END, 1)[1]
    out.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="default: all that ftd serves")
    parser.add_argument("--out", type=Path, help="the page to write, with all families")
    parser.add_argument("--sizes", action="store_true", help="the second table alone: no checks")
    arguments = parser.parse_args()
    if arguments.sizes:
        sizes = list(releases())
        print("\n".join(sizes))
        if arguments.out:
            write(arguments.out, [sizes])
        return
    if arguments.out and arguments.families:
        parser.error("a page is written of all families: name none")
    sys.path.insert(0, str(ROOT / "tests" / "oracles" / "generator"))
    import make_tiny
    import tiny_archs

    torch.set_num_threads(1)
    served = [f for f, a in tiny_archs.ARCHS.items() if a.config["model_type"] in ARCHITECTURES]
    compiled = native.load()
    if compiled is None:
        parser.error(f"the C++ kernels are to be checked, too: {native.unavailable_reason()}")
    try:
        parts = [
            list(matrix(make_tiny, arguments.families or served, [TorchOps(), compiled])),
            list(releases()),
        ]
    finally:
        compiled.close()
    for line in (line for part in parts for line in part):
        print(line)
    if arguments.out:
        write(arguments.out, parts)
    sys.exit(any(FAILED in line for line in parts[0]))


if __name__ == "__main__":
    main()
