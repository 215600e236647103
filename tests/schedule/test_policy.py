"""Plans carried out on real pages and a real tree, with a clock in place of the model."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.engine.api import EngineRequest
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.schedule.pauses import Pauses
from ftd.schedule.policy import Limits, SequenceView, StepPlan, next_in_line, plan_step
from ftd.schedule.rates import Rates
from ftd.schedule.sequence import Sequence

LAYERS = 16


@dataclass
class FakeEngine:
    limits: Limits
    cost_s: Callable[[int, int], float] = lambda rows, tokens: 1.0 + 0.1 * rows + 0.01 * tokens
    now_s: float = 0.0
    rates: Rates = field(default_factory=Rates)
    pauses: Pauses = field(default_factory=Pauses)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    preemptions: int = 0
    arrivals: int = 0

    def __post_init__(self):
        self.pool = PagePool(self.limits.num_pages, self.limits.page_tokens)
        self.tree = PrefixTree(self.pool)

    def add(self, key, prompt_ids, max_tokens, copies_of=None):
        request = EngineRequest(key, tuple(prompt_ids), max_tokens, copies_of=copies_of)
        self.waiting.append(Sequence(request, self.arrivals))
        self.arrivals += 1

    def cancel(self, key):
        for queue in (self.waiting, self.running):
            for s in [s for s in queue if s.key == key]:
                queue.remove(s)
                self.pool.release(s.leave())

    def plan(self) -> StepPlan:
        running = [s.view(self.pool.num_exclusive(s.pages)) for s in self.running]
        line = next_in_line([s.view(0) for s in self.waiting], running, self.limits)
        by_key = {s.key: s for s in self.waiting}
        candidates = [by_key[key].view_after(*self.tree.peek(by_key[key].ids)) for key in line]
        return plan_step(
            running,
            candidates,
            free_pages=self.pool.free,
            idle_pages=self.pool.idle,
            limits=self.limits,
        )

    def step(self, interrupted=False) -> StepPlan:
        """One step; an interrupted one has its pages, but computes nothing."""
        plan = self.plan()
        by_key = {s.key: s for s in (*self.running, *self.waiting)}
        for key in plan.preempt:
            self.move(by_key[key], self.running, self.waiting)
            self.pool.release(by_key[key].leave())
            self.preemptions += 1
        for key in plan.admit:
            self.move(by_key[key], self.waiting, self.running)
            match = self.tree.match(by_key[key].ids)
            by_key[key].start(match.pages, self.limits.page_tokens)
            if match.part:  # never copied here: the plan holds with less than was promised
                self.pool.release((match.part.page,))
        short = plan.new_pages - self.pool.free
        assert short <= 0 or self.tree.evict(short) == short, "the plan exceeds the pool"
        for run in plan.runs:
            s = by_key[run.key]
            assert s in self.running and 0 < run.tokens <= s.pending
            end = -(-(s.computed + run.tokens) // self.limits.page_tokens)
            s.pages.extend(self.pool.allocate(max(0, end - len(s.pages))))
        for key in plan.passed_over:
            by_key[key].passed_over += 1
        if not interrupted:
            self.execute(plan, by_key)
        return plan

    def move(self, s, source, target):
        source.remove(s)
        target.append(s)

    def execute(self, plan, by_key):
        if not plan.runs:
            return
        if plan.prompt_tokens:
            self.compute_pass(plan)
            for run in plan.runs:
                self.advance(by_key[run.key], run.tokens)
        else:
            self.pauses = self.pauses.over()
            self.decode([by_key[run.key] for run in plan.runs])

    def compute_pass(self, plan):
        """Layer by layer, with decode steps of the others in between."""
        inside = {run.key for run in plan.runs}
        self.pauses = self.pauses.since(self.now_s)
        for _ in range(LAYERS):
            self.now_s += self.cost_s(0, plan.prompt_tokens) / LAYERS
            while rows := self.streams(inside):
                decode_s = self.rates.decode_step_s(len(rows))
                if not self.pauses.due(self.now_s, decode_s):
                    break
                began_s = self.now_s
                self.decode(rows)
                took_s = self.now_s - began_s
                self.pauses = self.pauses.ran(self.now_s, took_s, decode_s or took_s)
            if not rows:
                self.pauses = self.pauses.over().since(self.now_s)

    def streams(self, inside):
        rows = []
        for s in self.running:
            if s.pending == 1 and s.key not in inside:
                lacking = max(0, -(-len(s.ids) // self.limits.page_tokens) - len(s.pages))
                if lacking > self.pool.free:
                    self.tree.evict(lacking)
                if (pages := self.pool.allocate(lacking)) is not None:
                    s.pages.extend(pages)
                    rows.append(s)
        return rows

    def decode(self, rows):
        seconds = self.cost_s(len(rows), 0)
        self.now_s += seconds
        self.rates = self.rates.measured(len(rows), 0, seconds)
        for s in rows:
            self.advance(s, 1)

    def advance(self, s, tokens):
        s.computed += tokens
        s.passed_over = 0
        self.tree.insert(s.ids[: s.computed], s.pages)
        if s.pending == 0:
            s.ids.append(next_token(s.ids))
            self.token_times.setdefault(s.key, []).append(self.now_s)
            if s.output_tokens == s.request.max_tokens:
                self.running.remove(s)
                self.pool.release(s.leave())
                self.finished.append(s.key)

    def run(self, most_steps):
        for _ in range(most_steps):
            if not self.waiting and not self.running:
                return
            assert self.step().runs, "a step without work"
        raise AssertionError(f"after {most_steps} steps: {self.waiting=} {self.running=}")


def next_token(ids: array) -> int:
    return (ids[-1] * 31 + len(ids)) % 997


def check_rest(engine):
    """Nothing runs, and no page is lost."""
    assert not engine.running and not engine.waiting
    assert engine.pool.held == engine.pool.idle
    engine.tree.clear()
    assert engine.pool.free == engine.limits.num_pages


LIMITS = Limits(max_running=4, chunk_tokens=16, num_pages=32, page_tokens=4)

requests = st.lists(
    st.tuples(
        st.integers(0, 8),  # steps since the request before
        st.integers(0, 3),  # whose beginning the prompt shares
        st.integers(1, 90),  # prompt tokens
        st.integers(1, 38),  # most output tokens: with the longest prompt exactly the pool
        st.booleans(),  # a copy of the one before
        st.one_of(st.none(), st.integers(0, 40)),  # cancelled after so many steps
        st.booleans(),  # the first step after its arrival is interrupted
    ),
    min_size=1,
    max_size=14,
)


@given(
    requests=requests,
    max_running=st.integers(1, 6),
    chunk_tokens=st.integers(1, 40),
    fixed_s=st.sampled_from([0.0, 0.1, 5.0, 50.0]),
)
@settings(max_examples=150, deadline=None)
def test_everything_finishes_within_the_pool(requests, max_running, chunk_tokens, fixed_s):
    def cost_s(rows, tokens):
        return 0.5 + 0.1 * rows + (fixed_s + 0.05 * tokens if tokens else 0.0)

    engine = FakeEngine(Limits(max_running, chunk_tokens, 32, 4), cost_s)
    expected, cancels, prompt = set(), [], ()
    for i, (gap, family, length, output, copy, cancelled, interrupted) in enumerate(requests):
        for _ in range(gap):
            cancels = [(key, steps - 1) for key, steps in cancels]
            for key, steps in cancels:
                if steps == 0:
                    engine.cancel(key)
            engine.step()
            assert len(engine.running) <= max_running
            assert engine.pool.held + engine.pool.free == 32
        copies_of = f"r{i - 1}" if copy and i else None
        if copies_of is None:
            prompt = tuple((family * 7 + j // 9) % 50 for j in range(length))
        engine.add(f"r{i}", prompt, output, copies_of)
        expected.add(f"r{i}")
        if cancelled is not None:
            cancels.append((f"r{i}", cancelled + 1))
        if interrupted:
            engine.step(interrupted=True)
    for key, steps in cancels:
        if steps > 0 and key not in engine.finished:
            engine.cancel(key)
    engine.run(most_steps=20_000)
    assert expected - {key for key, _ in cancels} <= set(engine.finished)
    check_rest(engine)


@given(requests=requests)
@settings(max_examples=30, deadline=None)
def test_the_same_views_give_the_same_plan(requests):
    engine = FakeEngine(LIMITS)
    for i, (_, family, length, output, *_) in enumerate(requests):
        engine.add(f"r{i}", [family] * length, output)
        engine.step()
        plan = engine.plan()
        engine.running.reverse()  # the order in which they are given does not count
        engine.waiting.reverse()
        assert engine.plan() == plan


def test_a_single_sequence_may_fill_the_pool():
    engine = FakeEngine(LIMITS)
    engine.add("full", range(100), 28)  # 32 pages of 4
    engine.run(most_steps=100)
    assert engine.finished == ["full"]
    check_rest(engine)


def test_the_oldest_finishes_though_all_of_them_need_the_pool():
    engine = FakeEngine(LIMITS)
    for i in range(4):
        engine.add(f"r{i}", range(1000 * i, 1000 * i + 60), 60)
    engine.run(most_steps=2_000)
    assert engine.preemptions > 0
    assert engine.finished == ["r0", "r1", "r2", "r3"]
    check_rest(engine)


def test_preemption_takes_the_youngest_and_its_pages_are_found_again():
    engine = FakeEngine(Limits(max_running=3, chunk_tokens=40, num_pages=30, page_tokens=4))
    for i in range(3):
        engine.add(f"r{i}", range(1000 * i, 1000 * i + 36), 40)
    while not engine.preemptions:
        plan = engine.step()
    assert plan.preempt == ("r2",)
    assert [s.key for s in engine.running] == ["r0", "r1"]
    engine.run(most_steps=500)
    (again,) = [key for key in engine.finished if key == "r2"]
    assert again and engine.finished[-1] == "r2"


def test_cached_pages_go_before_running_sequences():
    engine = FakeEngine(LIMITS)
    engine.add("past", range(100), 1)
    engine.run(most_steps=50)
    assert engine.pool.idle == 25
    engine.add("now", range(500, 600), 20)
    engine.run(most_steps=100)
    assert engine.preemptions == 0


def test_admission_is_first_come_first_served():
    engine = FakeEngine(LIMITS)
    for i in range(10):
        engine.add(f"r{i}", [i] * 20, 5)
    admitted = []
    for _ in range(200):
        admitted += engine.step().admit
    assert admitted == [f"r{i}" for i in range(10)]


def test_admission_needs_pages_for_a_chunk_not_for_the_longest_answer():
    engine = FakeEngine(LIMITS)
    for i in range(4):
        engine.add(f"r{i}", [i] * 8, 120)
    assert engine.step().admit == ("r0", "r1", "r2", "r3")


def test_a_prompt_under_way_keeps_the_pages_it_still_needs():
    engine = FakeEngine(LIMITS)
    engine.add("long", range(100), 4)  # 25 of 32 pages
    engine.add("too much", range(500, 540), 4)  # its first chunk fits, the rest would not
    engine.add("behind", [7], 1)
    assert engine.step().admit == ("long", "too much")
    while not engine.token_times.get("long"):
        engine.step()
    assert engine.preemptions == 0


def test_copies_wait_for_the_prompt_and_then_reuse_it():
    engine = FakeEngine(LIMITS)
    prompt = range(50)
    engine.add("first", prompt, 20)
    engine.add("copy", prompt, 20, copies_of="first")
    engine.add("other", range(100, 104), 20)
    assert engine.step().admit == ("first", "other")  # the copy holds nobody up
    while "first" not in engine.token_times:
        assert not any(s.key == "copy" for s in engine.running)
        engine.step()
    assert "copy" in engine.step().admit
    shared = [s.pages[:3] for s in engine.running if s.key in ("first", "copy")]
    assert shared[0] == shared[1]  # all whole pages
    engine.run(most_steps=100)
    check_rest(engine)


def test_a_copy_whose_sibling_is_gone_starts_by_itself():
    engine = FakeEngine(LIMITS)
    engine.add("first", range(50), 20)
    engine.add("copy", range(50), 20, copies_of="first")
    engine.step()
    engine.cancel("first")
    engine.run(most_steps=100)
    assert engine.finished == ["copy"]
    check_rest(engine)


BIG = Limits(max_running=16, chunk_tokens=512, num_pages=40_000, page_tokens=16)
COSTS = {
    "in proportion": lambda rows, n: (0.02 if rows else 0) + n / 2000,
    "mostly fixed": lambda rows, n: (0.05 if rows else 0) + (0.6 + n / 2500 if n else 0),
    "levels off": lambda rows, n: 0.05 * (rows > 0) + min(n, 100) * 0.006 + n / 5000,
    "fast": lambda rows, n: (0.02 if rows else 0) + n / 20_000,
}


def stream_gaps(engine, begin_s, end_s):
    times = [t for t in engine.token_times["stream"] if begin_s <= t <= end_s]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("cost_s", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("others", [1, 4])
def test_a_stream_keeps_a_quarter_of_its_speed_beside_long_prompts(cost_s, others):
    engine = FakeEngine(BIG, cost_s)
    engine.add("stream", range(16), 10_000)
    for _ in range(50):
        engine.step()
    step_s = stream_gaps(engine, 0, engine.now_s)[-1]
    for i in range(others):
        engine.add(f"long{i}", (j * (i + 3) % 10_007 for j in range(8_000)), 1)
    begin_s = engine.now_s
    while len(engine.finished) < others:
        engine.step()
    gaps = stream_gaps(engine, begin_s, engine.now_s)
    assert step_s * len(gaps) / sum(gaps) >= 0.25
    assert max(gaps) <= cost_s(0, 512) / LAYERS + 8 * step_s
    prompts_alone_s = others * (15 * cost_s(0, 512) + cost_s(0, 8_000 % 512))
    assert engine.now_s - begin_s <= 1.5 * prompts_alone_s


def test_a_short_prompt_does_not_wait_for_long_ones():
    engine = FakeEngine(BIG)
    for i in range(3):
        engine.add(f"long{i}", (j * (i + 3) % 10_007 for j in range(50_000)), 1)
    for _ in range(20):
        engine.step()
    engine.add("short", range(100), 1)
    engine.step()
    engine.step()
    assert engine.finished == ["short"]


def test_a_long_prompt_gets_its_turns_beside_endless_short_ones():
    engine = FakeEngine(BIG)
    engine.add("long", (j * 3 % 10_007 for j in range(20 * 512)), 1)
    steps = 0
    while "long" not in engine.finished:
        engine.add(f"short{steps}", (j * steps % 9_973 for j in range(512)), 1)
        engine.step()
        steps += 1
        assert steps < 20 * BIG.max_running


def test_many_long_prompts_progress_together():
    engine = FakeEngine(BIG)
    for i in range(4):
        engine.add(f"long{i}", (j * (i + 3) % 10_007 for j in range(6_000)), 1)
    engine.run(most_steps=200)
    ends = sorted(times[0] for times in engine.token_times.values())
    assert ends[0] > 0.7 * ends[-1]


def view(key, arrival, tokens, **more):
    return SequenceView(key, arrival, prompt_tokens=tokens, tokens=tokens, **more)


def test_pages_that_two_victims_share_are_counted_when_both_go():
    running = [
        view("old", 0, 41, computed=40, pages=10),
        view("a", 1, 41, computed=40, pages=10, exclusive_pages=0),
        view("b", 2, 41, computed=40, pages=10, exclusive_pages=0),
    ]
    limits = Limits(max_running=3, chunk_tokens=16, num_pages=20, page_tokens=4)
    plan = plan_step(running, [], free_pages=0, idle_pages=0, limits=limits)
    assert plan.preempt == ("b", "a")
    assert [run.key for run in plan.runs] == ["old"]


def test_next_in_line_keeps_to_the_number_that_may_run():
    waiting = [view(f"w{i}", 9 - i, 5) for i in range(5)]
    running = [view("r", 0, 5)]
    assert next_in_line(waiting, running, LIMITS) == ["w4", "w3", "w2"]
    assert next_in_line(waiting, running * 4, LIMITS) == []
