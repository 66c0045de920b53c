"""What `vsrtune doctor` finds in a host and its guests: every check on a host that has its trap
and on one that has not, and on the recorded hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_hosts
from hosttree import HostTree
from planning_samples import (
    FIFO_10,
    change,
    change_one,
    cpus,
    host,
    macvtap,
    nic,
    router,
    snapshot,
    with_cpusets,
)
from shell_samples import policies

from vsrtune.cli.doctor import OF_HOST, check_all, traps
from vsrtune.cli.main import run as command
from vsrtune.core.exit_codes import ExitCode
from vsrtune.doctor.facts.host import parse_flags, read_facts, tuned_writes
from vsrtune.doctor.model import Case, Facts, Severity, exit_code, name_of, run
from vsrtune.host.netdev import parse_softnet
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Confidence, Role, Sched, SchedClass
from vsrtune.model.host import Competitor, DeadlineCpu, Host
from vsrtune.model.snapshot import Problem, Snapshot
from vsrtune.plan.interrupt_cpus import BRIDGE_HINT

VR1 = router()
BUDGET = Sched(SchedClass.DEADLINE, 0, 0, True, 8_000_000, 10_000_000, 10_000_000)
FINE_FACTS = Facts(
    rt_group_sched="",
    version="#1 SMP PREEMPT_DYNAMIC Debian",
    fork_from_owner="1",
    default_qdisc="fq_codel",
    backlog=((0, 0), (1, 0)),
    isolated=cpus(""),
    managed_irqs=(),
    devices={"macvtap10": ("52:54:00:00:00:0a", True)},
    openers=(),
    books=tuple(DeadlineCpu(c, 4 * 52428, 52428) for c in range(4)),
)


def tuned() -> Snapshot:
    """A host whose guest is where it should be."""
    guest = change(VR1, Role.VCPU, affinity=cpus("1"), pin=cpus("1"))
    guest = change(guest, Role.VHOST, affinity=cpus("2"))
    return with_cpusets(snapshot(guest))


FINE = Case(tuned(), FINE_FACTS)


def of_host(**more: object) -> Case:
    """FINE with parts of the host changed."""
    seen = FINE.snapshot
    return replace(FINE, snapshot=replace(seen, host=replace(seen.host, **more)))  # type: ignore[arg-type]


def facts(**more: object) -> Case:
    """FINE with other facts."""
    return replace(FINE, facts=replace(FINE_FACTS, **more))  # type: ignore[arg-type]


def guests(*found: object, on: Host | None = None) -> Case:
    """These guests on FINE's facts."""
    return replace(FINE, snapshot=with_cpusets(snapshot(*found, on=on)))  # type: ignore[arg-type]


def group(path: str, partition: str) -> CpusetGroup:
    return CpusetGroup(path, "3", cpus("3"), partition, "3")


ON_IRQ = change_one(VR1, 1001, sched=FIFO_10)
# Ordinary ksoftirqd beside realtime threads, before 6.5.
BELOW = guests(
    change(VR1, Role.VHOST, sched=FIFO_10, affinity=cpus("1")),
    on=host(softirq={1: Sched()}),
)
BELOW = replace(
    BELOW, snapshot=replace(BELOW.snapshot, host=replace(BELOW.snapshot.host, kernel="6.1.0"))
)
NO_VHOST = router(interfaces=(macvtap(10, vhost=False),))
EMULATOR_NARROW = change(VR1, Role.EMULATOR, cpuset_cpus="3", cpuset_effective=cpus("3"))
SHARED = (VR1, router("vr2", 2000, interfaces=VR1.interfaces))
PARTITION = CpusetGroup(
    "machine.slice/machine-qemu-1000-x.scope/libvirt/vcpu0", "1", cpus("1"), "root", "1"
)
TWO_ISOLATED = (group("a", "isolated"), replace(group("b", "isolated"), effective=cpus("2")))

NUMBERS = sorted(irq.number for nic in FINE.snapshot.host.nics for irq in nic.irqs)
BANS = " ".join(f"--banirq={number}" for number in sorted((5, *NUMBERS)))
BAN = f"echo 'IRQBALANCE_ARGS=\"{BANS}\"' >>/etc/default/irqbalance && systemctl restart irqbalance"

