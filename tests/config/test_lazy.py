"""A module that is put off is loaded when something of it is asked for, and is then itself."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest

from ftd.lazy import put_off


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "late_package"
    root.mkdir()
    (root / "__init__.py").write_text("from late_package.part import five\nloaded = True\n")
    (root / "part.py").write_text("import late_package\nfive = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("late_package", "late_package.part"):
        sys.modules.pop(name, None)


def run(code):
    scope = {}
    exec(dedent(code), scope)  # imports as they stand in a module
    return scope


@pytest.mark.usefixtures("package")
def test_an_import_loads_nothing_and_a_look_at_it_all():
    put_off("late_package")
    module = run("import late_package")["late_package"]
    assert "late_package.part" not in sys.modules and "loaded" not in vars(module)
    assert module.five == 5 and module.loaded
    assert module is sys.modules["late_package"] and type(module) is type(sys)
    with pytest.raises(AttributeError):
        module.six  # noqa: B018


@pytest.mark.usefixtures("package")
def test_importing_a_part_loads_the_whole_first():
    put_off("late_package")
    assert run("import late_package.part as part")["part"].five == 5
    assert sys.modules["late_package"].loaded


@pytest.mark.usefixtures("package")
def test_what_is_loaded_or_missing_stays_so():
    module = run("import late_package")["late_package"]
    put_off("late_package")
    assert sys.modules["late_package"] is module and module.loaded
    put_off("no_such_package")
    assert "no_such_package" not in sys.modules
