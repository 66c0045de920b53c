"""The walls between the rooms (docs/architecture.md): who may import whom."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vsrtune"

PURE = {
    "__init__", "actions", "attach_model", "attach_plan", "attach_steps", "attach_wishes", "clone_devices", "clone_disks", "clone_model", "clone_plan", "clone_steps", "closing", "codec", "cpu_limits", "cpuset", "deadline", "doctor_guests", "doctor_host", "doctor_model", "doctor_module", "domain_books", "domain_build", "domain_checks", "domain_clone", "domains", "doctor_checks", "drift", "durations", "errors", "exit_codes", "group_links", "group_members", "group_msr", "group_plan", "group_rulebook", "group_rules", "group_scale", "group_schema", "group_status", "groups", "interface_xml", "irq_choice", "irq_plan", "look", "model", "napi_plan", "nic_settings", "obstacles", "page_html", "page_markup", "page_model", "page_style", "placement", "plan_state", "bounded",
    "plan_alone", "plan_build", "printable", "plan_checks", "plan_warnings", "planner", "policy", "policy_budget", "policy_drift", "policy_init", "policy_irq", "policy_match", "cpuset_groups", "part",
    "policy_messages", "policy_schema", "policy_yaml", "projection", "qemu_args", "quarrels", "report", "queue_control", "queue_windows", "root_domains", "rr_timeslice", "rtnl_model", "softirq", "starvation", "standstill", "stats", "stepdown", "tap_counters", "watched", "wishes", "workers",
    "balancing", "carried", "choosing", "crowding", "load_windows", "top_frame", "top_model", "top_tables", "trial", "placement_board", "placement_exact", "placement_search", "policy_roles",
}  # fmt: skip
READERS = {
    "_vendor", "attempts", "backends", "domain_process", "host_reader", "known_guests", "look_pass", "process_table", "rounds", "budget_use", "cgroup", "cpuset_tree", "deadline_books", "ethtool", "doctor_facts", "doctor_read", "guard_samples", "guests", "hostinfo", "irq", "napi", "neighbours", "net", "observe", "outage", "proc", "qmp", "queue_samples", "record", "recorded",
    "rootfs", "rtnl", "seen", "trace", "trust", "virt", "patience",
    "load_file", "load_meter", "top_sample",
}  # fmt: skip
WRITERS = {
    "attach", "attach_define", "attach_devices", "attach_errors", "attach_host", "attach_ledger", "attach_survey", "attach_sweep", "interrupts", "cgroup_writes", "clone_survey", "clone_switch", "brought", "comparing", "cpuset_clear",
    "domain_life", "durable", "errnos", "ethtool_flags", "executor", "forgotten", "hostcalls", "hostthread", "journal", "journal_lock", "journal_records",
    "ledger", "libvirt_pins", "link_writes", "live_domains", "nic_writes", "overlays", "sched_syscalls", "sysops",
}  # fmt: skip
# The rooms of the subpackage vsrtune.bench, divided in the same way.
BENCH_PURE = {
    "__init__", "accounting", "aggregate", "compare", "fairness", "generator", "interface_xml",
    "methods", "model", "pins", "points", "rate_search", "results", "runner", "schedule",
    "search", "spec", "spec_checks", "spec_schema", "streams", "summaries", "tables",
}  # fmt: skip
BENCH_READERS = {"counters", "devices", "environment", "threads"}
BENCH_WRITERS = {
    "agent", "attach", "bridges", "cleaners", "commands", "edge_cleaners", "guard", "ledger",
    "netns", "pktgen", "probe", "put_back", "remote", "scaling", "sink", "tester",
}  # fmt: skip
PURE |= {f"bench.{name}" for name in BENCH_PURE}
READERS |= {f"bench.{name}" for name in BENCH_READERS}
WRITERS |= {f"bench.{name}" for name in BENCH_WRITERS}
# These hold tables and syscall wrappers and change nothing by themselves, or only files in
# which vsrtune remembers something.
SHARED_EDGE = {"durable", "errnos", "sched_syscalls"}
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

MODULES = sorted(
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")
)


def source(module: str) -> str:
    return (PACKAGE / f"{module.replace('.', '/')}.py").read_text()


def imports(module: str) -> set[str]:
    """Every module named in an import of ``module``, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module in ("vsrtune", "vsrtune.bench"):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return found


def own(module: str) -> set[str]:
    """The rooms of this package that ``module`` imports."""
    names = {n.removeprefix("vsrtune.") for n in imports(module) if n.startswith("vsrtune.")}
    names.discard("__version__")
    return {".".join(n.split(".")[: 2 if n.startswith("bench.") else 1]) for n in names}


def room(module: str) -> str:
    """pure, reader, writer or shell."""
    if module in PURE:
        return "pure"
    if module in READERS:
        return "reader"
    return "writer" if module in WRITERS else "shell"


@pytest.mark.parametrize("module", [m for m in MODULES if m in PURE])
def test_pure_imports_only_pure(module: str) -> None:
    assert own(module) <= PURE
    foreign = {n.split(".")[0] for n in imports(module)} - {"vsrtune"}
    assert foreign.isdisjoint(IMPURE_STDLIB)
    third_party = {"click", "libvirt", "psutil", "pyroute2", "qemu", "rich", "systemd"}
    third_party |= {"matplotlib", "nftables", "prometheus_client"}
    assert foreign.isdisjoint(third_party)
    if not module.startswith("policy"):
        assert foreign.isdisjoint(PURE_LIBRARIES)


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in ("reader", "writer")])
def test_edge_never_imports_shell(module: str) -> None:
    assert {m for m in own(module) if room(m) == "shell"} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m in READERS])
def test_readers_never_import_writers(module: str) -> None:
    assert own(module) & (WRITERS - SHARED_EDGE) == set()


def test_every_room_named_here_exists() -> None:
    assert (PURE | READERS | WRITERS) - set(MODULES) == set()


def test_the_documented_table_is_this_one() -> None:
    """docs/architecture.md names every module in the row of its room."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    told = {cell.strip().split(":")[0]: names.strip(" `").split() for cell, names in rows}
    rooms = {"pure": "pure", "edge, reading": "reader", "edge, writing": "writer", "shell": "shell"}
    for label, name in rooms.items():
        for prefix, row in (("", label), ("bench.", f"bench, {label}")):
            here = {
                m.removeprefix(prefix) for m in MODULES
                if room(m) == name and m.startswith("bench.") == bool(prefix)
            }  # fmt: skip
            assert here - {"__init__", "__main__"} == set(told[row])
            assert told[row] == sorted(told[row])


@pytest.mark.parametrize("module", MODULES)
def test_module_stays_readable(module: str) -> None:
    lines = source(module).count("\n")
    assert lines <= 600, f"{module}.py has {lines} lines: look for the second subject in it"


# Every way in which the standard library hands a text to a shell.
SHELLS = {
    ("os", "system"), ("os", "popen"), ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"), ("asyncio", "create_subprocess_shell"),
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_no_shell(module: str) -> None:
    """No text becomes a shell's command: names of guests and devices stand in our commands."""
    for node in ast.walk(ast.parse(source(module))):
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
        for node in ast.walk(ast.parse(source(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and re.fullmatch(r"VSRTUNE_[A-Z_]+", node.value)
    }  # fmt: skip
    assert found == told
