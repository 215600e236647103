from __future__ import annotations

import pytest
import torch

from ftd.kernels.reference import TorchOps

route = TorchOps().route


@pytest.mark.parametrize("normalise", [False, True])
def test_matches_transformers(normalise):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=16, num_experts=24, num_experts_per_tok=5, norm_topk_prob=normalise
    )
    router = modeling.Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 16)
    with torch.no_grad():
        logits, weights, ids = router(x)
    mine_ids, mine = route(logits, 5, normalise)
    assert (mine_ids.dtype, mine.dtype) == (torch.int32, torch.float32)
    assert torch.equal(mine_ids.long(), ids)
    torch.testing.assert_close(mine, weights)


def test_the_lower_id_wins_among_equals():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 3.0, 0.0], [0.0] * 6])
    ids, weights = route(logits, 4, normalise=True)
    assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.25))


def test_ids_stay_in_range_whatever_the_logits():
    logits = torch.tensor([[float("nan")] * 5, [float("inf"), 0, 0, 0, 0], [-float("inf")] * 5])
    ids, _ = route(logits, 2, normalise=True)
    assert ((ids >= 0) & (ids < 5)).all()


@pytest.mark.parametrize("k", [1, 2, 8, 10])
def test_a_row_does_not_depend_on_the_rows_beside_it(k):
    logits = torch.randn(33, 60)
    ids, weights = route(logits, k, normalise=True)
    alone = [route(row[None], k, normalise=True) for row in logits]
    assert torch.equal(ids, torch.cat([a for a, _ in alone]))
    assert torch.equal(weights, torch.cat([b for _, b in alone]))
    assert ids.is_contiguous() and weights.is_contiguous()
