import numpy as np
import pytest
import torch

from ftd.engine.batch import Span, pack


def test_rows_positions_and_places_follow_the_page_tables():
    step = pack(
        [
            Span(ids=[7], begin=5, pages=[3, 9], logits=1),
            Span(ids=[1, 2, 3, 4, 5], begin=2, pages=[4, 0, 8], logits=1),
            Span(ids=[6, 6], begin=0, pages=[5], logits=0),
        ],
        page_tokens=4,
    )
    assert step.ids.tolist() == [7, 1, 2, 3, 4, 5, 6, 6]
    assert step.position.tolist() == [5, 2, 3, 4, 5, 6, 0, 1]
    assert step.sequence.tolist() == [0, 1, 1, 1, 1, 1, 2, 2]
    assert step.place.tolist() == [9 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 0, 1, 2, 20, 21]
    assert step.page_table.tolist() == [[3, 9, 0], [4, 0, 8], [5, 0, 0]]
    assert step.logit_rows.tolist() == [0, 5]


def test_a_span_may_want_all_its_logits():
    step = pack([Span([1, 2, 3], 0, [0], 3), Span([4], 9, [1, 2, 3], 1)], page_tokens=4)
    assert step.logit_rows.tolist() == [0, 1, 2, 3]
    assert step.place.dtype == torch.int64 and step.position.dtype == torch.int32


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_every_token_has_a_place_of_its_own(page_tokens):
    rng = np.random.default_rng(page_tokens)
    pages = iter(rng.permutation(1000).tolist())
    spans = []
    for _ in range(9):
        begin, count = int(rng.integers(0, 40)), int(rng.integers(1, 40))
        table = [next(pages) for _ in range(-(-(begin + count) // page_tokens))]
        spans.append(Span(list(range(count)), begin, table, 1))
    step = pack(spans, page_tokens)
    assert len(set(step.place.tolist())) == len(step.place)
