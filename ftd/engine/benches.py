"""The bench that measures a loaded model's experts on its device, and what obeys the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import torch

from ftd.config import Config
from ftd.cuda.bench import CudaBench
from ftd.cuda.experts import CudaExperts
from ftd.engine.cuda_runner import CudaRunner
from ftd.engine.profiling import Profiling
from ftd.experts.cpu_bench import CpuBench
from ftd.experts.host_pool import HostPool
from ftd.experts.profile import Key
from ftd.experts.profile_store import ProfileStore
from ftd.experts.runtime import ExpertRuntime
from ftd.kernels.cpu.calibration import calibrate
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.ops import Ops
from ftd.memory.machine import processor_name
from ftd.model.spec import ModelSpec, MoeSpec
from ftd.units import MiB

if TYPE_CHECKING:
    from ftd.engine.preparing import Prepared

log = structlog.get_logger(__name__)

TUNE_FROM_BYTES = 512 * MiB  # a smaller pool tells nothing of prefetching, and needs none
TUNE_S = 0.4


def on_cpu(
    config: Config,
    prepared: Prepared,
    pool: HostPool,
    act: torch.dtype,
    ops: Ops,
    experts: ExpertRuntime,
) -> Profiling:
    """Where an expert is makes no difference in speed here: for people, and for the simulator."""
    bench = _cpu_bench(prepared, pool, act, ops)
    return Profiling(bench, experts, ProfileStore(config.profile_dir), calibrates=False)


def on_gpu(
    config: Config,
    prepared: Prepared,
    pool: HostPool,
    act: torch.dtype,
    experts: CudaExperts,
    runner: CudaRunner,
) -> Profiling:
    spec, plan = prepared.spec, prepared.plan
    division, cpu = experts.division, experts.division.cpu
    bench = CudaBench(
        _key(prepared, cpu.ops if cpu else None),
        division,
        prepared.layout,
        torch.stack([pool.addresses(layer) for layer in spec.moe_layers]),
        division.shared.address.device,
        act,
        experts.experts_per_token,
        pinned=experts.pinned,
        gpu_name=plan.vram.gpu.name if plan.vram else "",
        cpu=_cpu_bench(prepared, pool, act, cpu.ops) if cpu else None,
        resident=experts.resident_addresses,
        step=runner.launch_empty,
        layers=len(spec.layers),
    )
    divides = cpu is not None and plan.num_slots < plan.num_experts
    return Profiling(bench, experts, ProfileStore(config.profile_dir), calibrates=divides)


def tune_cpu(
    config: Config, prepared: Prepared, pool: HostPool, act: torch.dtype, ops: Ops
) -> None:
    """Set how far ahead the C++ kernels ask for weights, where the pool is larger than the caches.

    As the stored profile says, or as some trying finds.
    """
    if not isinstance(ops, NativeOps) or pool.num_bytes < TUNE_FROM_BYTES:
        return
    known = ProfileStore(config.profile_dir).find(_key(prepared, ops))
    if known and known.prefetch_bytes:
        ops.set_prefetch(prepared.layout, *known.prefetch_bytes)
        log.info("kernels.tuned", prefetch_bytes=known.prefetch_bytes)
        return
    addresses = torch.cat([pool.addresses(layer) for layer in prepared.spec.moe_layers])
    of = _moe(prepared.spec).experts_per_token
    found = calibrate(ops, prepared.layout, addresses, act, of, TUNE_S)
    log.info(
        "kernels.calibrated",
        prefetch_bytes=found.prefetch_bytes,
        expert_gb_per_s=[round(rate / 1e9, 1) for rate in found.expert_bytes_per_s],
        read_gb_per_s=round(found.read_bytes_per_s / 1e9, 1),
    )


def _cpu_bench(prepared: Prepared, pool: HostPool, act: torch.dtype, ops: Ops) -> CpuBench:
    moe = _moe(prepared.spec)
    return CpuBench(
        _key(prepared, ops),
        ops,
        prepared.layout,
        torch.cat([pool.addresses(layer) for layer in prepared.spec.moe_layers]),
        act,
        moe.experts_per_token,
        moe.activation,
    )


def _key(prepared: Prepared, ops: Ops | None) -> Key:
    vram, layout = prepared.plan.vram, prepared.layout
    threads = torch.get_num_threads() if ops else 0
    return Key(
        gpu=vram.gpu.uuid if vram else "",
        cpu=processor_name(),
        threads=ops.pool.threads if isinstance(ops, NativeOps) else threads,
        experts=f"{layout.format_name} {layout.hidden}x{layout.inner}",
    )


def _moe(spec: ModelSpec) -> MoeSpec:
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp
