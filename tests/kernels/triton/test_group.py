"""Routes grouped by expert, in triton's interpreter, against the torch reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ftd.kernels.triton import group as module
from ftd.kernels.triton.group import group, group_ref


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that the kernel gets holds numbers that read far away."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(1 << 40))


def routing(T: int, K: int, E: int, seed: int) -> torch.Tensor:
    """Skewed, with unused routes; some experts get none."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(T, K, generator=generator) ** 3 * E).int()
    ids[torch.rand(T, K, generator=generator) < 0.1] = -1
    return ids


@pytest.mark.parametrize("scan", [16, 2048])
@pytest.mark.parametrize(
    ("T", "K", "E", "rows"),
    [(9, 3, 6, 16), (70, 4, 130, 16), (33, 2, 5, 32), (1, 1, 3, 16)],
    ids=str,
)
def test_matches_the_reference(T, K, E, rows, scan, monkeypatch):
    monkeypatch.setattr(module, "SCAN", scan)
    ids = routing(T, K, E, seed=T)
    mine, expected = group(ids, E, rows), group_ref(ids, E, rows)
    used = int((ids >= 0).sum())
    assert torch.equal(mine.route[:used], expected.route[:used])
    assert torch.equal(mine.expert, expected.expert)
    needed = mine.expert < E
    assert torch.equal(mine.begin[needed], expected.begin[needed])
    assert torch.equal(mine.end[needed], expected.end[needed])


@pytest.mark.parametrize("ids", [[[0, 5], [5, -1], [5, 2], [5, 0]], [[-1, -1]], [[5, 5], [5, 5]]])
def test_blocks_cover_each_route_once(ids):
    ids = torch.tensor(ids, dtype=torch.int32)
    blocks = group(ids, 6, 2)
    covered: list[tuple[int, int]] = []
    for expert, begin, end in zip(*(x.tolist() for x in blocks[1:])):
        if expert < 6:
            assert 0 < end - begin <= 2
            covered += [(int(r), expert) for r in blocks.route[begin:end]]
    flat = ids.flatten().tolist()
    assert sorted(covered) == [(r, e) for r, e in enumerate(flat) if e >= 0]
    assert [e for _, e in covered] == sorted(e for e in flat if e >= 0)
