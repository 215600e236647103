"""How many tokens of a prompt go through a layer's experts at a time on a GPU: what scratch allows.

Every route has a result of its own until all are added up, K of H float32 numbers a token: of a
long prompt that would be more than its experts. They stay where they are from block to block.
"""

from __future__ import annotations

PRODUCTS_BYTES = 256 << 20  # of the routes of a block
ROWS = 16  # blocks are whole tiles of a tensor core


def most_tokens(experts_per_token: int, hidden: int) -> int:
    """Of one block."""
    return max(1, PRODUCTS_BYTES // (4 * experts_per_token * hidden * ROWS)) * ROWS


def token_blocks(tokens: int, experts_per_token: int, hidden: int) -> list[slice]:
    """Blocks of about the same size, in order; at least one."""
    blocks = max(1, -(-tokens // most_tokens(experts_per_token, hidden)))
    size = max(1, -(-tokens // (blocks * ROWS))) * ROWS
    return [slice(at, min(at + size, tokens)) for at in range(0, max(tokens, 1), size)]
