"""A machine measured while an engine serves, for the CPU device and a GPU alike."""

from __future__ import annotations

from driving import Answer

from ftd.engine.measuring import profiling_of
from ftd.experts.measure import Slice
from ftd.experts.profile import Profile


def measured_while_serving(core, requests) -> tuple[Profile, dict[str, Answer]]:
    """Answer all, with a slice of a measurement between any two steps; what both brought."""
    profiling, answers = profiling_of(core), {one.request_id: Answer() for one in requests}
    for one in requests:
        core.add(one)
    found: Slice | Profile | None = None
    while core.has_work() or not isinstance(found, Profile):
        outputs = core.settle()
        if not isinstance(found, Profile):
            found = profiling.next_slice(core)
        if core.has_work():
            outputs += core.step()
        for output in outputs:
            answers[output.request_id].take(output)
    profiling.end(core)
    return found, answers
