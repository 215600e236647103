"""What goes down to lower tiers and comes back, as the CPU device and a GPU are asked alike."""

from __future__ import annotations

import time

from driving import Answer, check_pages, request

from ftd.engine.api import Finish
from ftd.kv.disk import DiskStore

PROMPT = [n * n * 7 % 500 for n in range(300)]
OTHER = [n * n * 11 % 500 for n in range(1, 331)]


def ask(core, name, prompt, tokens=4, **fields):
    """One answer, also where the request waits for the disk first."""
    answer = Answer()
    core.add(request(name, prompt, tokens, **fields))
    until_s = time.monotonic() + 30
    while answer.finish is None:
        assert time.monotonic() < until_s, core.status()
        if not core.has_work():
            time.sleep(0.002)
            continue
        for output in core.step():
            answer.take(output)
        check_pages(core)
    assert answer.finish is Finish.LENGTH, answer
    check_host(core)
    return answer


def check_host(core):
    if (host := core.held.host) is None:
        return
    assert host.pool.free + host.pool.held == host.pool.num_pages
    kept = [page for run in host.tree.runs() for page in run.pages if page >= 0]
    assert len(kept) == len(set(kept))


def pin_all(core, num_pages):
    """Wait until the tier is as large as it gets: a thread pins it as it fills up."""
    memory, until_s = core.held.host._memory, time.monotonic() + 10
    memory.want(num_pages)
    while memory.num_pages < num_pages:
        assert time.monotonic() < until_s, memory.num_pages
        time.sleep(0.002)


def open_disk(core, directory, limit_bytes=10**9):
    states = core.held.recurrence.pool
    store = DiskStore(directory, "0" * 40, limit_bytes, core.kv, core.pages, states=states)
    core.keep_on_disk(store)


def close_disk(core):
    core.held.restoring.close()
