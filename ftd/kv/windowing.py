"""Which layers keep no more than a window of keys and values, and what memory that takes: pure.

Where a layer sees the last so many tokens and no others, keys that no later token will see are a
waste. So such layers have pages of their own, which come free as a sequence goes on, and the pages
of the prefix tree hold the other layers alone. To resume from a position then takes the pages
before it and the last tokens before it in the windowed layers. Those have a fixed size: they are
copied and kept as the state of a recurrent layer is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftd.model.spec import ModelSpec

# A longer window is as long as many a context, and a copy of it at every border costs more memory
# than pages that nobody needs any more.
MOST_WINDOW_TOKENS = 1024
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Windowing:
    layers: tuple[int, ...]  # that have pages of their own, as the KV cache counts them
    tokens: int  # before a position, that it or a later one sees: one less than the widest window
    num_kv_heads: int
    head_dim: int

    @property
    def parts(self) -> int:
        """Keys, and again values, of each layer."""
        return 2 * len(self.layers)

    @property
    def part_numbers(self) -> int:
        """Numbers of one token in a part."""
        return self.num_kv_heads * self.head_dim

    def token_bytes(self, act_bytes: int) -> int:
        return self.parts * self.part_numbers * act_bytes

    def slot_bytes(self, act_bytes: int) -> int:
        """What is kept to resume from a position."""
        return -(-self.tokens * self.token_bytes(act_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES

    def num_pages(self, page_tokens: int, max_running: int, chunk_tokens: int) -> int:
        """So many that sequences never lack one, with page 0, which is no sequence's.

        Each has what it sees, beginning and ending within a page, and the page that the next two
        tokens may come to; what a step adds beyond that belongs to one chunk.
        """
        seen = -(-self.tokens // page_tokens) + 1
        return 1 + max_running * (seen + 2) + -(-chunk_tokens // page_tokens)


def windowing(spec: ModelSpec) -> Windowing | None:
    """None: every layer keeps all its keys.

    The prefix tree is made of pages, so one layer stays in them even where all have windows. Layers
    whose keys differ in shape stay, too: a token is one row of numbers in each part.
    """
    attention = spec.attention_layers
    most = min(MOST_WINDOW_TOKENS, spec.context - 1)
    short = [i for i, layer in enumerate(attention) if layer.window and layer.window <= most]
    if len(short) == len(attention):
        short = short[1:]
    shapes = {(attention[i].num_kv_heads, attention[i].head_dim) for i in short}
    if spec.delta_layers or len(shapes) != 1:
        return None
    widest = max(attention[i].window or 0 for i in short)
    return Windowing(tuple(short), max(1, widest - 1), *shapes.pop())