NO_LIBVIRT = replace(
    FINE,
    snapshot=replace(snapshot(), problems=(Problem("libvirt", "cannot connect"),)),
    policies=policies(),
)

BAD: list[tuple[str, Case, Severity, str]] = [
    (
        "observation",
        replace(FINE, snapshot=replace(tuned(), problems=(Problem("libvirt", "cannot connect"),))),
        Severity.WARNING,
        "cannot connect",
    ),
    ("observation", guests(replace(VR1, problems=("odd",))), Severity.WARNING, "odd"),
    (
        "observation",
        replace(
            FINE,
            snapshot=replace(
                snapshot(router(source="qemu")), problems=(Problem("libvirt", "cannot connect"),)
            ),
        ),
        Severity.INFO,
        "cannot connect",
    ),
    ("observation", replace(NO_LIBVIRT, policies=()), Severity.INFO, "cannot connect"),
    ("observation", NO_LIBVIRT, Severity.WARNING, "cannot connect"),
    ("kernel", of_host(kernel="5.10.0-9"), Severity.WARNING, "5.10.0-9"),
    ("kernel", of_host(kernel="6.1.0-50-amd64"), Severity.INFO, "before 6.2"),
    ("kernel", of_host(kernel="6.5.0"), Severity.INFO, "before 6.7"),
    ("cpus", guests(router(online="0"), on=host(1)), Severity.ERROR, "online: 0"),
    ("cpus", guests(router(online="0-1"), on=host(2)), Severity.INFO, "two CPUs"),
    ("isolated cpus", facts(isolated=cpus("2-3")), Severity.INFO, "isolated: 2-3"),
    ("isolated cpus", facts(isolated=cpus("2-3")), Severity.INFO, "write cpus.pool without these"),
    (
        "interrupts",
        guests(VR1, on=host(2, {"p0": "0", "p1": "1"})),
        Severity.WARNING,
        "effective_affinity_list: 1",
    ),
    ("interrupts", guests(VR1, on=host(nics={"p0": None, "p1": "0"})), Severity.INFO, "--trace"),
    (
        "interrupts",
        guests(VR1, on=host(nics=[nic("p0", None, driver="bridge"), nic("p1", "0")])),
        Severity.INFO,
        f"p0/device/msi_irqs: none | {BRIDGE_HINT}",
    ),
    (
        "managed interrupts",
        facts(managed_irqs=(tuned().host.nics[0].irqs[0].number,)),
        Severity.INFO,
        "stays on CPU 0",
    ),
    ("steering", of_host(nics=(nic("p0", "0", rps_cpus=cpus("2")),)), Severity.WARNING, "CPU 2"),
    (
        "steering",
        of_host(nics=(replace(nic("p0", "0", rps_cpus=cpus("2")), irqs=()),)),
        Severity.OK,
        "no RPS",
    ),
    ("steering", of_host(nics=(nic("p0", "0", threaded_napi=True),)), Severity.INFO, "threaded: 1"),
    ("backlog", facts(backlog=((0, 0), (3, 17))), Severity.WARNING, "CPU 3: 17"),
    (
        "neighbours",
        of_host(neighbours=(Competitor("irqbalance", 77, "rewrites", (5,)),)),
        Severity.WARNING,
        BAN,
    ),
    (
        "neighbours",
        of_host(neighbours=(Competitor("irqbalance", 77, "rewrites", (*NUMBERS,)),)),
        Severity.INFO,
        "/proc/77/comm",
    ),
    (
        "neighbours",
        of_host(neighbours=(Competitor("nohz_full", None, "CPUs 3"),)),
        Severity.INFO,
        "nohz_full",
    ),
    ("throttling", of_host(sched_rt_runtime_us=-1), Severity.WARNING, "sched_rt_runtime_us: -1"),
    (
        "throttling",
        guests(change(VR1, Role.VCPU, sched=BUDGET), on=host(rt_runtime=-1)),
        Severity.ERROR,
        "sched_rt_runtime_us: -1",
    ),
    ("throttling", of_host(sched_rt_runtime_us=0), Severity.ERROR, "no CPU time"),
    ("throttling", BELOW, Severity.WARNING, "for 50 ms at a time"),
    ("realtime groups", facts(rt_group_sched="/boot/config-x"), Severity.WARNING, "/boot/config-x"),
    (
        "kernel threads",
        facts(version="#1 SMP PREEMPT_RT Debian"),
        Severity.WARNING,
        "/proc/sys/kernel/version: #1 SMP PREEMPT_RT Debian",
    ),
    (
        "cpusets",
        guests(replace(VR1, threads=tuple(replace(t, cpuset_cpus=None) for t in VR1.threads))),
        Severity.WARNING,
        "without cgroup v2",
    ),
    (
        "cpusets",
        of_host(cpusets=(group("x", "root invalid (Cpu list in cpuset.cpus not exclusive)"),)),
        Severity.ERROR,
        "not exclusive",
    ),
    ("cpusets", of_host(cpusets=(group("others.slice", "root"),)), Severity.INFO, "others.slice"),
    ("cpusets", of_host(cpusets=TWO_ISOLATED), Severity.WARNING, "2 isolated partitions"),
    (
        "deadline bandwidth",
        facts(books=tuple(DeadlineCpu(c, 900_000, 52428) for c in range(4))),
        Severity.WARNING,
        "dl_bw->total_bw",
    ),
    ("qdisc", facts(default_qdisc="pfifo_fast"), Severity.INFO, "pfifo_fast"),
    ("vhost", guests(NO_VHOST), Severity.WARNING, "macvtap10 without vhost-net"),
    (
        "worker mapping",
        guests(change(VR1, Role.VHOST, confidence=Confidence.UNCERTAIN)),
        Severity.INFO,
        "tids 1021, 1022",
    ),
    ("emulator cgroup", guests(EMULATOR_NARROW), Severity.WARNING, "cpuset.cpus: 3"),
    (
        "queue length",
        guests(router(interfaces=(macvtap(10, txqueuelen=0),))),
        Severity.ERROR,
        "tx_queue_len: 0",
    ),
    (
        "queue length",
        guests(router(interfaces=(macvtap(10, txqueuelen=10000),))),
        Severity.WARNING,
        "10000",
    ),
    (
        "queue length",
        guests(router(interfaces=(macvtap(10, txqueuelen=20),))),
        Severity.INFO,
        "64 frames",
    ),
    (
        "devices",
        facts(devices={"macvtap10": ("52:54:00:00:00:0a", False)}),
        Severity.ERROR,
        "is down",
    ),
    (
        "devices",
        facts(devices={"macvtap10": ("52:54:00:00:00:ff", True)}),
        Severity.ERROR,
        "address 52:54:00:00:00:0a",
    ),
    ("stray opens", facts(openers=(("macvtap10", 4711, "cat"),)), Severity.WARNING, "4711"),
    ("shared devices", guests(*SHARED), Severity.INFO, "vr1, vr2 share macvtap10"),
    ("guest to guest", guests(VR1, router("vr2", 2000)), Severity.INFO, "vr1, vr2 stand on p0"),
    ("realtime", guests(ON_IRQ), Severity.ERROR, "thread 1001"),
    (
        "realtime",
        guests(change_one(VR1, 1001, sched=FIFO_10, affinity=cpus("1-3"))),
        Severity.WARNING,
        "every CPU",
    ),
    (
        "priorities",
        BELOW,
        Severity.WARNING,
        "ksoftirqd",
    ),
    (
        "libvirt pins",
        guests(change(VR1, Role.VCPU, pin=cpus("2"), affinity=cpus("1"))),
        Severity.WARNING,
        "Cpus_allowed_list: 1",
    ),
    (
        "pending",
        of_host(cpusets=(PARTITION,)),
        Severity.INFO,
        "/proc/1001/stat",
    ),
    ("untuned", guests(VR1), Severity.WARNING, "vsrtune policy init vr1"),
    (
        "numa",
        of_host(nics=tuple(replace(n, node=1) for n in FINE.snapshot.host.nics)),
        Severity.WARNING,
        "p0 is on NUMA node 1, its vcpus are on 0",
    ),
]


