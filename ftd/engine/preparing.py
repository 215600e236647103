"""What can be known of a checkpoint from its headers: whether it can be served, and the plan.

Everything that can be refused is refused here, before a weight is read. ``ftd --check`` needs no
more than this, so nothing here needs torch itself unless there is a GPU to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from ftd.checkpoint.headers import (
    Checkpoint,
    check,
    dense_matrices,
    read_checkpoint,
    read_config,
)
from ftd.checkpoint.stored import StoredMatrix
from ftd.config import Config
from ftd.cuda.device import Verdict, choose_gpu, look_for_gpu
from ftd.cuda.memory import held_bytes
from ftd.kernels.formats import ExpertLayout
from ftd.memory import vram
from ftd.memory.machine import Gpu, Machine, own_bytes, read_machine
from ftd.memory.plan import MemoryPlan
from ftd.memory.planner import plan_memory
from ftd.model.architecture import Architecture
from ftd.model.registry import architecture_for
from ftd.model.spec import ModelSpec

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint whose headers are good, and the plan for it."""

    checkpoint: Checkpoint
    architecture: Architecture
    spec: ModelSpec
    layout: ExpertLayout
    dense: Mapping[str, StoredMatrix]
    machine: Machine
    plan: MemoryPlan


def prepare(
    path: Path,
    config: Config,
    machine: Machine | None = None,
    *,
    replacing: bool = False,
    look: Callable[[int], Verdict] = look_for_gpu,
) -> Prepared:
    """Read headers and plan the memory.

    Args:
        machine: as it will be; None: as it is now.
        replacing: what this process holds of the GPU will have been given back.
        look: at a GPU.

    Raises:
        CheckpointError, UnsupportedModel: the files cannot be served.
        BudgetExceeded, ConfigError: the settings do not fit model or machine.
    """
    architecture = architecture_for(read_config(path))  # first: no other family's files matter
    checkpoint = read_checkpoint(path)
    spec = architecture.spec(checkpoint.config, checkpoint.generation_config)
    layout = check(checkpoint, architecture, spec)
    dense = dense_matrices(checkpoint, architecture, spec)
    machine = machine or read_machine()
    verdict = choose_gpu(config.device, look)
    if verdict.gpu is None and config.device == "auto":
        log.info("device.cpu", reason=verdict.reason)
    gpu = verdict.gpu
    if gpu and replacing:
        gpu = _with_what_is_ours(gpu, gpu.free_bytes)
    dense_bytes = sum(matrix.num_bytes for matrix in dense.values())
    plan = plan_memory(spec, layout, dense_bytes, config, machine, gpu)
    return Prepared(checkpoint, architecture, spec, layout, dense, machine, plan)


def replanner(prepared: Prepared) -> Callable[[Config], MemoryPlan]:
    """``plan_memory`` of a loaded model as of now: what it holds counts as available."""
    plan = prepared.plan
    gpu = plan.vram.gpu if plan.vram else None
    machine = read_machine()
    machine = replace(machine, available_bytes=machine.available_bytes + own_bytes())
    if gpu:
        gpu = _with_what_is_ours(gpu, torch.cuda.mem_get_info(gpu.index)[0])
    spec, layout = prepared.spec, prepared.layout

    def planner(config: Config) -> MemoryPlan:
        config = replace(config, host_kv=0)  # as it is: it does not change while serving
        found = plan_memory(spec, layout, plan.dense_bytes, config, machine, gpu, plan)
        return replace(found, host_kv_bytes=plan.host_kv_bytes)

    return planner


def _with_what_is_ours(gpu: Gpu, free_bytes: int) -> Gpu:
    """What a budget may claim: besides what is free, all that it counts and this process has.

    Context, kernels and graphs stay whichever model is loaded, and no call tells their size: they
    count as much as in the plan.
    """
    ours = held_bytes(torch.device("cuda", gpu.index)) + vram.OVERHEAD_BYTES
    return replace(gpu, free_bytes=min(gpu.total_bytes, free_bytes + ours))
