"""Kernels that start before earlier ones have ended keep the rules of ``kernels.triton.launch``."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ftd.kernels.triton import launch

FOLDER = Path(launch.__file__).parent
# What is there when a step begins, by the names of kernels' arguments.
WEIGHTS = {"weight", "bias", "q_norm", "k_norm", "data"}
# What is there before the embedding, which torch launches: it waits for all before it.
PLACES = {"position", "sequence", "page_table"}
LOADS = ("load", "load_units", "load_scales")


def chained_kernels(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and "CHAINED" in [a.arg for a in node.args.args]:
            yield node


def is_wait(node: ast.stmt) -> bool:
    return ast.unparse(node) == "wait_for_earlier(CHAINED)"


def before_waiting(kernel: ast.FunctionDef) -> list[ast.stmt]:
    """What runs before the wait: at the top level, or in the first turn of a static loop there."""
    before: list[ast.stmt] = []
    for statement in kernel.body:
        if is_wait(statement):
            return before
        if isinstance(statement, ast.For) and "static_range(0, " in ast.unparse(statement.iter):
            for inner in statement.body:
                first = f"{ast.unparse(statement.target)} == 0"
                if isinstance(inner, ast.If) and ast.unparse(inner.test) == first:
                    assert is_wait(inner.body[0])
                    return before
                before.append(inner)
        before.append(statement)
    raise AssertionError(f"{kernel.name} does not wait in every program")


def check(kernel: ast.FunctionDef) -> None:
    name = kernel.name
    assert ast.unparse(kernel.body[0]) == "let_next_start(CHAINED)", name
    # capitals are sizes
    made_of = {a.arg: {a.arg} for a in kernel.args.args if not a.annotation and a.arg.islower()}

    def sources(expression: ast.AST) -> set[str]:
        names = [n.id for n in ast.walk(expression) if isinstance(n, ast.Name)]
        return set().union(*(made_of.get(n, set()) for n in names))

    for node in (inner for statement in before_waiting(kernel) for inner in ast.walk(statement)):
        assert not isinstance(node, ast.Return), f"{name} returns before it waits"
        if isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            made_of[target] = made_of.get(target, set()) | sources(node.value)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).removeprefix("tl.")
            assert called != "store" and "atomic" not in called, f"{name} stores before it waits"
            read = sources(node.args[0]) if called in LOADS else set()
            assert read <= WEIGHTS | PLACES, f"{name} loads {read} before it waits"


KERNELS = [
    pytest.param(kernel, id=f"{file.stem}-{kernel.name}")
    for file in sorted(FOLDER.glob("*.py"))
    for kernel in chained_kernels(file.read_text())
    if file.stem != "launch" and "prefetch" not in kernel.name  # which kernels call
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_waits_before_it_touches_what_others_write(kernel):
    check(kernel)


def test_all_kernels_of_a_step_are_chained():
    """One that is not would be right, and slow; those named here are of prompts."""
    of_prompts = {"delta", "group", "moe_prefill", "pull"}
    chained = {parameter.values[0].name for parameter in KERNELS}
    for file in FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if file.stem in of_prompts or not isinstance(node, ast.FunctionDef):
                continue
            if node.name.endswith("_kernel") and node.name not in ("_kernel", "_dot_kernel"):
                assert node.name in chained, (file.name, node.name)
    assert len(KERNELS) > 20


def test_what_prefetches_gives_nothing_back():
    for file in FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "prefetch" in node.name:
                returns = [n for n in ast.walk(node) if isinstance(n, ast.Return)]
                assert not returns and "store" not in ast.unparse(node), node.name


def test_only_launch_says_how_to_launch():
    for file in FOLDER.glob("*.py"):
        assert file.stem == "launch" or "launch_pdl" not in file.read_text(), file


BROKEN = {
    "no wait": "y = tl.load(x)",
    "some programs do not wait": "if tl.program_id(0) == 0:\n  wait_for_earlier(CHAINED)",
    "a store": "tl.store(y, 1)\n wait_for_earlier(CHAINED)",
    "a load": "at = x + 1\n v = tl.load(at + 1)\n wait_for_earlier(CHAINED)",
    "an end": "if N == 0:\n  return\n wait_for_earlier(CHAINED)",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_a_kernel_that_breaks_a_rule_is_noticed(body):
    head = "def _some_kernel(x, weight, y, N, CHAINED: tl.constexpr):\n let_next_start(CHAINED)\n "
    (sound,) = chained_kernels(head + "w = tl.load(weight + N)\n wait_for_earlier(CHAINED)")
    check(sound)
    (broken,) = chained_kernels(head + body)
    with pytest.raises(AssertionError):
        check(broken)


def test_nothing_is_chained_without_a_gpu():
    assert launch.chained(torch.empty(1)) == {"CHAINED": False}


class Driver:
    """libcuda, as far as it is asked."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, to) -> int:
        to._obj.value = self.version
        return 0


def test_the_generation_and_the_driver_decide(monkeypatch):
    def can(capability: tuple[int, int], driver: int) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": Driver(driver)}.__getitem__)
        return launch.can_chain.__wrapped__(torch.device("cuda:0"))

    assert can((9, 0), 13000) and can((12, 0), 12030)
    assert not can((8, 9), 13000) and not can((9, 0), 12020)


def test_no_driver_is_an_old_one(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert launch.driver_version() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_of_this_machine_is_asked():
    device = torch.device("cuda:0")
    assert launch.driver_version() >= 11000
    assert launch.can_chain(device) == (
        torch.cuda.get_device_capability(device) >= (9, 0) and launch.driver_version() >= 12030
    )