def found_by(name: str, case: Case) -> list[str]:
    """Level and text of a check's findings."""
    (check,) = [c for c in OF_HOST if name_of(c) == name]
    return [f"{f.level} {f.what} | {f.evidence} | {f.hint}" for f in run([check], case)]


@pytest.mark.parametrize(("name", "case", "level", "word"), BAD, ids=lambda x: str(x)[:30])
def test_a_trap_is_found(name: str, case: Case, level: Severity, word: str) -> None:
    texts = found_by(name, case)
    assert any(text.startswith(f"{level} ") and word in text for text in texts), texts


def test_a_fine_host_has_none_of_them() -> None:
    wrong = [f for f in check_all(FINE, None) if f.level is not Severity.OK]
    assert wrong == []
    assert exit_code(check_all(FINE, None)) == 0


def test_every_check_has_a_host_with_its_trap() -> None:
    assert {name_of(c) for c in OF_HOST} - {name for name, *_ in BAD} == {"vhost workers"}


def test_what_matters_most_comes_first_and_makes_the_exit_code() -> None:
    case = replace(guests(ON_IRQ), facts=replace(FINE_FACTS, backlog=((0, 5),)))
    findings = check_all(case, None)
    assert [f.level for f in findings[:2]] == [Severity.ERROR, Severity.WARNING]
    assert findings[-1].level is Severity.OK
    assert exit_code(findings) == ExitCode.FAILED
    assert exit_code(f for f in findings if f.level is not Severity.ERROR) == ExitCode.DIFFERS


