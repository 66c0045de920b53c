"""The walls between the rooms (docs/architecture.md): who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vsrtune"

PURE = {
    "__init__", "actions", "codec", "cpuset", "errors", "irq_choice", "model", "placement",
    "plan_build", "plan_checks", "plan_warnings", "planner", "policy", "policy_match",
    "policy_messages", "policy_schema", "policy_yaml", "projection", "qemu_args", "report",
    "softirq", "stats", "wishes", "workers",
}  # fmt: skip
READERS = {
    "_vendor", "cgroup", "guests", "hostinfo", "irq", "neighbours", "net", "observe", "proc", "qmp", "record",
    "rootfs", "seen", "trace", "virt",
}  # fmt: skip
WRITERS = {
    "cpuset_clear", "errnos", "executor", "hostcalls", "hostthread", "journal", "journal_records",
    "libvirt_pins", "sched_syscalls", "sysops",
}  # fmt: skip
# These hold tables and syscall wrappers and change nothing by themselves.
SHARED_EDGE = {"errnos", "sched_syscalls"}
PURE_LIBRARIES = {"jsonschema", "ruamel"}
IMPURE_STDLIB = {
    "asyncio",
    "os",
    "pathlib",
    "socket",
    "subprocess",
    "time",
    "logging",
    "ctypes",
}

MODULES = sorted(p.stem for p in PACKAGE.glob("*.py"))


def imports(module: str) -> set[str]:
    """Every module named in an import of ``module``, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "vsrtune":
                found.update(f"vsrtune.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return found


def own(module: str) -> set[str]:
    """The rooms of this package that ``module`` imports."""
    return {n.split(".")[1] for n in imports(module) if n.startswith("vsrtune.")}


def room(module: str) -> str:
    """pure, reader, writer or shell."""
    if module in PURE:
        return "pure"
    if module in READERS:
        return "reader"
    return "writer" if module in WRITERS else "shell"


@pytest.mark.parametrize("module", [m for m in MODULES if m in PURE])
def test_pure_imports_only_pure(module: str) -> None:
    assert own(module) - {"__version__"} <= PURE
    foreign = {n.split(".")[0] for n in imports(module)} - {"vsrtune"}
    assert foreign.isdisjoint(IMPURE_STDLIB)
    third_party = {"click", "libvirt", "psutil", "pyroute2", "qemu", "rich", "systemd"}
    assert foreign.isdisjoint(third_party | {"prometheus_client"})
    if not module.startswith("policy"):
        assert foreign.isdisjoint(PURE_LIBRARIES)


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in ("reader", "writer")])
def test_edge_never_imports_shell(module: str) -> None:
    assert {m for m in own(module) if room(m) == "shell"} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m in READERS])
def test_readers_never_import_writers(module: str) -> None:
    assert own(module) & (WRITERS - SHARED_EDGE) == set()


@pytest.mark.parametrize("module", MODULES)
def test_module_stays_readable(module: str) -> None:
    lines = (PACKAGE / f"{module}.py").read_text().count("\n")
    assert lines <= 450, f"{module}.py has {lines} lines: look for the second subject in it"
