"""What finding a known beginning costs: prefix tree, anchors and disk index at long prompts.

python tools/bench_anchors.py [tokens]
"""

import sys
import time
from array import array
from collections.abc import Callable
from statistics import median

from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorKind
from ftd.kv.block_file import Head
from ftd.kv.block_index import BlockIndex, Entry
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.kv.value import rank_of_pages

PAGE = 16
TURN_TOKENS = 400  # of an agent: an answer and a tool's result
REPEATS = 50


def microseconds(call: Callable[[], object]) -> float:
    def once() -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s

    return 1e6 * median(once() for _ in range(REPEATS))


def main(tokens: int) -> None:
    pool = PagePool(2 * tokens // PAGE, PAGE)
    tree = PrefixTree(pool, rank_of_pages, time.monotonic)
    book = AnchorBook(tree)
    ids = array("i", (n * n % 150_001 for n in range(tokens)))
    pages = array("i", pool.allocate(tokens // PAGE) or ())
    anchors = []
    for end in range(TURN_TOKENS, tokens + 1, TURN_TOKENS):  # turn by turn, as it came
        tree.insert(ids[:end], pages[: end // PAGE])
        anchors.append(Anchor(end, AnchorKind.TURN))
        if end % (50 * TURN_TOKENS) == 0:  # and every now and then somebody forks
            fork = ids[:end] + array("i", [1] * PAGE)
            tree.insert(fork, pages[: end // PAGE] + array("i", pool.allocate(1) or ()))
    book.note(ids, anchors, "s", tokens)
    index = BlockIndex("0" * 40, 16 * PAGE)
    begin = 0
    for key, parent, block in list(index.blocks(ids)):
        head = Head("0" * 40, parent, begin, len(block), 1, 0.5)
        index.add(Entry(key, head, block, 2**20, 0.0))
        begin += len(block)
    edited = array("i", ids)
    edited[tokens // 2] += 1
    runs = sum(1 for _ in tree.runs())
    print(f"{tokens:,} tokens, {runs} runs, {len(anchors)} anchors; microseconds, median")
    for name, prompt in (("all known", ids), ("edited in the middle", edited)):
        print(f"{name:22} find {microseconds(lambda p=prompt: tree.peek(p)):9.1f}", end="")
        print(f"  disk {microseconds(lambda p=prompt: index.known(p)):9.1f}")
    print(f"{'note all anchors':22} {microseconds(lambda: book.note(ids, anchors, 's', 1)):14.1f}")
    print(f"{'a hit':22} {microseconds(lambda: book.resumed(ids, tokens - 1, 's')):14.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
