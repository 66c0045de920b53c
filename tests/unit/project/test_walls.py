"""The floor plan (docs/architecture.md): who may import whom, and how full a folder may be."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "vsrtune"

# From below: a package imports only from lines above its own here.
FLOORS = (
    ("core",),
    ("model",),
    ("policy", "host"),
    ("plan", "observe"),
    ("execute",),
    ("attach",),
    ("group",),
    ("doctor", "views"),
    ("daemon",),
    ("cli", "bench"),
)
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
# The command line has the router tester as one of its subcommands.
SIDEWAYS = {("cli", "bench"), ("bench", "cli")}
WALLS = ("pure", "reading", "writing", "shell")
IMPURE = {
    "asyncio", "ctypes", "fcntl", "logging", "os", "pathlib", "select", "signal", "socket",
    "subprocess", "threading", "time",
    "click", "libvirt", "matplotlib", "nftables", "psutil", "pyroute2", "qemu", "rich", "systemd",
}  # fmt: skip
# These read policies; every other pure module gets values.
PARSERS = {"jsonschema", "ruamel"}
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))
PLAIN = [m for m in MODULES if not m.endswith("__init__.py")]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


def package(module: str) -> str:
    """``plan`` of ``plan/deadline/partitions.py``; "" of what stands at the top."""
    return module.partition("/")[0] if "/" in module else ""


@cache
def imports(module: str, *, late: bool = True) -> frozenset[str]:
    """Every module that ``module`` imports, with ``late`` those inside functions included:
    dotted names of foreign ones, paths of ours."""
    found: set[str] = set()
    for node in ast.walk(tree(module)) if late else tree(module).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = name.removeprefix("vsrtune.").replace(".", "/") + ".py"
            if not name.startswith("vsrtune"):
                found.add(name)
            elif path in MODULES:
                found.add(path)
    return frozenset(found)


@cache
def wall(folder: str) -> str:
    """The wall of the nearest package at or above ``folder`` that names one."""
    while folder:
        text = ast.get_docstring(tree(f"{folder}/__init__.py")) or ""
        match = re.match(r"Wall: (\w+)\. \S", text)
        if match is not None:
            return match[1]
        folder = folder.rpartition("/")[0]
    return ""


@pytest.mark.parametrize("name", sorted(LEVEL))
def test_package_states_its_wall(name: str) -> None:
    assert wall(name) in WALLS


def test_every_package_is_on_the_floor_plan() -> None:
    assert {package(m) for m in MODULES} == {*LEVEL, ""}
    assert [m for m in PLAIN if not package(m)] == ["__main__.py"]


@pytest.mark.parametrize("module", [m for m in MODULES if package(m)])
def test_walls_imports_come_from_below(module: str) -> None:
    here = package(module)
    wrong = [
        other
        for other in sorted(imports(module))
        if (there := package(other)) in LEVEL
        and there != here
        and LEVEL[there] >= LEVEL[here]
        and (here, there) not in SIDEWAYS
    ]
    assert wrong == [], f"{module} is on a floor below"


def test_walls_no_module_needs_another_that_needs_it() -> None:
    """Otherwise one of the two cannot be imported first, and a command that does so fails."""
    needs = {m: imports(m, late=False).intersection(MODULES) for m in MODULES}
    list(TopologicalSorter(needs).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("module", [m for m in MODULES if wall(m.rpartition("/")[0]) == "pure"])
def test_walls_pure_has_no_io_clock_or_environment(module: str) -> None:
    foreign = {n.partition(".")[0] for n in imports(module) if not n.endswith(".py")}
    assert foreign.isdisjoint(IMPURE)
    if package(module) != "policy":
        assert foreign.isdisjoint(PARSERS)
    ours = {m for m in imports(module) if m.endswith(".py") and package(m)}
    assert {m for m in ours if wall(m.rpartition("/")[0]) != "pure"} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if wall(m.rpartition("/")[0]) == "reading"])
def test_walls_reading_never_writes(module: str) -> None:
    ours = {m for m in imports(module) if m.endswith(".py") and package(m)}
    assert {m for m in ours if wall(m.rpartition("/")[0]) in ("writing", "shell")} == set()


def test_folders_are_not_full() -> None:
    counts = Counter(m.rpartition("/")[0] for m in PLAIN)
    assert {folder: n for folder, n in counts.items() if n > 15} == {}
    assert len({package(m) for m in MODULES} - {""}) <= 14


def test_modules_are_neither_too_long_nor_too_small() -> None:
    """A module of a few lines that one other imports belongs into that one."""
    lines = {m: (PACKAGE / m).read_text().count("\n") for m in PLAIN}
    assert {m: n for m, n in lines.items() if n > 640} == {}
    importers = defaultdict(set)
    for module in MODULES:
        for other in imports(module):
            importers[other].add(module)
    assert {m for m, n in lines.items() if n < 60 and len(importers[m]) == 1} == set()


def test_class_names_are_unique() -> None:
    found = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


# Every way in which the standard library hands a text to a shell.
SHELLS = {
    ("os", "system"), ("os", "popen"), ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"), ("asyncio", "create_subprocess_shell"),
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_no_shell(module: str) -> None:
    """No text becomes a shell's command: names of guests and devices stand in our commands."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in SHELLS, node.lineno
        if isinstance(node, ast.keyword) and node.arg == "shell":
            raise AssertionError(f"shell= in line {node.value.lineno}")
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
            first = node.elts[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                assert first.value.rpartition("/")[2] not in ("sh", "bash", "dash"), first.lineno


def test_every_variable_that_is_read_is_one_that_the_manual_explains() -> None:
    """A hook for tests in the environment would be one for whoever can set it."""
    text = (PACKAGE.parent / "docs" / "man" / "vsrtune.8").read_text()
    told = set(re.findall(r"^\\fB(VSRTUNE_[A-Z_]+)\\fR$", text, re.MULTILINE))
    found = {
        node.value
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and re.fullmatch(r"VSRTUNE_[A-Z_]+", node.value)
    }  # fmt: skip
    assert found == told
