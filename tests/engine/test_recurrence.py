"""The numerics contract for models with recurrent states, and the accounts of their slots."""

from __future__ import annotations

import random
from array import array
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from driving import answer_all, answer_interrupted, comparable, engine_core, request

from ftd.engine.api import Anchor, EngineRequest, Finish, Sampling
from ftd.engine.recurrence import GRID_TOKENS, Recurrence, borders
from ftd.kv.states import LIVE_STATES
from ftd.schedule.sequence import Sequence

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
VOCAB = 500  # ids below the special ones
ROLE = "role"
PAGE_TOKENS = 16


def requests() -> list[EngineRequest]:
    """Prompts of uneven lengths, some with a beginning in common; half greedy, half drawn."""
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB) for _ in range(70)]
    made = []
    for i, (head, tail) in enumerate([(0, 1), (0, 16), (0, 70), (70, 3), (33, 20), (70, 40)]):
        prompt = shared[:head] + [rng.randrange(VOCAB) for _ in range(tail)]
        sampling = Sampling(temperature=0.0)
        if i % 2:
            sampling = Sampling(temperature=0.9, top_p=0.95, seed=i, logprobs=2)
        anchors = (Anchor(21, ROLE),) if len(prompt) > 30 else ()
        made.append(request(f"r{i}", prompt, 5 + 4 * i, sampling=sampling, anchors=anchors))
    return made


@contextmanager
def recurrent_core(model: Path, kept: int | None = None, **settings):
    """A core of one thread; ``kept`` states to resume from instead of the plan's number."""
    settings = {"cpu_threads": 1, "max_running": 4, **settings}
    with engine_core(model, **settings) as core:
        if kept is not None:
            live = LIVE_STATES * int(settings["max_running"])
            core.held.recurrence = Recurrence(
                live + kept, int(settings["max_running"]), PAGE_TOKENS
            )
        yield core
        check_states_at_rest(core)


def check_states_at_rest(core) -> None:
    status = core.status()
    assert status.states_total > 0
    assert status.states_free + status.states_held == status.states_total
    assert status.states_held == status.states_cached == len(core.held.recurrence.store)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def model(request) -> Path:
    return ORACLES / request.param


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, tuple]:
    """Each request by itself, with nothing to resume from."""
    found: dict[str, tuple] = {}
    with recurrent_core(model, kept=0, max_running=1, prefill_chunk=256) as core:
        for one in requests():
            answers = answer_all(core, [one])
            assert answers[one.request_id].reused == 0
            found |= comparable(answers)
    return found


@pytest.mark.parametrize(("max_running", "chunk"), [(2, 1), (3, 7), (8, 16), (5, 50)])
def test_batches_and_chunks(model, alone, max_running, chunk):
    with recurrent_core(model, max_running=max_running, prefill_chunk=chunk) as core:
        assert comparable(answer_all(core, requests())) == alone


@pytest.mark.parametrize("slots", [1, 5, 12])
def test_slots_of_experts(model, alone, slots):
    with recurrent_core(model, expert_slots=slots) as core:
        for _ in range(2):
            assert comparable(answer_all(core, requests())) == alone


