"""Dense matrices in scaled formats against TorchOps."""

from __future__ import annotations

import pytest
import torch
from packed_weights import ENCODERS, random_matrix

pytest.importorskip("triton")

from ftd.kernels.reference import TorchOps
from ftd.kernels.triton.ops import CudaOps

F32, BF16 = torch.float32, torch.bfloat16
LIMIT = {F32: 2e-6, BF16: 8e-3}
reference, ops = TorchOps(), CudaOps()


@pytest.mark.parametrize(("T", "act"), [(1, BF16), (5, F32), (9, F32), (20, BF16)], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_matches_the_reference(name, T, act):
    torch.manual_seed(5)
    weight, _ = random_matrix(name, 150, 160)
    x, bias = torch.randn(T, 160).to(act), torch.randn(150).to(act)
    for out_dtype in (act, F32):
        given = bias if out_dtype == act else None
        mine = ops.linear(x, weight, given, out_dtype)
        expected = reference.linear(x, weight, given, out_dtype)
        assert mine.dtype == out_dtype
        error = (mine.float() - expected.float()).abs().max()
        assert error <= LIMIT[out_dtype] * expected.float().abs().max()


def test_no_rows():
    weight, _ = random_matrix("fp8", 150, 160)
    assert ops.linear(torch.empty(0, 160), weight).shape == (0, 150)
