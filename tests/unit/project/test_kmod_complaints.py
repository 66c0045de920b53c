"""What the kernel module's own suite takes for a complaint of the kernel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[3] / "kmod/tests/frames.py"
_SPEC = importlib.util.spec_from_file_location("kmod_frames", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
frames = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(frames)


@pytest.mark.parametrize(
    "line",
    [
        "BUG: kernel NULL pointer dereference, address: 0000000000000010",
        "BUG: unable to handle page fault for address: ffff888100000000",
        "BUG: sleeping function called from invalid context at kernel/locking/mutex.c:585",
        "BUG: scheduling while atomic: ip/812/0x00000002",
        "BUG: workqueue lockup - pool cpus=0 node=0 flags=0x0 nice=0 stuck for 31s!",
        "Oops: 0000 [#1] PREEMPT SMP NOPTI",
        "Oops: general protection fault, probably for non-canonical address 0xdead000000000100",
        "RIP: 0010:nmv_tap_put+0x1a0/0x2c0 [napi_macvlan]",
        "WARNING: CPU: 1 PID: 812 at net/core/dev.c:6620 napi_enable+0x3a/0x40",
        "WARNING: possible circular locking dependency detected",
        "WARNING: possible recursive locking detected",
        "WARNING: inconsistent lock state",
        "WARNING: suspicious RCU usage",
        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
        "rcu: INFO: rcu_sched self-detected stall on CPU",
        "rcu: rcu_preempt kthread starved for 5250 jiffies! g1045 f0x0 RCU_GP_WAIT_FQS(5)",
        "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [ksoftirqd/1:24]",
        "NMI watchdog: Watchdog detected hard LOCKUP on cpu 2",
        "INFO: task ip:812 blocked for more than 120 seconds.",
        "list_del corruption. prev->next should be ffff8881, but was dead000000000122",
        "refcount_t: underflow; use-after-free.",
        "unregister_netdevice: waiting for l0 to become free. Usage count = 2",
        "UBSAN: array-index-out-of-bounds in drivers/net/tap.c:121:3",
        "workqueue: nmv_tapq_work [napi_macvlan] hogged CPU for >10000us 4 times",
        "Call Trace:",
    ],
)
def test_complaints(line: str) -> None:
    assert frames.complains(line)


@pytest.mark.parametrize(
    "line",
    [
        "napi_macvlan: loading out-of-tree module taints kernel.",
        "napi_macvlan: module verification failed: signature and/or required key missing",
        "napi_macvlan: self-tests passed",
        "l0: entered promiscuous mode",
        "IPv6: ADDRCONF(NETDEV_CHANGE): l0: link becomes ready",
        "x0: a passthru device must be the only one on l0; bring the others down",
        "Debug: sleeping is fine",
        "e1000e: Warning: Jumbo frames not available on this hardware",
        "rcu: Hierarchical RCU implementation.",
        "NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.",
        "clocksource: Switched to clocksource tsc",
    ],
)
def test_what_is_none(line: str) -> None:
    assert not frames.complains(line)
