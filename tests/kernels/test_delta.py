"""The delta rule and its convolution against their formulas, and bit for bit against themselves."""

from __future__ import annotations

import pytest
import torch

from ftd.kernels.delta import causal_conv, delta_scan

SIZES = [(2, 16, 16), (4, 128, 128), (3, 24, 40)]  # NV, DK, DV


def inputs(T: int, NV: int, DK: int, DV: int):
    draw = torch.Generator().manual_seed(T + NV)
    q, k = (torch.randn(T, NV, DK, generator=draw) for _ in range(2))
    v = torch.randn(T, NV, DV, generator=draw)
    decay, beta = (torch.rand(T, NV, generator=draw) for _ in range(2))
    state = torch.randn(NV, DK, DV, generator=draw)
    return q * DK**-0.5, k * DK**-0.5, v, decay, beta, state


def formula(q, k, v, decay, beta, state):
    """In float64, head by head: as the head of ``kernels.delta`` has it."""
    S = state.double().clone()
    out = torch.empty_like(v, dtype=torch.float64)
    for t in range(len(q)):
        for n in range(len(S)):
            S[n] *= decay[t, n].double()
            change = beta[t, n].double() * (v[t, n].double() - S[n].T @ k[t, n].double())
            S[n] += torch.outer(k[t, n].double(), change)
            out[t, n] = S[n].T @ q[t, n].double()
    return out, S


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "goes on"])
def test_scan_matches_the_formula(size, begins):
    *rows, state = inputs(9, *size)
    target = torch.full_like(state, float("nan"))
    out = delta_scan(*rows, None if begins else state, target)
    expected, after = formula(*rows, torch.zeros_like(state) if begins else state)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.double(), after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_chunks_and_slots_change_no_bit(size):
    *rows, state = inputs(40, *size)
    kept = state.clone()
    whole = torch.empty_like(state)
    expected = delta_scan(*rows, state, whole)
    assert torch.equal(state, kept)  # a source may be shared
    for chunk in (1, 7, 16, 39):
        slots = torch.full((9, *state.shape), float("nan"))
        parts, before = [], state
        for i, begin in enumerate(range(0, 40, chunk)):
            part = [x[begin : begin + chunk].clone() for x in rows]
            parts.append(delta_scan(*part, before, slots[i % 9]))
            before = slots[i % 9]
        assert torch.equal(torch.cat(parts), expected), chunk
        assert torch.equal(before, whole), chunk


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
def test_convolution_matches_the_formula_in_any_chunks(act):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3 + 21, 50, generator=draw).to(act)
    weight = torch.randn(4, 50, generator=draw)
    y = causal_conv(x, weight)
    mixed = torch.stack([(x[t : t + 4].double() * weight.double()).sum(0) for t in range(21)])
    expected = (mixed * mixed.sigmoid()).to(act)
    torch.testing.assert_close(y, expected, rtol=2e-2 if act == torch.bfloat16 else 1e-5, atol=1e-5)
    for chunk in (1, 5, 20):
        parts = [causal_conv(x[at : at + chunk + 3], weight) for at in range(0, 21, chunk)]
        assert torch.equal(torch.cat(parts), y), chunk
