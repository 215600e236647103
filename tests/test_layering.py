"""Imports point one way: http → text → schedule → engine → model → experts, kv → kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYWHERE = {"errors", "units", "config", "kinds", "log", "lazy"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "kv": {"kernels", "model.spec"},
    "experts": {"kernels", "model.spec"},
    "checkpoint": {"kernels", "experts", "model"},
    "model": {"kernels", "kv"},
    "memory": {"kernels", "kv", "model.spec"},
    "cuda": {"kernels", "experts", "kv", "model", "memory"},
    "schedule": {"engine.api"},
    "engine": {"cuda", "kernels", "kv", "experts", "model", "checkpoint", "memory", "schedule"},
    "text": {"engine.api", "kv.anchors"},
    "http": {"text", "engine.api", "lifecycle", "kv.anchors"},
    "control": {"engine.api", "kv.anchors", "lifecycle", "memory.change"},
    "lifecycle": {
        "engine",
        "text",
        "memory",
        "checkpoint",
        "model",
        "check",
        "kv.anchors",
        "cuda.early",
    },
    "check": {
        "cuda",
        "kernels",
        "kv",
        "model",
        "memory",
        "checkpoint",
        "text",
        "engine",
        "http.listening",
    },
    "profile": {"checkpoint", "control", "engine"},
    "systemd": set(),
    "pulse": {"lifecycle", "systemd"},
    "daemon": {"lifecycle", "http", "control", "pulse", "systemd"},
    "cli": {"daemon", "check", "profile", "lazy"},
    "lazy": set(),
    "__main__": {"cli"},
}


def imports_of(path: Path) -> set[str]:
    """Dotted names below ``ftd`` that a file imports, relative ones resolved."""
    names = all_imports(path, ["ftd", *path.relative_to(ROOT / "ftd").parent.parts])
    return {name.removeprefix("ftd.") for name in names if name.startswith("ftd.")}


def all_imports(path: Path, package: list[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def files_below(top: str) -> list[Path]:
    folders = [ROOT / top, *([ROOT / "ftd" / "kernels"] if top == "ftd" else [])]  # that is a link
    return [p for folder in folders for p in folder.rglob("*.py") if p.name != "__init__.py"]


def sources() -> list[Path]:
    return sorted(files_below("ftd"))


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path):
    home = path.relative_to(ROOT / "ftd").with_suffix("").parts[0]
    if home in EVERYWHERE:
        allowed: set[str] = set()
    else:
        allowed = MAY_IMPORT[home] | {home}
    for name in imports_of(path):
        top = name.split(".")[0]
        if top in EVERYWHERE or top == "__version__":
            continue
        assert any(name == a or name.startswith(a + ".") for a in allowed), f"{path}: {name}"


@pytest.mark.parametrize("top", ["ftd", "ftctl", "tools"])
def test_no_files_import_each_other_in_a_circle(top: str):
    """Not even for their types."""
    home = ROOT if top != "tools" else ROOT / top
    names = {p: ".".join(p.relative_to(home).with_suffix("").parts) for p in files_below(top)}
    graph = {}
    for path, name in names.items():
        used = all_imports(path, list(path.relative_to(home).parent.parts))
        used |= {n.rpartition(".")[0] for n in used}  # what was imported is a name in the file
        graph[name] = used & set(names.values()) - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which says who


@pytest.mark.parametrize("module", ["ftctl.cli", "ftd.control.protocol", "ftd.control.client"])
def test_the_control_client_starts_without_torch_and_aiohttp(module: str):
    probe = f"import sys, {module}; print(*{{'torch', 'aiohttp', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_nothing_of_ours_is_importable_as_top_level_kernels(tmp_path: Path):
    probe = (
        "from importlib.util import find_spec as find;"
        "print(find('kernels'), find('ftd.kernels.ops').name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", "ftd.kernels.ops"]


def test_every_word_of_the_layer_table_is_used():
    used: dict[str, set[str]] = {home: set() for home in MAY_IMPORT}
    for path in sources():
        home = path.relative_to(ROOT / "ftd").with_suffix("").parts[0]
        if home not in EVERYWHERE:
            used[home] |= imports_of(path)
    for home, allowed in MAY_IMPORT.items():
        assert [
            a for a in allowed if not any(f"{n}.".startswith(f"{a}.") for n in used[home])
        ] == []
        assert (ROOT / "ftd" / home).is_dir() or (ROOT / "ftd" / f"{home}.py").is_file(), home
