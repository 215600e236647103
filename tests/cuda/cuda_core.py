"""An EngineCore built of the CUDA device's parts, on CPU tensors or on a GPU.

On the CPU device a captured graph is a call, a copy is done when it returns, and ranges are plain
allocations: everything but the GPU itself is the code that serves.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ftd.checkpoint.load import load_weights
from ftd.config import load_config
from ftd.cuda.cpu_experts import CpuExperts
from ftd.cuda.experts import CudaExperts
from ftd.cuda.graphs import BATCHES
from ftd.cuda.host_pages import PinnedPages
from ftd.cuda.kv import CudaKvCache
from ftd.cuda.memory import DeviceMemory
from ftd.cuda.states import CudaStates, CudaWindowStates
from ftd.engine.benches import on_gpu
from ftd.engine.core import EngineCore
from ftd.engine.cuda_runner import CudaRunner
from ftd.engine.preparing import prepare
from ftd.experts.host_pool import HostPool
from ftd.kernels.cpu import native
from ftd.kernels.reference import TorchOps
from ftd.kv.host import HostTier
from ftd.kv.states import LIVE_STATES
from ftd.kv.window_cache import WindowPages
from ftd.schedule.policy import Limits


@contextmanager
def cuda_core(
    path: Path, *, slots=0, staging=4, pinned=True, num_pages=None, dtype=torch.float32,
    device="cpu", ops=None, cu=None, max_pages=None, fetch_of=None,
    deadline_s=10.0, host_pages=0, kv_cache=CudaKvCache, **settings,
):  # fmt: skip
    """``slots``: at most those of all experts, which None stands for."""
    flags = {name: str(value) for name, value in settings.items()}
    config = load_config({"model": str(path), "device": "cpu", "dtype": "float32", **flags}, {})
    prepared = prepare(path, config)
    spec, plan, layout = prepared.spec, prepared.plan, prepared.layout
    device = torch.device(device)
    with ExitStack() as undo:
        experts_per_layer = spec.layers[spec.moe_layers[0]].mlp.num_experts
        every_expert = len(spec.moe_layers) * experts_per_layer
        slots = every_expert if slots is None else min(slots, every_expert)
        pool = HostPool(len(spec.moe_layers), experts_per_layer, layout, spec.moe_layers)
        undo.callback(pool.close)
        weights = load_weights(
            prepared.checkpoint, prepared.architecture, spec, pool, lambda *_: None, lambda: False
        )
        if device.type == "cuda":
            from ftd.cuda.pinned import register

            registration = register(pool, device)
            undo.callback(registration.close)
            pinned = pinned and registration.pinned
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        ops = ops or native.load() or TorchOps()
        model = prepared.architecture.build(spec, weights, ops, dtype)
        memory = DeviceMemory(device, *((4096, cu) if cu else ()))
        pages = num_pages or plan.num_pages
        pinned_pages = PinnedPages(host_pages, plan.page_bytes, device, piece_bytes=2**18)
        undo.callback(pinned_pages.close)
        windows = None
        if plan.windowing:
            windows = WindowPages(
                plan.windowing, plan.num_window_pages, plan.page_tokens, dtype, device
            )
        kv = kv_cache(spec, pages, plan.page_tokens, dtype, memory, max_pages, windows)
        undo.callback(kv.close)
        if windows:
            kv.states = CudaWindowStates(windows.windowing, plan.num_states, dtype, device)
            undo.callback(kv.states.close)
        elif plan.num_states:
            live = LIVE_STATES * config.max_running
            kv.states = CudaStates(spec, live, plan.num_states - live, dtype, memory)
            undo.callback(kv.states.close)
        cpu = None
        if fetch_of is not None:  # misses beyond it are the CPU's
            cpu_ops = native.load(threads=2)
            undo.callback(cpu_ops.close)
            address = torch.stack([pool.addresses(layer) for layer in spec.moe_layers])
            moe = spec.layers[spec.moe_layers[0]].mlp
            cpu = CpuExperts(
                cpu_ops, address, layout, moe.activation, dtype, BATCHES[-1],
                moe.experts_per_token, pin=device.type == "cuda", deadline_s=deadline_s,
                stuck=config.fault.stuck,
            )  # fmt: skip
            undo.callback(cpu.close)
        experts = CudaExperts(
            spec, layout, pool, ops, memory,
            num_slots=slots, num_staging=staging, cpu=cpu, pinned=pinned,
        )  # fmt: skip
        undo.callback(experts.close)
        if fetch_of is not None:
            experts.division.split([fetch_of] * 4)
        experts.fill_slots()
        runner = CudaRunner(
            model,
            kv,
            experts,
            device,
            -(-plan.context_tokens // plan.page_tokens),
            plan.prefill_chunk,
            capture=pinned,
            most_rows=config.max_running,
        )
        runner.warm_up(lambda done, total: None)
        core = EngineCore(
            model, kv, experts, runner,
            Limits(config.max_running, plan.prefill_chunk, pages, plan.page_tokens),
            host=HostTier(pinned_pages, kv, plan.page_tokens) if host_pages else None,
        )  # fmt: skip
        core.steps.profiling = on_gpu(config, prepared, pool, dtype, experts, runner)
        yield core
