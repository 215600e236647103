"""KV that is evicted from the device's pages goes to host memory and comes back: equal tokens."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from itertools import pairwise

import pytest
from cuda_core import cuda_core
from driving import Answer, answer_alone, check_pages, comparable, request
from test_contract import ORACLES, requests
from tiers import OTHER, PROMPT, ask, check_host, close_disk, open_disk

from ftd.cuda.kv import CudaKvCache
from ftd.engine import restoring
from ftd.engine.resize import resize
from ftd.kv.anchors import Anchor, AnchorKind

MODEL = ORACLES / "qwen3_moe"


@pytest.fixture
def core():
    with cuda_core(MODEL, slots=9, num_pages=24, max_running=4, host_pages=64) as core:
        yield core


def test_what_was_evicted_comes_back_with_equal_tokens(core):
    first = ask(core, "first", PROMPT)
    assert first.reused == 0
    assert ask(core, "other", OTHER).reused == 0
    assert (
        core.held.host.pages_saved >= 15 and core.held.host.pool.held == core.held.host.pages_saved
    )
    again = ask(core, "again", PROMPT)
    assert again.tokens == first.tokens
    assert again.reused == len(PROMPT) - 1
    assert core.status().host_pages_loaded > 0


def test_what_is_here_still_is_not_saved_again(core):
    for round in range(3):
        ask(core, f"a{round}", PROMPT)
        ask(core, f"b{round}", OTHER)
        if round == 1:
            saved = core.held.host.pages_saved
    assert core.held.host.pages_saved - saved <= 4  # the pages that answers end in


def test_another_end_takes_what_is_common(core):
    ask(core, "first", PROMPT)
    ask(core, "other", OTHER)
    mine = [*PROMPT[:205], 3, 4, 5]
    warm = ask(core, "mine", mine)
    assert warm.reused == 205
    core.drop_anchors(None)
    assert core.held.host.pool.held == 0
    assert ask(core, "cold", mine).tokens == warm.tokens


def test_anchors_go_down_and_come_back_with_their_hits(core):
    anchors = (Anchor(200, AnchorKind.SYSTEM), Anchor(280, AnchorKind.USER))
    for name in ("one", "two"):
        ask(core, name, PROMPT, anchors=anchors, session="s")
    ask(core, "other", OTHER, session="t")
    found = {(a.session, a.kind, a.position): a for a in core.anchor_infos()}
    user = found["s", "user", 280]
    assert (user.kv_bytes, user.hits) == (0, 1) and user.host_bytes > 0
    assert user.host_bytes % core.kv.page_bytes == 0
    ask(core, "three", PROMPT, anchors=anchors, session="s")
    found = {(a.session, a.kind, a.position): a for a in core.anchor_infos()}
    user = found["s", "user", 280]
    assert user.hits == 1 and user.kv_bytes > 0 and user.host_bytes > 0 and user.saved_s > 0
    totals = core.status().anchors
    known = {(a.session, a.kind, a.position) for a in core.anchor_infos()}
    assert totals.count == len(known)  # also those made again while they are below
    assert totals.hits == 2 and totals.saved_s > 0
    assert totals.host_bytes == core.held.host.pool.held * core.kv.page_bytes
    assert totals.kv_bytes == core.pages.idle * core.kv.page_bytes
    freed = core.drop_anchors("s")
    assert freed > 0 and not core.anchor_infos("s")


def test_dropping_a_session_leaves_what_others_have_in_host_memory(core):
    anchors = (Anchor(200, AnchorKind.SYSTEM),)
    ask(core, "one", PROMPT, anchors=anchors, session="s")
    for name in ("two", "three"):  # the second makes a fork of where they part
        ask(core, name, [*PROMPT[:230], 3, 4, 5], anchors=anchors, session="t")
    ask(core, "other", OTHER, session="u")
    core.drop_anchors("t")
    assert ask(core, "again", PROMPT, session="s").reused == len(PROMPT) - 1
    ask(core, "other", OTHER, session="u")
    core.drop_anchors("s")
    assert ask(core, "last", PROMPT, session="s").reused < 240
    check_host(core)


def test_the_tier_keeps_what_is_worth_most():
    with cuda_core(MODEL, slots=9, num_pages=24, max_running=1, host_pages=24) as core:
        shared = tuple(PROMPT[:160])
        system = (Anchor(160, AnchorKind.SYSTEM),)
        for i in range(6):  # a beginning that many share, and ends that nobody asks for again
            ask(core, f"r{i}", [*shared, *(i + n % 7 for n in range(120))], anchors=system)
        ask(core, "other", OTHER)
        again = ask(core, "last", [*shared, 9, 9, 9])
        assert again.reused >= 160
        assert core.held.host.pool.held <= 24
        check_host(core)


class LateCopies(CudaKvCache):
    """Copies beside the steps are done as late as the order of streams allows."""

    def __init__(self, *args, **more):
        self.queue = deque()
        super().__init__(*args, **more)

    def save(self, pages, rows):
        self.queue.append(partial(super().save, list(pages), rows))

    def load(self, pages, rows):
        self.queue.append(partial(super().load, list(pages), rows))
        return LateLanding(self)

    def join(self):
        while self.queue:
            self.queue.popleft()()

    def resize(self, num_pages):
        self.join()
        super().resize(num_pages)


class LateLanding:
    def __init__(self, kv):
        self.kv, self.looks = kv, 0

    def passed(self):
        self.looks += 1
        if self.looks > 12:
            self.wait()
        return self.looks > 12

    def wait(self):
        self.kv.join()
        self.looks = 100


@pytest.fixture(scope="module")
def calm():
    return answer_alone(MODEL, requests())


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_equal_under_pressure(calm, seed):
    """Requests come, leave and are put off, budgets move: all answers are those of calm times."""
    rng = random.Random(seed)
    with cuda_core(
        MODEL, slots=9, num_pages=17, max_running=4, prefill_chunk=24,
        host_pages=rng.choice([6, 60]), kv_cache=LateCopies if seed % 2 else CudaKvCache,
    ) as core:  # fmt: skip
        host = core.held.host
        for _ in range(2):
            answers = {one.request_id: Answer() for one in requests()}
            arriving = list(requests())
            while arriving or core.has_work():
                if arriving and rng.random() < 0.3:
                    core.add(arriving.pop(0))
                if rng.random() < 0.1:
                    for output in core.settle():
                        answers[output.request_id].take(output)
                    resize(core, rng.choice([13, 15, 17]), 9)
                if core.has_work():
                    for output in core.step():
                        answers[output.request_id].take(output)
                check_pages(core)
                check_host(core)
            assert comparable(answers) == calm
        assert host.pages_saved and host.pages_loaded
        core.kv.join()
        host.clear()
        assert host.pool.held == 0


def test_pages_of_the_device_survive_on_disk(tmp_path):
    with cuda_core(MODEL, slots=9, num_pages=60, max_running=2) as core:
        open_disk(core, tmp_path)
        first = ask(core, "first", PROMPT)
        close_disk(core)
    assert len(list(tmp_path.rglob("*.ftdkv"))) == 2
    with cuda_core(MODEL, slots=9, num_pages=24, max_running=2, host_pages=64) as core:
        open_disk(core, tmp_path)
        ask(core, "other", OTHER)
        again = ask(core, "again", PROMPT)
        assert (again.tokens, again.reused) == (first.tokens, len(PROMPT) - 1)
        ask(core, "another", OTHER[::-1])  # evicts it, to host memory
        loaded = core.held.host.pages_loaded
        assert ask(core, "once more", PROMPT).reused == len(PROMPT) - 1
        assert core.held.host.pages_loaded > loaded, "host memory comes before the disk"
        close_disk(core)


def test_a_page_that_is_no_longer_there_is_not_read():
    with cuda_core(MODEL, slots=9, num_pages=24, max_running=1) as core:
        assert core.kv.gather([1, 24]).shape == (2, core.kv.page_bytes)
        core.kv.resize(20)
        assert core.kv.gather([1, 24]) is None
        kv = core.kv
    assert kv.gather([1]) is None


def test_recurrent_states_of_the_device_survive_on_disk(tmp_path):
    path = ORACLES / "qwen3_next"
    with cuda_core(path, slots=9, num_pages=60, max_running=2) as core:
        open_disk(core, tmp_path)
        first = ask(core, "first", PROMPT)
        close_disk(core)
    with cuda_core(path, slots=9, num_pages=22, max_running=2, host_pages=64) as core:
        open_disk(core, tmp_path)
        again = ask(core, "again", PROMPT)
        assert (again.tokens, again.reused) == (first.tokens, 288)  # its last whole page
        ask(core, "other", OTHER)
        again = ask(core, "once more", PROMPT)  # pages from host memory, the state is kept there
        assert again.tokens == first.tokens and again.reused >= 288
        assert core.held.host.pages_loaded
        close_disk(core)


def test_a_long_beginning_comes_in_parts_while_others_run(monkeypatch):
    monkeypatch.setattr(restoring, "BROUGHT_AT_ONCE", 4)
    with cuda_core(MODEL, slots=9, num_pages=40, max_running=4, host_pages=64) as core:
        first = ask(core, "first", PROMPT)
        core.tree.evict(core.pages.idle)
        answers = {name: Answer() for name in ("stream", "again")}
        core.add(request("stream", OTHER[:50], 40))
        seen, loads = [], 0
        while core.has_work():
            if len(answers["stream"].tokens) == 5 and not loads:
                core.add(request("again", PROMPT, 4))
                loads = 1
            for output in core.step():
                answers[output.request_id].take(output)
            seen.append(core.held.host.pages_loaded)
            check_pages(core)
            check_host(core)
        assert answers["again"].tokens == first.tokens
        assert answers["again"].reused == len(PROMPT) - 1
        assert max(b - a for a, b in pairwise(seen)) <= 4


def test_a_request_that_is_alone_begins_behind_what_is_on_its_way():
    with cuda_core(
        MODEL, slots=9, num_pages=24, max_running=4, host_pages=64, kv_cache=LateCopies
    ) as core:
        ask(core, "first", PROMPT)
        ask(core, "other", OTHER)
        core.tree.evict(core.pages.idle)
        core.kv.join()
        core.kv.pages.fill_(7.0)  # whatever stood there
        mine = [*PROMPT[:160], 499 - PROMPT[160], 3, 5]
        warm = ask(core, "mine", mine)
        assert warm.reused == 160 and core.held.host.pages_loaded == 10
        core.drop_anchors(None)
        assert ask(core, "cold", mine).tokens == warm.tokens
