"""How an expert's rows are dealt out to threads changes no bit of what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked import Asked
from packed_weights import random_records

from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.cpu.native import Library, NativeOps
from ftd.kernels.formats import ExpertLayout

reason = native.unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no C++ kernels: {reason}")

ISAS = [] if reason else [name for name, here in Library().isas().items() if here]
E, K, H, INNER = 4, 2, 256, 416
THREADS = (1, 2, 5)


@pytest.fixture(scope="module", params=ISAS)
def pools(request: pytest.FixtureRequest) -> Iterator[list[NativeOps]]:
    pools = [native.load(request.param, threads=threads) for threads in THREADS]
    yield pools
    for ops in pools:
        ops.close()


def answer(
    ops: NativeOps,
    layout: ExpertLayout,
    address: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    part: tuple[int, int],
) -> torch.Tensor:
    """[T * K, H]; NaN where nothing was asked."""
    asked = Asked(ops, layout, address, SILU, x, ids, part)
    assert asked.fault == 0
    return asked.y.view(-1, H)


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_threads_change_no_bit(pools, name, act):
    torch.manual_seed(5)
    layout, _records, address = random_records(name, H, INNER, E)
    whole, cut = (-1, 0), (2, (layout.parts - 1) * layout.part_rows)
    lone, several = torch.tensor([[2, -1]]), torch.tensor([[2, 0], [1, 2], [3, 0]])
    for ids, part in ((lone, whole), (lone, cut), (several, whole), (several, cut)):
        ids = ids.to(torch.int32)
        x = torch.randn(len(ids), H).to(act)
        one, *others = (answer(ops, layout, address, x, ids, part) for ops in pools)
        assert one[ids.flatten() >= 0].isfinite().all()
        for other in others:
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), (part, ids)
