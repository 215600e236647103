"""From a plan to a running engine: read weights, start the thread.

Blocking; meant for a thread of its own. Whatever can be refused has been, by ``preparing``: only
reading can fail.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from ftd.checkpoint.identity import checkpoint_digest
from ftd.checkpoint.load import load_weights
from ftd.config import Config
from ftd.cuda.cpu_experts import CpuExperts
from ftd.cuda.experts import CudaExperts
from ftd.cuda.graphs import BATCHES
from ftd.cuda.host_pages import PinnedPages
from ftd.cuda.kv import CudaKvCache
from ftd.cuda.memory import DeviceMemory
from ftd.cuda.pinned import register
from ftd.cuda.states import CudaStates, CudaWindowStates
from ftd.engine.api import EngineLimits
from ftd.engine.benches import on_cpu, on_gpu, tune_cpu
from ftd.engine.core import EngineCore
from ftd.engine.cuda_runner import CudaRunner
from ftd.engine.preparing import Prepared
from ftd.engine.profiling import Profiling
from ftd.engine.runner import CpuRunner, Runner
from ftd.engine.steps import StepExperts
from ftd.engine.thread import EngineThread
from ftd.errors import CheckpointError, NotReady
from ftd.experts.host_pool import HostPool
from ftd.experts.runtime import ExpertRuntime
from ftd.kernels.cpu import native
from ftd.kernels.cpu.library import unavailable_reason
from ftd.kernels.cpu.topology import default_threads, usable_cores
from ftd.kernels.formats import Matrix
from ftd.kernels.ops import Ops
from ftd.kernels.reference import TorchOps
from ftd.kv.cache import KvCache
from ftd.kv.disk import DiskStore, try_directory
from ftd.kv.host import HostTier
from ftd.kv.state_cache import StateCache
from ftd.kv.window_cache import WindowPages, WindowStates
from ftd.memory import vram
from ftd.memory.needs import act_dtype
from ftd.memory.plan import MemoryPlan
from ftd.model.architecture import Model
from ftd.model.spec import ModelSpec, MoeSpec
from ftd.schedule.policy import Limits

log = structlog.get_logger(__name__)

PARK_BESIDE_GPU_US = 1000  # of workers: some layers ask nothing, and waking takes 50 µs

_loads = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    handle: EngineThread
    spec: ModelSpec
    plan: MemoryPlan
    kernels: str  # what computes: an instruction set, or "torch"
    most_pages: int  # the KV cache can grow to


def load_engine(
    config: Config,
    prepared: Prepared,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> LoadedEngine:
    """Read the weights and start an engine on a thread of its own.

    Args:
        progress: called with bytes done and in all.
        cancelled: asked between reads; true ends the load with NotReady.
    Raises:
        CheckpointError: a file changed or could not be read.
        BudgetExceeded: the system refuses the memory that was planned.
    """
    began_s = time.monotonic()
    core = load_core(config, prepared, progress, cancelled)
    most_pages = core.kv.max_pages
    spec, plan = prepared.spec, prepared.plan
    limits = EngineLimits(
        context_tokens=plan.context_tokens,
        pool_tokens=plan.kv_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        vocab=spec.vocab,
        trained_tokens=spec.context,
    )
    log.info(
        "engine.loaded",
        model_type=spec.model_type,
        kernels=core.kernels,
        load_s=round(time.monotonic() - began_s, 3),
        weights_bytes=plan.dense_bytes + plan.pool_bytes,
        kv_tokens=plan.kv_tokens,
        slots=plan.num_slots,
    )
    return LoadedEngine(EngineThread(core, limits), spec, plan, core.kernels, most_pages)


def load_core(
    config: Config,
    prepared: Prepared,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EngineCore:
    """``load_engine`` without the thread: the caller drives the steps."""
    spec, plan, layout = prepared.spec, prepared.plan, prepared.layout
    if config.anchor_dir is not None:
        try_directory(config.anchor_dir)
    with ExitStack() as undo:  # what a failed load has taken; a good one hands it to the core
        pool = HostPool(
            len(spec.moe_layers),
            _moe(spec).num_experts,
            layout,
            spec.moe_layers,
            nodes=prepared.machine.numa_nodes or (0,),
            available_bytes=prepared.machine.available_bytes,
        )
        undo.callback(pool.close)
        threads = None if config.load_threads == "auto" else config.load_threads
        kernels = None
        if plan.vram is not None:  # triton takes a second to import
            args = spec.vocab, torch.device("cuda", plan.vram.gpu.index)
            kernels = threading.Thread(
                target=_prepare_kernels, args=args, name="ftd-kernels", daemon=True
            )
            kernels.start()
            undo.callback(kernels.join)
        began_s = time.monotonic()
        weights = load_weights(
            prepared.checkpoint,
            prepared.architecture,
            spec,
            pool,
            progress,
            cancelled,
            threads=threads,
        )
        num_bytes, read_s = plan.dense_bytes + plan.pool_bytes, time.monotonic() - began_s
        log.info("weights.read", bytes=num_bytes, read_s=round(read_s, 2))
        _refuse_if(cancelled)
        if config.fault.load:
            _inject_load_fault(config.fault.load)
        if kernels is None:
            parts = _on_cpu(config, prepared, pool, weights, undo)
        else:
            parts = _on_gpu(config, prepared, pool, weights, undo, kernels)
        _refuse_if(cancelled)
        core = EngineCore(
            parts.model,
            parts.kv,
            parts.experts,
            parts.runner,
            Limits(config.max_running, plan.prefill_chunk, plan.num_pages, plan.page_tokens),
            kernels=parts.kernels,
            fault=config.fault,
            host=parts.host,
            close=undo.pop_all().close,
        )
    try:
        core.warm_up()
        core.steps.profiling = parts.profiling
        parts.profiling.start()
        if config.anchor_dir is not None:
            core.keep_on_disk(_disk_store(config, config.anchor_dir, prepared, core))
        _refuse_if(cancelled)
    except BaseException:
        core.close()
        raise
    return core


def _disk_store(config: Config, path: Path, prepared: Prepared, core: EngineCore) -> DiskStore:
    dtype = act_dtype(config, prepared.spec)
    try:
        model = checkpoint_digest(prepared.checkpoint, dtype, core.kv.page_tokens)
    except OSError as error:
        raise CheckpointError(f"the weights cannot be read again: {error}") from error
    states = core.held.recurrence.pool
    return DiskStore(path, model, config.anchor_bytes, core.kv, core.pages, states=states)


def _prepare_kernels(vocab: int, device: torch.device) -> None:
    """While the disk is read. Whoever needs what cannot be had fails as this did, and says so."""
    with suppress(ImportError, RuntimeError):
        import ftd.kernels.triton.ops  # noqa: F401
        from ftd.cuda.sampling import load_kernels

        torch.cuda.set_device(device)
        load_kernels(vocab, device)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What differs between the devices."""

    kernels: str
    model: Model
    kv: KvCache
    experts: StepExperts
    runner: Runner
    profiling: Profiling
    host: HostTier | None = None


def _on_cpu(
    config: Config,
    prepared: Prepared,
    pool: HostPool,
    weights: dict[str, Matrix],
    undo: ExitStack,
) -> _Parts:
    spec, plan = prepared.spec, prepared.plan
    dtype = getattr(torch, act_dtype(config, spec))
    ops = _ops(config, pool, undo)
    model = prepared.architecture.build(spec, weights, ops, dtype)
    most_pages = prepared.machine.total_bytes * plan.num_pages // plan.kv_bytes
    windows = _window_pages(plan, dtype, "cpu", undo)
    most_pages = max(plan.num_pages, most_pages)
    kv = KvCache(spec, plan.num_pages, plan.page_tokens, dtype, most_pages, windows)
    undo.callback(kv.close)
    if windows:
        kv.states = WindowStates(windows.windowing, plan.num_states, dtype)
        undo.callback(kv.states.close)
    elif plan.num_states:
        kv.states = StateCache(spec, plan.num_states, dtype)
        undo.callback(kv.states.close)
    experts = ExpertRuntime(spec, prepared.layout, pool, ops, plan.num_slots)
    undo.callback(experts.close)
    tune_cpu(config, prepared, pool, dtype, ops)
    profiling = on_cpu(config, prepared, pool, dtype, ops, experts)
    return _Parts(ops.name, model, kv, experts, CpuRunner(model, kv), profiling)