def test_every_check_says_what_it_looks_for() -> None:
    for name, trap in traps():
        assert trap.endswith("."), name
    names = [name for name, _ in traps()]
    assert len(names) == len(set(names))


def test_problems_say_what_to_do_and_where_it_was_seen() -> None:
    for name, case, *_ in BAD:
        for finding in run([c for c in OF_HOST if name_of(c) == name], case):
            if finding.level in (Severity.WARNING, Severity.ERROR):
                assert finding.hint, (name, finding)


@pytest.mark.parametrize("recorded", recorded_hosts.FILES, ids=lambda path: path.stem)
def test_recorded_hosts(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were fit, and their routers untuned, which nobody can tell of one in a pod; what is not
    recorded is not judged."""
    untuned = recorded.stem != "trixie-kubevirt"
    assert command(["doctor", "--json", "--root", str(recorded)]) == (3 if untuned else 0)
    told = json.loads(capsys.readouterr().out)
    levels = {(f["check"], f["level"]) for f in told["findings"]}
    warned = [check for check, level in levels if level == "warning"]
    assert warned == ["untuned"] * untuned
    assert (told["worst"] == "warning") is untuned
    assert {"backlog", "realtime groups", "stray opens", "module"} & {c for c, _ in levels} == set()


class TestFacts:
    def test_softnet(self) -> None:
        new = "0a 0000001f 0 0 0 0 0 0 0 0 0 00000000 00000003\n"
        assert parse_softnet(new) == ((3, 31),)

    def test_flags(self) -> None:
        assert parse_flags("0x1003\n")
        assert not parse_flags("0x1002\n")

    @pytest.mark.parametrize(
        ("config", "line", "found"),
        [
            ("CONFIG_RT_GROUP_SCHED=y\n", "quiet", "/boot/config-6.12.0-test"),
            ("CONFIG_RT_GROUP_SCHED=y\n", "rt_group_sched=0", ""),
            ("# CONFIG_RT_GROUP_SCHED is not set\n", "quiet", ""),
            ("CONFIG_RT_GROUP_SCHED=y\nCONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y\n", "quiet", ""),
        ],
    )
    def test_of_the_kernel(self, config: str, line: str, found: str) -> None:
        tree = HostTree().host()
        tree.file("/boot/config-6.12.0-test", config).file("/proc/cmdline", line)
        tree.file("/proc/sys/kernel/version", "#1 SMP PREEMPT_RT\n")
        seen = read_facts(tree.root(), snapshot(VR1, on=replace(host(), kernel="6.12.0-test")))
        assert (seen.rt_group_sched, seen.version) == (found, "#1 SMP PREEMPT_RT")

    def test_of_devices_and_who_has_them_open(self) -> None:
        tree = HostTree().host()
        tap = f"/dev/tap{VR1.interfaces[0].ifindex}"
        for pid in (VR1.pid, 4711):
            tree.thread(pid, pid, "cat").fd(pid, 5, tap)
            tree.file(f"/proc/{pid}/comm", "cat\n")
        tree.fd(4711, 6, "/dev/tap9")
        tree.file("/sys/class/net/macvtap10/address", "52:54:00:00:00:0a\n")
        tree.file("/sys/class/net/macvtap10/flags", "0x1002\n")
        tree.file(f"/sys/kernel/debug/irq/irqs/{tuned().host.nics[0].irqs[0].number}",
                  "dstate:   0x0\n            IRQD_AFFINITY_MANAGED\n")  # fmt: skip
        found = read_facts(tree.root(), tuned())
        assert found.openers == (("macvtap10", 4711, "cat"),)
        assert found.devices == {"macvtap10": ("52:54:00:00:00:0a", False)}
        assert found.managed_irqs == (tuned().host.nics[0].irqs[0].number,)

    def test_nothing_can_be_read(self) -> None:
        found = read_facts(HostTree().root(), tuned())
        assert found == Facts()
        assert exit_code(check_all(Case(tuned(), found), None)) == 0


# -- TuneD

REALTIME = {
    "/usr/lib/tuned/throughput-performance/tuned.conf": "[cpu]\ngovernor=performance\n",
    "/usr/lib/tuned/virtual-host/tuned.conf": "[main]\ninclude=throughput-performance\n"
    "[sysctl]\nvm.dirty_background_ratio = 5\n",
    "/usr/lib/tuned/profiles/realtime/tuned.conf": "[main]\ninclude = virtual-host\n"
    "[sysctl]\nkernel.sched_rt_runtime_us = -1\n[scheduler]\nisolated_cores=${isolated_cores}\n"
    "[net]\nchannels=combined 4 # queues\n",
    "/usr/lib/tuned/profiles/realtime-virtual-host/tuned.conf": "[main]\ninclude=realtime\n"
    "[scheduler]\ngroup.rcuB=0:f:4:*:^.rcub\nps_blacklist=qemu-kvm\n",
}
# The profile that docs/doctor.md has operators write.
REMEDY = (
    (Path(__file__).parents[3] / "docs/doctor.md").read_text().split("END'\n")[1].split("END")[0]
)
WRITES = (
    "[net] channels", "[scheduler] group.rcuB", "[scheduler] isolated_cores",
    "[sysctl] kernel.sched_rt_runtime_us",
)  # fmt: skip


@pytest.mark.parametrize(
    ("active", "own", "writes"),
    [
        ("virtual-host\n", "", ()),
        ("realtime-virtual-host\n", "", WRITES),
        # Several at once, one of which is not there; in an include, too.
        ("virtual-host -gone realtime\n", "", WRITES[:1] + WRITES[2:]),
        ("own\n", "[main]\ninclude=virtual-host, ${f:virt_check:a:b}\n[irq_nic]\ntype=irq\naffinity=2\n",
         ("[irq] affinity",)),
        # What is off, empty or replaced.
        ("own\n", REMEDY, ()),
        ("own\n", REMEDY.replace("enabled=false", "channels="), WRITES[1:3]),
        ("own\n", "[main]\ninclude=realtime-virtual-host\n[scheduler]\nreplace=1\ngroup.x=0:f:1:*:x\n",
         ("[net] channels", "[scheduler] group.x", "[sysctl] kernel.sched_rt_runtime_us")),
        # An include of its own name is the package's; one in a ring ends.
        ("realtime\n", "", WRITES[:1] + WRITES[2:]),
        ("own\n", "[main]\ninclude=own\n", ()),
        ("own\n", "no section\n", ()),
        ("", "", ()),
    ],
)  # fmt: skip
def test_what_a_profile_of_tuned_writes(active: str, own: str, writes: tuple[str, ...]) -> None:
    tree = HostTree().file("/etc/tuned/active_profile", active)
    tree.file("/etc/tuned/own/tuned.conf", own)
    tree.file("/etc/tuned/profiles/realtime/tuned.conf", "[main]\ninclude=realtime\n")
    for path, text in REALTIME.items():
        tree.file(path, text)
    assert tuned_writes(tree.root()) == writes
    found = read_facts(tree.root(), tuned()).tuned
    case = of_host(neighbours=(Competitor("tuned", 9, "profile x"),))
    findings = run(OF_HOST, replace(case, facts=replace(FINE_FACTS, tuned=found)))
    told = next(finding for finding in findings if finding.check == "neighbours")
    assert told.level is (Severity.WARNING if writes else Severity.INFO)
    assert all(option in told.what for option in writes)
    assert bool(told.hint) == bool(writes)
