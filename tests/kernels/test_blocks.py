"""Blocks of a prompt's tokens: all of them once, in order, none beyond what scratch allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftd.kernels.blocks import PRODUCTS_BYTES, ROWS, most_tokens, token_blocks


@given(st.integers(0, 70_000), st.integers(1, 16), st.sampled_from([48, 2048, 2880, 8192, 2**24]))
def test_blocks_cover_all_tokens_within_the_bound(tokens, k, hidden):
    blocks = token_blocks(tokens, k, hidden)
    assert [at for block in blocks for at in range(block.start, block.stop)] == list(range(tokens))
    sizes = [block.stop - block.start for block in blocks]
    assert max(sizes) <= most_tokens(k, hidden)
    assert max(sizes) * k * hidden * 4 <= max(PRODUCTS_BYTES, ROWS * k * hidden * 4)
    assert all(size % ROWS == 0 for size in sizes[:-1])
    assert len(blocks) == max(1, -(-tokens // max(sizes[0], 1)))


def test_they_are_about_as_large():
    assert token_blocks(8000, 8, 2048) == [slice(0, 4000), slice(4000, 8000)]
    assert token_blocks(4096, 8, 2048) == [slice(0, 4096)]