def _window_pages(
    plan: MemoryPlan, dtype: torch.dtype, device: torch.device | str, undo: ExitStack
) -> WindowPages | None:
    if plan.windowing is None:
        return None
    pages = WindowPages(plan.windowing, plan.num_window_pages, plan.page_tokens, dtype, device)
    undo.callback(pages.close)
    return pages


def _on_gpu(
    config: Config,
    prepared: Prepared,
    pool: HostPool,
    weights: dict[str, Matrix],
    undo: ExitStack,
    kernels: threading.Thread,
) -> _Parts:
    spec, plan = prepared.spec, prepared.plan
    assert plan.vram is not None
    dtype = getattr(torch, act_dtype(config, spec))
    device = torch.device("cuda", plan.vram.gpu.index)
    torch.set_num_threads(1)  # what the CPU computes beside the GPU is small
    torch.cuda.set_device(device)
    undo.callback(torch.cuda.empty_cache)
    began_s = time.monotonic()
    all_resident = plan.num_slots == plan.num_experts
    registration = register(pool, device)
    undo.callback(registration.close)
    if not registration.pinned:
        log.warning(
            "pool.not_pinned",
            reason=registration.reason,
            cost="every missed expert is copied before it is used: several times slower decoding",
            hint="raise the limit on locked memory (ulimit -l, LimitMEMLOCK)",
        )
    pinned_s = time.monotonic()
    for name in list(weights):  # one at a time: host memory goes as the GPU's comes
        weights[name] = weights[name].to(device)
    kernels.join()
    from ftd.kernels.triton.ops import CudaOps  # triton is there only where a GPU is usable

    ops = CudaOps()
    model = prepared.architecture.build(spec, weights, ops, dtype)
    torch.cuda.empty_cache()  # the parts of matrices that were joined: gigabytes, in all layers
    memory = DeviceMemory(device)
    host_pages = plan.host_kv_bytes // plan.page_bytes
    pinned = PinnedPages(host_pages, plan.page_bytes, device) if host_pages else None
    if pinned:
        undo.callback(pinned.close)
    most_pages = plan.vram.budget_bytes // plan.page_bytes
    windows = _window_pages(plan, dtype, device, undo)
    kv = CudaKvCache(
        spec,
        plan.num_pages,
        plan.page_tokens,
        dtype,
        memory,
        max(plan.num_pages, most_pages),
        windows,
    )
    undo.callback(kv.close)
    if windows:
        kv.states = CudaWindowStates(windows.windowing, plan.num_states, dtype, device)
        undo.callback(kv.states.close)
    elif plan.num_states:
        live = plan.vram.num_states
        kv.states = CudaStates(spec, live, plan.num_states - live, dtype, memory)
        undo.callback(kv.states.close)
    cpu = _cpu_experts(config, prepared, pool, dtype, undo) if registration.pinned else None
    experts = CudaExperts(
        spec,
        prepared.layout,
        pool,
        ops,
        memory,
        num_slots=plan.num_slots,
        cpu=cpu,
        # unpinned, what is not resident has no other way
        num_staging=max(plan.vram.staging_records, 0 if registration.pinned or all_resident else 1),
        pinned=registration.pinned,
    )
    undo.callback(experts.close)
    experts.fill_slots()
    filled_s = time.monotonic()
    most_pages = -(-plan.context_tokens // plan.page_tokens)
    capture = registration.pinned or all_resident
    runner = CudaRunner(
        model,
        kv,
        experts,
        device,
        most_pages,
        plan.prefill_chunk,
        capture=capture,
        # with little memory experts are never all resident, and those graphs would only take room
        variants=(True, False) if vram.could_hold_all(plan.vram, plan.pool_bytes) else (True,),
        most_rows=config.max_running,
    )
    undo.callback(runner.close)
    runner.warm_up(lambda done, total: log.info("graphs.captured", done=done, total=total))
    ready_s = time.monotonic()
    free, total = torch.cuda.mem_get_info(device)
    log.info(
        "gpu.ready",
        gpu=plan.vram.gpu.name,
        pin_s=round(pinned_s - began_s, 2),
        fill_s=round(filled_s - pinned_s, 2),
        capture_s=round(ready_s - filled_s, 2),
        used_bytes=total - free,
        planned_bytes=plan.vram.total_bytes,
    )
    host = HostTier(pinned, kv, plan.page_tokens) if pinned else None
    profiling = on_gpu(config, prepared, pool, dtype, experts, runner)
    name = f"triton on {plan.vram.gpu.name}"
    return _Parts(name, model, kv, experts, runner, profiling, host)


def _cpu_experts(
    config: Config, prepared: Prepared, pool: HostPool, dtype: torch.dtype, undo: ExitStack
) -> CpuExperts | None:
    """The CPU's part in captured steps; None without the C++ kernels: says so, once."""
    threads = None if config.cpu_threads == "auto" else config.cpu_threads
    ops = native.load(config.cpu_isa, threads, park_after_us=PARK_BESIDE_GPU_US)
    if ops is None:
        log.warning(
            "kernels.missing",
            reason=unavailable_reason(),
            cost="every missed expert goes over the link: about a quarter slower decoding",
        )
        return None
    undo.callback(ops.close)
    for address, num_bytes, node in pool.node_ranges():
        ops.pool.place(address, num_bytes, node)
    moe = _moe(prepared.spec)
    if prepared.plan.num_slots < prepared.plan.num_experts:
        tune_cpu(config, prepared, pool, dtype, ops)
    records = torch.stack([pool.addresses(layer) for layer in prepared.spec.moe_layers])
    cpu = CpuExperts(
        ops,
        records,
        prepared.layout,
        moe.activation,
        dtype,
        BATCHES[-1],
        moe.experts_per_token,
        pin=True,
        stuck=config.fault.stuck,
    )
    undo.callback(cpu.close)
    return cpu


def _moe(spec: ModelSpec) -> MoeSpec:
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp


def _inject_load_fault(nth: int) -> None:
    """Fail the n-th load since the process started, as ``--fault load:N`` asks."""
    if next(_loads) == nth:
        raise CheckpointError(f"load {nth} failed, as --fault asked")


def _refuse_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise NotReady("loading was given up", retry_after_s=5)


def _ops(config: Config, pool: HostPool, undo: ExitStack) -> Ops:
    """The C++ kernels, or torch where they are missing; says which, once."""
    # Whatever torch itself still computes is small: its threads would only fight the pool's.
    torch.set_num_threads(1)
    threads = None if config.cpu_threads == "auto" else config.cpu_threads
    ops = native.load(config.cpu_isa, threads)
    if ops is None:
        torch.set_num_threads(threads or default_threads(usable_cores()))
        log.warning(
            "kernels.missing",
            reason=unavailable_reason(),
            cost="torch computes the experts: a third of the speed or less",
        )
        return TorchOps()
    undo.callback(ops.close)
    for address, num_bytes, node in pool.node_ranges():
        ops.pool.place(address, num_bytes, node)
    return ops
