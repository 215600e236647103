"""How a captured decode step divides a layer's experts: what it shares, and the meaning in torch.

A route's expert is resident, or missed. Of m distinct missed ones the ``fetch_of[m]`` of highest
worth are read over the link where they lie, and those that are worth it are stored in a lent slot
on the way; the CPU computes the others where they lie and answers through the mailbox.

``fetch_of`` counts parts of experts, so one of them may be computed by both: the CPU takes its
first inner rows, which are rows of gate and up and columns of down, the link the others, and each
of its routes is the sum of the two products. It is not stored, since the link does not read all of
it. Sums are made in the order of k, whoever computed a route: nothing is approximated.

``kernels.triton.divide`` does the same in two launches beside those of the experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .activation import Activation
from .formats import ExpertLayout
from .ops import Ops
from .reference import expert_product

if TYPE_CHECKING:
    from .cpu.service import Mailbox

# what ``Shared.report`` begins with; the keys of stored experts follow
STORED, WANTED, FETCHED, ON_CPU, KEYS = range(5)


@dataclass(slots=True)
class Shared:
    """What the layers of captured steps read and leave behind, at fixed addresses.

    Args:
        slots: [begin, end) of the addresses that a resident expert may have.
        mailbox: None: the CPU computes nothing, and every missed expert is fetched.
    """

    address: torch.Tensor  # [L, E] int64: slot or host record
    worth: torch.Tensor  # [L, E] float32: of a slot; negative: not worth storing, at -worth - 1
    fetch_of: torch.Tensor  # [N, M + 1] int32 parts: for up to 2^n rows; more than M missed: as M
    lent: torch.Tensor  # [R] int64: addresses of the slots that this step may fill; 0: none
    fill: torch.Tensor  # [E] int64: of the running layer
    report: torch.Tensor  # [KEYS + R] int32
    blank: torch.Tensor  # what it is set to at each step's start
    asked: torch.Tensor  # [2] int32: whether the running layer asked the CPU; the last number rung
    both: torch.Tensor  # [2] int32: the running layer's expert of both or -1, rows of the CPU
    slots: tuple[int, int]
    mailbox: Mailbox | None
    parts: int  # of an expert
    part_rows: int  # inner rows of each but the last

    def fetch_of_rows(self, rows: int) -> torch.Tensor:  # [M + 1]
        return self.fetch_of[min((rows - 1).bit_length(), len(self.fetch_of) - 1)]

    def begin_step(self) -> None:
        self.report.copy_(self.blank)


def new_shared(
    address: torch.Tensor,
    lent: int,
    slots: tuple[int, int],
    mailbox: Mailbox | None,
    layout: ExpertLayout | None = None,  # None: experts are not divided
) -> Shared:
    """For up to 8 rows. Every miss takes the link until ``fetch_of`` says otherwise."""
    device, experts = address.device, address.shape[1]
    parts = layout.parts if layout else 1
    every = parts * torch.arange(experts + 1, dtype=torch.int32, device=device)
    blank = torch.full((KEYS + lent,), -1, dtype=torch.int32, device=device)
    blank[:KEYS] = 0
    return Shared(
        address=address,
        worth=torch.zeros(address.shape, device=device),
        fetch_of=every.repeat(4, 1),
        lent=torch.zeros(lent, dtype=torch.int64, device=device),
        fill=torch.zeros(experts, dtype=torch.int64, device=device),
        report=blank.clone(),
        blank=blank,
        asked=torch.zeros(2, dtype=torch.int32, device=device),
        both=torch.tensor([-1, 0], dtype=torch.int32, device=device),
        slots=slots,
        mailbox=mailbox,
        parts=parts,
        part_rows=layout.part_rows if layout else 0,
    )


def divide(
    shared: Shared,
    row: int,  # of the layer
    ids: torch.Tensor,  # [T, K] int32, the router's choice; -1: none
    active: torch.Tensor,  # [T] bool
    x: torch.Tensor,  # [T, H] act
    log: torch.Tensor,  # [T, K] int32, written: the choice, -1 in rows not in use
    here: torch.Tensor,  # [T, K] int32, written: what the GPU computes; -1: not in use, or the CPU
) -> None:
    """Write ``log``, ``here``, ``shared.fill`` and ``shared.both``; ask the CPU for the rest."""
    log.copy_(torch.where(active[:, None], ids, -1))
    address, worth = shared.address[row].tolist(), shared.worth[row].tolist()
    begin, end = shared.slots
    used = sorted({e for e in log.flatten().tolist() if e >= 0})
    missed = [e for e in used if not begin <= address[e] < end]
    parts = len(missed) * shared.parts
    if shared.mailbox is not None:
        fetch_of = shared.fetch_of_rows(len(ids))
        parts = min(parts, int(fetch_of[min(len(missed), len(fetch_of) - 1)]))
    whole, part = divmod(parts, shared.parts)
    missed.sort(key=lambda e: (-_worth(worth[e]), e))
    shared.report[FETCHED] += parts
    shared.report[ON_CPU] += len(missed) * shared.parts - parts
    shared.both[0] = missed[whole] if part else -1
    shared.both[1] = (shared.parts - part) * shared.part_rows if part else 0
    _store(shared, row, [e for e in missed[:whole] if worth[e] >= 0])
    here.copy_(_without(log, missed[whole + (part > 0) :]))
    shared.asked[0] = whole < len(missed)
    if shared.asked[0]:
        _ask(shared, row, _without(log, set(used) - set(missed[whole:])), x)


def choose_and_divide(
    ops: Ops,
    shared: Shared,
    row: int,
    logits: torch.Tensor,  # [1, E] float32, of the router
    normalise: bool,
    active: torch.Tensor,  # [1] bool
    x: torch.Tensor,  # [1, H] act
    log: torch.Tensor,  # [1, K] int32, written
    here: torch.Tensor,  # [1, K] int32, written
) -> torch.Tensor:  # [1, K] float32: the weights of the choice
    """``Ops.route`` of one row, then ``divide``."""
    ids, weights = ops.route(logits, log.shape[1], normalise, active)
    divide(shared, row, ids, active, x, log, here)
    return weights


def merge(
    shared: Shared,
    y: torch.Tensor,  # [T * K, H] float32: of the routes in ``here``
    log: torch.Tensor,  # [T, K] int32
    here: torch.Tensor,  # [T, K] int32
    weights: torch.Tensor,  # [T, K] float32
) -> torch.Tensor:  # [T, H] float32
    """Σ_k weights · y, after the CPU's answer has come if it was asked."""
    tokens, routes = log.shape
    parts = y.view(tokens, routes, -1)
    if shared.mailbox is not None and shared.asked[0]:
        while int(shared.mailbox.answer) != int(shared.asked[1]):
            pass
        theirs = shared.mailbox.y.view(-1)[: parts.numel()].view(parts.shape)
        asked = (here < 0) | (log == shared.both[0])
        parts = torch.where((here >= 0)[..., None], parts, 0.0)
        parts = parts + torch.where(asked[..., None], theirs, 0.0)
    return add_up(parts, log, weights)