def test_a_prompt_said_again_computes_what_is_behind_its_last_whole_page(model, alone):
    with recurrent_core(model) as core:
        answer_all(core, requests())
        again = answer_all(core, requests())
    assert comparable(again) == alone
    for one in requests():
        whole = (len(one.prompt_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
        marks = [a.position for a in one.anchors if a.position < len(one.prompt_ids)]
        assert max(whole, *marks, 0) <= again[one.request_id].reused < len(one.prompt_ids)


def test_copies_share_their_sibling_s_state_and_scores_are_those_of_sampling(model):
    drawn = Sampling(temperature=0.0, logprobs=1)
    first = request("first", range(60), 6, sampling=drawn)
    copies = [request(f"copy{i}", range(60), 6, copies_of="first") for i in range(2)]
    with recurrent_core(model, prefill_chunk=25) as core:
        answers = answer_all(core, [first, *copies])
        tokens = answers["first"].tokens
        scored = answer_all(core, [request("s", [*range(60), *tokens], 1, prompt_logprobs=1)])["s"]
    for copy in copies:
        assert answers[copy.request_id].tokens == tokens
        assert answers[copy.request_id].reused == 48
    assert scored.reused == 0
    assert list(scored.prompt_logprobs[60:]) == answers["first"].logprobs


def test_conversations_go_on_from_where_they_ended_or_parted(model):
    rng = random.Random(3)
    first = [rng.randrange(VOCAB) for _ in range(40)]
    with recurrent_core(model) as core:
        answer = answer_all(core, [request("a", first, 20)])["a"].tokens
        turn = [*first, *answer, *(rng.randrange(VOCAB) for _ in range(9))]
        edited = [*first[:25], *(rng.randrange(VOCAB) for _ in range(30))]
        answers = {}
        for name, prompt in {"turn": turn, "edit": edited}.items():
            answers |= answer_all(core, [request(name, prompt, 8)])
        assert answers["turn"].reused == len(first) + len(answer) - 1
        assert answers["edit"].reused == 0  # no border before the edit
        marked = request("fork", [*first[:25], 2, 3], 8)
        answers |= answer_all(core, [marked])
        assert answers["fork"].reused == 25  # where the edit parted from the first
    with recurrent_core(model, kept=0) as core:
        for name, prompt in {"turn": turn, "edit": edited, "fork": marked.prompt_ids}.items():
            cold = answer_all(core, [request(name, prompt, 8)])[name]
            assert cold.tokens == answers[name].tokens and cold.reused == 0


def test_anchors_tell_which_have_a_state_and_lose_it_when_dropped(model):
    marks = (Anchor(21, ROLE), Anchor(33, ROLE))
    with recurrent_core(model) as core:
        answer_all(core, [request("a", range(50), 4, anchors=marks)])
        infos = {info.position: info for info in core.anchor_infos()}
        assert {21, 33} < infos.keys()
        assert all(info.state_bytes == core.kv.states.slot_bytes for info in infos.values())
        core.drop_anchors(None)
        assert not core.anchor_infos() and core.status().states_held == 0
        assert answer_all(core, [request("b", range(50), 4)])["b"].reused == 0


@pytest.mark.parametrize("seed", range(3))
def test_few_pages_and_few_states_evict_and_preempt(model, alone, seed):
    rng = random.Random(seed)
    arrive = {one.request_id: rng.randrange(20) for one in requests()}
    settings = {"num_pages": rng.choice([10, 13]), "prefill_chunk": 24, "max_running": 6}
    with recurrent_core(model, kept=rng.choice([1, 3, 8]), **settings) as core:
        for _ in range(2):
            assert comparable(answer_all(core, requests(), arrive=arrive)) == alone


@pytest.mark.parametrize("seed", range(2))
def test_clients_that_leave_free_their_states(model, alone, seed):
    rng = random.Random(seed)
    names = [one.request_id for one in requests()]
    arrive = {name: rng.randrange(10) for name in names}
    leave = {name: arrive[name] + rng.randrange(6) for name in rng.sample(names, 3)}
    with recurrent_core(model, kept=6, prefill_chunk=16) as core:
        answers = answer_all(core, requests(), arrive=arrive, leave=leave)
        check_states_at_rest(core)
    for name, answer in answers.items():
        if name not in leave or answer.finish is not None:
            assert comparable({name: answer})[name] == alone[name]
        else:
            assert answer.tokens == alone[name][0][: len(answer.tokens)]


def test_an_interrupted_step_changes_no_state(model, alone):
    with recurrent_core(model, prefill_chunk=20) as core:
        assert comparable(answer_interrupted(core, requests(), seed=5)) == alone


def test_a_damaged_state_fails_its_request_and_nothing_of_it_is_used_again(model, alone):
    one = next(r for r in requests() if len(r.prompt_ids) == 70)
    with recurrent_core(model, prefill_chunk=32) as core:
        core.add(one)
        core.step()
        for slot in range(core.kv.states.num_slots):
            core.kv.states.slot(slot).fill_(255)  # NaN, whatever the type
        outputs = []
        while core.has_work():
            outputs += core.step()
        assert [output.finish for output in outputs] == [Finish.ERROR]
        assert core.status().states_held == core.status().pages_held == 0
        assert comparable(answer_all(core, [one])) == {one.request_id: alone[one.request_id]}


@pytest.mark.parametrize(("whole_page", "reused"), [(True, 64), (False, 0)], ids=["kept", "gone"])
def test_without_the_page_that_its_state_lies_in_a_sequence_begins_before_it(
    model, alone, whole_page, reused
):
    one = next(r for r in requests() if len(r.prompt_ids) == 70)
    one = replace(one, anchors=(Anchor(69, ROLE),))
    with recurrent_core(model) as core:
        answer_all(core, [one])
        for kept in core.held.recurrence.store:
            if kept.position < 69 and not whole_page:
                core.held.recurrence.store.drop(kept)
        match = core.tree.match

        def whole_pages(*arguments):  # as when no page is free to copy into
            found = match(*arguments)
            core.pages.release((found.part.page,))
            return found._replace(part=None)

        core.tree.match = whole_pages
        answers = answer_all(core, [one])
    assert answers[one.request_id].reused == reused
    assert comparable(answers) == {one.request_id: alone[one.request_id]}


class TestBorders:
    def sequence(self, tokens: int, computed: int = 0, anchors: tuple[int, ...] = ()) -> Sequence:
        marks = tuple(Anchor(position, ROLE) for position in anchors)
        made = Sequence(request("s", range(tokens), anchors=marks), 1)
        made.computed = computed
        return made

    def test_the_last_whole_page_before_the_last_token_is_one(self):
        assert list(borders(self.sequence(100), 100, 0, PAGE_TOKENS)) == [96]
        assert list(borders(self.sequence(97), 97, 0, PAGE_TOKENS)) == [96]
        assert list(borders(self.sequence(96), 96, 0, PAGE_TOKENS)) == [80]

    def test_anchors_forks_and_a_grid_are(self):
        sequence = self.sequence(1000, 200, (100, 300, 700))
        found = borders(sequence, 800, 555, PAGE_TOKENS)
        assert list(found) == [GRID_TOKENS, 300, 2 * GRID_TOKENS, 555, 700, 3 * GRID_TOKENS]
        assert found[555] > found[300] > found[GRID_TOKENS] > 0
        assert list(borders(sequence, 256, 555, PAGE_TOKENS)) == [256]

    def test_what_is_computed_and_what_was_generated_are_not(self):
        sequence = self.sequence(300, 256)
        sequence.ids.extend(array("i", range(500)))
        assert list(borders(sequence, 800, 400, PAGE_TOKENS)) == [288]


def test_slots_suffice_for_every_sequence_however_many_are_kept():
    recurrence = Recurrence(LIVE_STATES * 2 + 1, 2, PAGE_TOKENS)
    sequences = [Sequence(request(str(i), range(2000 + i)), i) for i in range(2)]
    for sequence in sequences:
        assert recurrence.start(sequence, 0)
    while sequences[0].computed < 2000:
        moves = [recurrence.step(sequence, 250) for sequence in sequences]
        for sequence, move in zip(sequences, moves, strict=True):
            sequence.computed += 250
            recurrence.commit(sequence, move)
        assert len(recurrence.store) <= 1
    for sequence in sequences:
        recurrence.leave(sequence)
    assert recurrence.pool.held == len(recurrence.store) == 1
