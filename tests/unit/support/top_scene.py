"""A frame of `vsrtune top` on a recorded host with two routers on three CPUs.

They are tuned, and two seconds of overload pass. The loads and drops are made up, so no document
shows this frame.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from advanced_root import AdvancedRoot, proc_stat, softnet
from planning_samples import all_ran, journalled

from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import ThreadKey, thread_label
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import samples
from vsrtune.observe.observer import Observer
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse
from vsrtune.views.top_frame import Frame, make_frame

HOST = Path(__file__).resolve().parents[2] / "hosts/trixie-e1000e.json"
SECONDS = 2.0
POLICY = """\
guest: "vr*"
cpus: {irq: 0, vcpu: 1, vhost: 2}
irq: {set: true}
scheduler:
  vcpu: {class: rr, priority: 10}
  vhost: {class: deadline, runtime: 2ms, period: 20ms}
  softirq: {class: fifo, priority: 10}
queue: {macvtap: 300}
profile: none
"""

# Shares of a CPU by guest and label: running, and waiting in the run queue.
LOADS = {
    "vr1": {
        "vcpu 0": (0.471, 0.402),
        "vcpu 1": (0.086, 0.213),
        "vhost macvtap1/0": (0.0998, 0.244),
        "vhost macvtap2/0": (0.0894, 0.117),
    },
    "vr2": {
        "vcpu 1": (0.364, 0.455),
        "vcpu 0": (0.031, 0.148),
        "vhost macvtap0/1": (0.0742, 0.092),
        "vhost macvtap3/1": (0.0611, 0.081),
    },
}


def frame() -> Frame:
    """What is shown."""
    root = AdvancedRoot(HOST)
    seen = _with_cpusets(Observer(root, root.recording.virt()).observe())
    policies = (parse(POLICY, "router.yaml"),)
    tuned = _tuned(seen, policies)
    root.set("/proc/net/softnet_stat", softnet({0: 12, 1: 0, 2: 0}))
    root.set(
        "/proc/stat", proc_stat({0: (500, 400, 9500), 1: (4000, 90, 6000), 2: (900, 40, 9000)})
    )
    root.set("/proc/net/dev", _frames(0, 0, 0, 0))
    before = samples.take(root, tuned, root.clock)
    root.set("/proc/net/softnet_stat", softnet({0: 18, 1: 0, 2: 0}))
    root.set(
        "/proc/stat", proc_stat({0: (633, 517, 9567), 1: (4198, 92, 6002), 2: (971, 43, 9129)})
    )
    root.pass_time(SECONDS, _loads(tuned), _drops())
    _interrupts(root, {41: 24_112, 44: 23_874, 42: 9_310, 45: 9_276})
    root.set("/proc/net/dev", _frames(148_902, 41_286, 96_310, 312))
    after = samples.take(root, tuned, root.clock)
    return make_frame(before, after)


def _with_cpusets(seen: Snapshot) -> Snapshot:
    """With the cgroups of the threads, all on all CPUs, which this recording does not have:
    class deadline needs them."""
    paths = {t.cgroup for g in seen.guests for t in g.threads if t.cgroup}
    for path in tuple(paths):
        while path := path.rpartition("/")[0]:
            paths.add(path)
    online = seen.host.online
    groups = tuple(CpusetGroup(path, "", online, exclusive="") for path in sorted(paths))
    return replace(seen, host=replace(seen.host, cpusets=groups))


def _tuned(seen: Snapshot, policies: tuple[Policy, ...]) -> Snapshot:
    """The host as the daemon leaves it: threads run where they may, and what only they make
    possible follows."""
    plans: list[Plan] = []
    for _ in range(5):
        plan = full_plan(seen, policies, journalled(*plans))
        assert not plan.refusals, plan.refusals
        if not plan.actions:
            return seen
        plans.append(plan)
        seen = all_ran(project_actions(seen, plan.actions))
    raise AssertionError(f"the plan has no end: {plan.actions}")


def _loads(seen: Snapshot) -> dict[ThreadKey, tuple[float, float]]:
    return {
        thread.key: LOADS[guest.ref].get(thread_label(thread), (0.0, 0.0))
        for guest in seen.guests
        for thread in guest.threads
    }


def _drops() -> dict[str, int]:
    base = "/sys/devices/virtual/net/{}/statistics/rx_dropped"
    return {base.format("macvtap1"): 41_286, base.format("macvtap2"): 312}


def _frames(first: int, lost: int, second: int, lost_too: int) -> str:
    """/proc/net/dev, when so many frames have come for vr1, which forwards the others, and as many
    for vr2."""
    rows = {
        "macvtap1": (first, lost, second - lost_too), "macvtap2": (second, lost_too, first - lost),
        "macvtap0": (first, 0, second), "macvtap3": (second, 0, first),
    }  # fmt: skip
    lines = [
        f"{n}: 0 {rx} 0 {gone} 0 0 0 0 0 {tx} 0 0 0 0 0 0" for n, (rx, gone, tx) in rows.items()
    ]
    return "\n".join(["h", "h", *lines, ""])


def _interrupts(root: AdvancedRoot, more: dict[int, int]) -> None:
    """Interrupts that came meanwhile, in the column of the first CPU."""
    lines = []
    for line in root.read("/proc/interrupts").splitlines():
        number, colon, rest = line.partition(":")
        if colon and number.strip().isdecimal() and int(number) in more:
            first = rest.split()[0]
            rest = rest.replace(first, str(int(first) + more[int(number)]), 1)
        lines.append(number + colon + rest)
    root.set("/proc/interrupts", "\n".join(lines) + "\n")