def _without(ids: torch.Tensor, experts: Iterable[int]) -> torch.Tensor:
    return ids.masked_fill(torch.isin(ids, torch.tensor([*experts], dtype=torch.int32)), -1)


def _worth(stored: float) -> float:
    return stored if stored >= 0 else -stored - 1


def _store(shared: Shared, row: int, admitted: Sequence[int]) -> None:
    """Hand out lent slots, best first."""
    shared.fill.zero_()
    taken = int(shared.report[STORED])
    for expert, place in zip(admitted, range(taken, len(shared.lent))):
        if shared.lent[place]:
            shared.fill[expert] = shared.lent[place]
            shared.report[KEYS + place] = row * shared.address.shape[1] + expert
            shared.report[STORED] += 1
    shared.report[WANTED] += len(admitted)


def _ask(shared: Shared, row: int, ids: torch.Tensor, x: torch.Tensor) -> None:
    box = shared.mailbox
    assert box is not None
    box.ids.view(-1)[: ids.numel()] = ids.flatten()
    box.x[: len(x)] = x
    box.head[:2] = torch.tensor([row, len(x)])
    box.head[2:] = shared.both
    shared.asked[1] += 1
    box.bell.copy_(shared.asked[1:])


def products(
    ops: Ops,
    shared: Shared,
    row: int,
    x: torch.Tensor,  # [T, H] act
    here: torch.Tensor,  # [T, K] int32
    layout: ExpertLayout,
    activation: Activation,
) -> torch.Tensor:  # [T * K, H] float32
    """Each route by itself; records that ``shared.fill`` names are stored."""
    address = shared.address[row]
    for expert in torch.nonzero(shared.fill).flatten().tolist():
        ctypes.memmove(int(shared.fill[expert]), int(address[expert]), layout.record_bytes)
    y = route_products(ops, x, here, address, layout, activation)
    expert, begin = shared.both.tolist()
    of_both = torch.nonzero(here.flatten() == expert).flatten() if expert >= 0 else ()
    for route in of_both:
        token = x[route // here.shape[1]][None]
        y[route] = expert_product(token, int(address[expert]), layout, activation, begin)[0]
    return y


def route_products(
    ops: Ops,
    x: torch.Tensor,  # [T, H] act
    ids: torch.Tensor,  # [T, K] int32
    address: torch.Tensor,  # [E] int64
    layout: ExpertLayout,
    activation: Activation,
) -> torch.Tensor:  # [T * K, H] float32
    """What each route adds, without its weight; zero where none is in use."""
    each, routes = x.repeat_interleave(ids.shape[1], 0), ids.reshape(-1, 1)
    return ops.moe(each, routes, torch.ones(routes.shape), address, layout, activation)


def add_up(
    y: torch.Tensor,  # [T * K, H] or [T, K, H] float32
    ids: torch.Tensor,  # [T, K] int32
    weights: torch.Tensor,  # [T, K] float32
) -> torch.Tensor:  # [T, H] float32
    """Multiplied and added in the order of k with one rounding, as kernels do."""
    parts = y.view(*ids.shape, -1)
    total = torch.zeros(len(ids), parts.shape[2])
    for k in range(ids.shape[1]):
        product = weights[:, k, None].double() * parts[:, k].double()
        used = (ids[:, k] >= 0)[:, None]
        total = torch.where(used, (total.double() + product).float(), total)
    return total
