"""Link events in a network namespace of its own: what is told, and what is lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import subprocess, sys, time
    from vsrtune.daemon.events import kernel
    from vsrtune.host import netlink
    from vsrtune.daemon.events.kernel import LinkEvents
    from vsrtune.daemon.scope import Scope

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    def index(name):
        return next(link.index for link in netlink.links() if link.name == name)

    ip("link", "add", "v0", "type", "veth", "peer", "v1")
    ip("link", "add", "link", "v0", "name", "mv0", "type", "macvtap", "mode", "bridge")
    known = kernel.LinkInterest({index("mv0"): Scope.of("vr 1.ü")}, frozenset({"v0"}))
    kernel.devices = lambda snapshot: known
    told = []
    events = LinkEvents(lambda: None, lambda why, guest=None: told.append((why, guest)), grace=0.5,
                        buffer=4096 if sys.argv[1:] else 1 << 20)
    events.start()
    assert events.listening.wait(10)

    def heard(*want):
        end = time.monotonic() + 10
        while not set(want) <= set(told):
            assert time.monotonic() < end, (want, told)
            time.sleep(0.02)

    if sys.argv[1:]:
        # The listener is held up while more happens than its buffer holds.
        monitor = netlink.LinkMonitor
        real, monitor.read = monitor.read, lambda self: (time.sleep(1), real(self))[1]
        batch = "".join(f"link set mv0 txqueuelen {n}\\n" for n in range(1, 400))
        subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)
        heard(("news of network devices were lost", None))
        print("lost and looked")
        sys.exit(0)
    ip("link", "set", "mv0", "txqueuelen", "77")
    heard(("mv0 is changed", "vr 1.ü"))
    told.clear()
    ip("link", "set", "mv0", "txqueuelen", "77")
    ip("link", "add", "br0", "type", "bridge")
    ip("link", "add", "v7", "type", "veth", "peer", "v8")
    ip("link", "set", "v7", "master", "br0")
    time.sleep(1)
    assert told == [], told
    ip("link", "add", "link", "v0", "name", "mv1", "type", "macvtap", "mode", "bridge")
    heard(("mv1 may be a guest's", None))
    ip("link", "set", "v0", "up")
    heard(("v0 is changed", None))
    ip("link", "del", "mv0")
    heard(("mv0 is gone", "vr 1.ü"))
    ip("link", "del", "v0")
    heard(("v0 is gone", None))
    print("all told")
    """
)


def _run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_devices_of_guests_and_below_them_are_told_and_no_others(namespace: None) -> None:
    assert _run() == "all told"


def test_lost_news_are_a_reason_to_look_at_everything(namespace: None) -> None:
    assert _run("lose") == "lost and looked"
