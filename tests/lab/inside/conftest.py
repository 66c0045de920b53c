"""What this lab has; every test begins and ends on an untuned host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

NET = Path("/sys/class/net")
# Written by labruns.py when the lab crashed: what had passed before.
PASSED = Path("/mnt/share/passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what had passed before this lab died and was booted again, and for LAB_TIER=core
    what only `make test-all` runs."""
    passed = set(PASSED.read_text().splitlines()) if PASSED.exists() else set()
    core_only = os.environ.get("LAB_TIER") == "core"

    def wanted(item: pytest.Item) -> bool:
        if core_only:
            mark = item.get_closest_marker("core")
            if mark is None or mark.args[0] not in (None, labhelp.codename()):
                return False
        return item.nodeid not in passed

    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once why a test failed: the other tests may take an hour, and be stopped."""
    if report.failed:
        print(f"\n{report.longreprtext}", flush=True)


def nic_irqs() -> list[int]:
    """Interrupts of the NICs below the routers; none with veth."""
    found = []
    for device in ("p0", "p1"):
        directory = NET / device / "device" / "msi_irqs"
        if directory.is_dir():
            found += [int(entry.name) for entry in directory.iterdir()]
    return sorted(found)


@pytest.fixture(scope="session")
def guests() -> list[LabGuest]:
    """Every router of the lab."""
    if not labhelp.GUESTS.exists():
        pytest.skip("not inside a lab: no /run/lab/guests")
    return labhelp.lab_guests()


@pytest.fixture(scope="session")
def libvirt_guest(guests: list[LabGuest]) -> LabGuest:
    """The first router that libvirt manages."""
    for guest in guests:
        if guest.kind == "libvirt":
            return guest
    pytest.skip("no libvirt guest in this lab")


@pytest.fixture(scope="session")
def plain_guest(guests: list[LabGuest]) -> LabGuest:
    """The router started without libvirt."""
    for guest in guests:
        if guest.kind == "qemu":
            return guest
    pytest.skip("no plain QEMU guest in this lab")


@pytest.fixture(scope="session")
def irq_cpus(guests: list[LabGuest]) -> set[int]:
    """The CPUs where packets arrive. Real interrupts are all put on CPU 0, so that
    CPUs are left for the guests; veth delivers where the generator runs, on CPU 0."""
    if labhelp.lab_cpus() < 3:
        pytest.skip("needs 3 CPUs: one for interrupts and two for guests")
    irqs = nic_irqs()
    if not irqs:
        return {0}
    for irq in irqs:
        Path(f"/proc/irq/{irq}/smp_affinity_list").write_text("0")
    # An interrupt moves when it next fires, and the one for link changes never does:
    # opening the device anew sets all of them up where they belong.
    for device in ("p0", "p1"):
        labhelp.sh("ip", "link", "set", device, "down")
        labhelp.sh("ip", "link", "set", device, "up")
    for irq in irqs:
        path = f"/proc/irq/{irq}/effective_affinity_list"
        labhelp.wait_for(lambda path=path: labhelp.text(path) == "0", f"{path} is 0")
    for guest in guests:
        labhelp.sh("lab-wait-forward", guest.name)
    return {0}


@pytest.fixture(autouse=True)
def untuned(guests: list[LabGuest]) -> Iterator[None]:
    """Nothing of ours on the host, before and after, and every router runs."""
    labhelp.reset()
    for guest in guests:
        if not guest.runs:
            labhelp.start_guest(guest)
    yield
    labhelp.reset()


@pytest.fixture
def restored(untuned: None) -> Iterator[None]:
    """The test fails when the host is not byte for byte what it was.

    Reads with hoststate, not with the package under test, after the daemon's stop.
    """
    before = hoststate.capture()
    yield
    labhelp.reset()
    changed = hoststate.differences(before, hoststate.capture())
    assert changed == [], "\n".join(["not restored:", *changed])


@pytest.fixture
def tuned(restored: None, guests: list[LabGuest], irq_cpus: set[int]) -> set[int]:
    """The daemon runs with a policy for every guest; the CPUs of the interrupts."""
    labhelp.write_policies("auto")
    labhelp.start()
    return irq_cpus


class AtOnce:
    """Shows a failure when it happens: a lab may end before its tests do."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AtOnce(config))
    config.addinivalue_line("markers", "core(release): `make test` runs it, too")


def pytest_sessionfinish() -> None:
    """Whoever wonders later what took long finds the daemon's log beside the results."""
    log = labhelp.sh("journalctl", "-b", "-u", "vsrtune", "-o", "short-precise", check=False)
    if os.path.isdir("/mnt/share"):
        Path("/mnt/share/vsrtune.log").write_text(log.stdout)
