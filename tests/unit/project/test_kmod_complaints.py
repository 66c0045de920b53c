"""What the kernel module's own suite takes for a complaint of the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from labtool.serial_log import complains

FRAMES = Path(__file__).resolve().parents[3] / "kmod/tests/frames.py"


@pytest.mark.parametrize(
    "line",
    [
        "BUG: kernel NULL pointer dereference, address: 0000000000000010",
        "BUG: unable to handle page fault for address: ffff888100000000",
        "BUG: sleeping function called from invalid context at kernel/locking/mutex.c:585",
        "BUG: scheduling while atomic: ip/812/0x00000002",
        "BUG kmalloc-64 (Tainted: G           O      ): Poison overwritten",
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
        "ksoftirqd/0: page allocation failure: order:0, mode:0x40a20(GFP_ATOMIC), nodemask=(null)",
        "kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)",
    ],
)
def test_complaints(line: str) -> None:
    assert complains(line)


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
        "kfence: initialized - using 2097152 bytes for 255 objects",
        "rcu: RCU lockdep checking is enabled.",
        "Lock dependency validator: Copyright (c) 2006 Red Hat, Inc., Ingo Molnar",
        "clocksource: Switched to clocksource tsc",
    ],
)
def test_what_is_none(line: str) -> None:
    assert not complains(line)


def test_the_suite_finds_them_in_the_tree() -> None:
    """No line of the kernel's log has this number yet."""
    words = [sys.executable, "-B", str(FRAMES), "complaints", str(1 << 60)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "/dev/kmsg" in done.stderr:
        pytest.skip("the kernel's log cannot be read here")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
