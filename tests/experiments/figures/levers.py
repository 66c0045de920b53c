"""What else a host can set: each lever alone on top of one policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.data import Data
from experiments.judge import more, sooner, top
from experiments.plan import (
    BASE,
    BOOKWORM,
    Boot,
    Claim,
    Figure,
    Run,
    fifo,
    policy,
    shipped,
    untuned,
)
from experiments.text import offered
from vsrtune.bench.report import plots

_OURS = "vsrtune"
_LOADS = (64000,)
_SHIPPED = shipped("router")
# What was shipped when the levers of host and guest were measured. All of them stay on it: on another
# policy a run would change two things at once.
_FIFO = fifo(10, 10)


def _shell(name: str, apply: str, revert: str, text: str = _FIFO) -> dict[str, Any]:
    """A policy, and a setting beside it."""
    lines = {"apply": ["sh", "-ec", apply], "revert": ["sh", "-ec", revert]}
    return policy(name, text, **lines)


def _write(name: str, path: str, value: object, original: object) -> dict[str, Any]:
    return _shell(name, f"echo {value} > {path}", f"echo {original} > {path}")


def _rr(name: str) -> dict[str, Any]:
    return policy(name, _FIFO.replace("class: fifo", "class: rr"))


# name, what is done, configuration.
_HOST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SCHED_RR with turns of 100 ms instead of FIFO", _rr("rr")),
    ("RR with turns of 2 ms", _rr("rr 2 ms") | {
        "apply": ["sysctl", "-qw", "kernel.sched_rr_timeslice_ms=2"],
        "revert": ["sysctl", "-qw", "kernel.sched_rr_timeslice_ms=100"],
    }),
    ("a macvtap queue of 1000", policy("queue 1000", fifo(10, 10, queue=1000))),
    ("a macvtap queue of 4000", policy("queue 4000", fifo(10, 10, queue=4000))),
    ("KVM's halt polling off", _write(
        "no halt polling", "/sys/module/kvm/parameters/halt_poll_ns", 0, 200000)),
    ("GRO, and with it NAPI, on the lower device",
     _shell("GRO", "ethtool -K p0 gro on", "ethtool -K p0 gro off")),
    ("that NAPI in a thread", _shell(
        "threaded NAPI",
        "ethtool -K p0 gro on; echo 1 > /sys/class/net/p0/threaded",
        "echo 0 > /sys/class/net/p0/threaded; ethtool -K p0 gro off")),
    ("SoftIRQ batches four times as long", _shell(
        "batch",
        "sysctl -qw net.core.dev_weight=256 net.core.netdev_budget=1200",
        "sysctl -qw net.core.dev_weight=64 net.core.netdev_budget=300")),
)  # fmt: skip
_GUEST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("receive rings of 512", policy("ring 512", _FIFO, ring=512)),
    ("receive rings of 1024", policy("ring 1024", _FIFO, ring=1024)),
    ("no mergeable receive buffers", policy("not mergeable", _FIFO, mergeable=False)),
)  # fmt: skip


def _plot(figure: str, run: str, data: Data) -> Mapping[str, Any]:
    load = top(data, run)
    names = [c.name for c in data.outcome(run).configurations]
    columns = [[t.pps for t in data.trials(run, name, load)] for name in names]
    return {figure: plots.scatter(names, columns, offered(load), "forwarded pps")}


def _figure(
    figure: str, title: str, levers: Sequence[tuple[str, dict[str, Any]]], ours: str, seed: int
) -> Figure:
    run = "levers"
    return Figure(
        id=figure,
        title=title,
        paper="",
        ours=ours,
        runs=(
            Run(
                run, BASE, (policy(_OURS, _FIFO), *(c for _, c in levers)),
                rates=_LOADS, seed=seed,
            ),
        ),
        claims=tuple(
            Claim(f"{text[0].upper()}{text[1:]}.", more(run, c["name"], _OURS))
            for text, c in levers
        ),
        plots=partial(_plot, figure, run),
        native=None,
    )  # fmt: skip


HOST = _figure(
    "levers-host",
    "Levers of the host",
    _HOST,
    "Class fifo with one priority for all threads of the router, and one more setting at a time. That was "
    "the shipped policy when this was measured. The one that is shipped now has class rr with turns of 8 ms: "
    "no lever here, and neither kind of rr, says anything of it. A longer "
    "queue is no default: at these rates 4000 frames wait for a tenth of a second.",
    31,
)
GUEST = _figure(
    "levers-guest",
    "Levers of the guest's definition",
    _GUEST,
    "The same policy; the guest's interfaces are plugged in anew with another driver setting. "
    "Without mergeable buffers this guest reserves 64 KiB for each slot of a ring, since QEMU's USO "
    "cannot be turned off through libvirt.",
    32,
)


# The router's CPU out of all scheduling domains: every cgroup from the top to libvirt's scope says
# that it is its own (cgroup v2, remote partitions, 6.7).
_SCOPE = (
    "top=/sys/fs/cgroup\n"
    "found=$(sed -n s/^0:://p /proc/$(cat /run/libvirt/qemu/vr1.pid)/cgroup)\n"
    "slice=$top/machine.slice scope=$top${found%/libvirt/*}\n"
)
_ISOLATED = _SCOPE + (
    "echo 1 > $slice/cpuset.cpus.exclusive\n"
    "echo 1 > $scope/cpuset.cpus.exclusive\n"
    "echo isolated > $scope/cpuset.cpus.partition\n"
    'test isolated = "$(cat $scope/cpuset.cpus.partition)"\n'
)
_MEMBER = _SCOPE + (
    "echo member > $scope/cpuset.cpus.partition\n"
    "echo > $scope/cpuset.cpus.exclusive\n"
    "echo > $slice/cpuset.cpus.exclusive\n"
)
_WORKQUEUES = "/sys/devices/virtual/workqueue/cpumask"
_PARTITION = _shell("partition", _ISOLATED, _MEMBER, _SHIPPED)


def _share(data: Data, share: float, shares: Sequence[float]) -> float:
    return data.scaled("levers", shares, share)


def _delay(
    figure: str,
    title: str,
    ours: str,
    configurations: Sequence[dict[str, Any]],
    points: Sequence[tuple[str, str, str]],
    shares: Sequence[float],
    seed: int,
    *,
    base: Boot = BASE,
    peak: str = "peers/untuned",
) -> Figure:
    """A figure of P99 at ``shares`` of the rate that the run ``peak`` found. A point is what is done,
    the configuration that should have the lower P99, and the one beside it."""
    return Figure(
        id=figure,
        title=title,
        paper="",
        ours=ours,
        runs=(
            Run(
                "levers", base, tuple(configurations),
                scaled=(peak, tuple(shares)), latency=True, seconds=5.5, seed=seed,
            ),
        ),
        claims=tuple(
            Claim(
                f"{text}, at {share:g} of the untuned peak.",
                sooner("levers", lower, other, partial(_share, share=share, shares=shares)),
            )
            for text, lower, other in points
            for share in shares
        ),
        native=None,
    )  # fmt: skip


_WORKQUEUES_TOO = "partition, workqueues"
ISOLATION = _delay(
    "levers-isolation",
    "Isolation without class deadline",
    "The shipped policy, and the router's CPU isolated from the scheduler's balancing and from "
    "unbound kernel work beside it, at half of the untuned peak and at the peak. The aim is the "
    "delay: whether P99 is lower. What does not help here is not built.",
    (
        policy(_OURS, _SHIPPED),
        _PARTITION,
        _shell(
            _WORKQUEUES_TOO,
            f"{_ISOLATED}echo 1 > {_WORKQUEUES}\n",
            f"echo 3 > {_WORKQUEUES}\n{_MEMBER}",
            _SHIPPED,
        ),
    ),
    (
        ("An isolated partition for its CPU", "partition", _OURS),
        ("That, and unbound workqueues elsewhere", _WORKQUEUES_TOO, _OURS),
    ),
    (0.5, 1.0),
    33,
)


# Before 6.12 the kernel stops all realtime threads of a CPU for the rest of a second in which they
# have run for sched_rt_runtime_us (update_curr_rt, sched_rt_period_timer), whether or not anything
# else wants that CPU. From 6.12 on only threads that starve make them give way (fair_server).
_UNTUNED, _REST = "untuned", "rest of 10 ms"
# When this was measured the shipped policy had no rest, and sysctl set the limit.
_KERNELS = _SHIPPED + "scheduler: {rest: 50ms}\n"
REST = _delay(
    "levers-rest",
    "The rest that realtime threads must leave, kernel 6.1",
    "The shipped policy, with which realtime threads may run for 990 ms of each second on a CPU "
    "(scheduler.rest: 10ms, kernel.sched_rt_runtime_us=990000), beside the same with the kernel's own limit, "
    "950 ms, and the untuned router. In the table *vsrtune* is the policy with the kernel's limit, and *rest "
    "of 10 ms* the shipped one. A kernel before 6.12 stops the router for what is left of the "
    "second, so the delay of what comes meanwhile is up to 50 ms.",
    (untuned(_UNTUNED), policy(_OURS, _KERNELS), policy(_REST, _SHIPPED)),
    (
        ("A rest of 10 ms instead of 50", _REST, _OURS),
        ("With it, against the untuned router", _REST, _UNTUNED),
    ),
    (0.5, 1.0, 4.0),
    34,
    base=BOOKWORM,
    peak="peers-6.1/untuned",
)


# From 6.12 on ordinary threads that starve on a CPU get it for 50 ms of each second, in one piece
# (fair_server_init). Here the same share comes in turns of 10 ms. The period goes first: root
# domains made anew have lost the server's bandwidth on 6.12, and a smaller one is then refused with
# EBUSY (__dl_overflow). The lab mounts no debugfs.
_SERVER = (
    "mount -t debugfs none /media\n"
    "cd /media/sched/fair_server/cpu1\n"
    "echo {} > {}\n"
    "echo {} > {}\n"
    "cd /\n"
    "umount /media\n"
)
_SHORT = _SERVER.format(200_000_000, "period", 10_000_000, "runtime")
_LONG = _SERVER.format(50_000_000, "runtime", 1_000_000_000, "period")
_LEAVES = "fair_server of 10 ms"
SERVER = _delay(
    "levers-server",
    "What ordinary threads take of the router's CPU, kernel 6.12",
    "The shipped policy, beside the same with 10 ms in 200 instead of the kernel's 50 ms in a second for "
    "the threads of class other that starve on the router's CPU (fair_server in debugfs), and beside the same "
    "with that CPU in an isolated partition, to which the scheduler moves no thread. Neither is shown to lower "
    "P99, so neither is built: in overload it is the rings on the way that are full, as P50 shows.",
    (policy(_OURS, _SHIPPED), _shell(_LEAVES, _SHORT, _LONG, _SHIPPED), _PARTITION),
    (
        ("A fair_server of 10 ms in 200 instead of 50 in a second", _LEAVES, _OURS),
        ("An isolated partition for its CPU", "partition", _OURS),
    ),
    (1.0, 2.0, 4.0),
    35,
)
