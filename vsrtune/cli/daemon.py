# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune daemon``: assembles the daemon and runs it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from pathlib import Path

import click

from vsrtune.attach.host import LiveHost
from vsrtune.cli.options import (
    JOURNAL,
    Duration,
    attach_ledger_option,
    groups_option,
    journal_option,
    no_policies,
    options,
    policies_option,
    uri_option,
)
from vsrtune.cli.render import complain, say
from vsrtune.core.errors import JournalError, PolicyError, VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.daemon import http, systemd
from vsrtune.daemon.attachments import SETTLED_PATH, AttachKeeper, AttachThread
from vsrtune.daemon.events import libvirt
from vsrtune.daemon.events.changes import ChangeEvents, remove_stale
from vsrtune.daemon.events.kernel import LinkEvents, Patrol
from vsrtune.daemon.events.policy_files import PolicyWatch
from vsrtune.daemon.group_health import GROUPS_PATH, GroupKeeper, RuleLoader
from vsrtune.daemon.guard import STARVED_PATH, Aside, StandstillGuard
from vsrtune.daemon.http import Metrics
from vsrtune.daemon.load_tracker import BottleneckKeeper, RecentKeeper
from vsrtune.daemon.loop import Daemon, Timing
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.daemon.systemd import Notifier
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal, check_free, read_entries
from vsrtune.execute.jsonl_log import LockedError
from vsrtune.host.filesystem import LiveRoot, boot_id, cgroup_root, namespace_of_its_own
from vsrtune.host.state_files import tell_others
from vsrtune.model.daemon_state import DaemonState, GroupGuest, Starved
from vsrtune.model.load import least_ns
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.config_files import load_dirs
from vsrtune.observe.load import LoadMeter
from vsrtune.observe.observer import live_observer
from vsrtune.policy.matching import QemuFilter, qemu_filter
from vsrtune.policy.model import Policy

# The garbage collector runs rarely in this process: a pass over 1,000 guests holds 135,000 objects,
# and neither it nor a scrape leaves any cycle.
GC_THRESHOLD = (200_000, 20, 50)
# Seconds that the probes have to be removed.
CHANGES_END = 5.0
METRICS = "127.0.0.1:9178"
# What the daemon needs in a container, by the capability's bit (linux/capability.h).
CAPABILITIES = {
    2: ("DAC_READ_SEARCH", "the descriptors of QEMU, which runs as another user, cannot be listed"),
    19: ("SYS_PTRACE", "nothing tells whether a process runs a QEMU that is root's"),
    23: ("SYS_NICE", "CPUs and classes of threads cannot be set"),
}
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.:%-]*)):([0-9]{1,5})", re.ASCII)


def _address(
    _context: click.Context, _option: click.Parameter, text: str
) -> tuple[str, int] | None:
    """The host and the port of ``HOST:PORT`` or ``[IPV6]:PORT``; None for ``off``."""
    if text == "off":
        return None
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise click.BadParameter(f"{text!r} is not HOST:PORT or off")
    return found[1] or found[2], int(found[3])


def demand_of_container() -> None:
    """Raise VsrtuneError when the container of this process hides or forbids what the daemon
    needs."""
    lacking = []
    if namespace_of_its_own("pid"):
        lacking.append("hostPID: it sees only its own processes, so it finds no guest")
    if cgroup_root() is None:
        lacking.append("hostPath /sys/fs/cgroup: the cgroups of the guests are not there")
    status = LiveRoot().read("/proc/self/status")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    held = int(found[1], 16) if found is not None else 0
    for bit, (name, why) in CAPABILITIES.items():
        if not held >> bit & 1:
            lacking.append(f"capability {name}: {why}")
    if lacking:
        raise VsrtuneError(
            f"this container lacks {'; '.join(lacking)}",
            hint="give it what units/kubernetes/base/daemonset.yaml lists",
        )


def unguarded(journal: Path) -> int:
    """How many settings an earlier run has left on the host that nobody guards now. Raises
    JournalError."""
    try:
        check_free(journal)
    except LockedError:
        return 0  # whoever has it open answers for them
    return len(read_entries(journal, boot_id()))


def _say_unguarded(left: int) -> None:
    if left:
        say(
            f"vsrtune: {left} settings of an earlier run stay, and no daemon guards these guests; "
            "`vsrtune undo` puts them back",
            err=True,
        )


class DaemonCommand(click.Command):
    """Says also what an earlier run has left when an option is wrong: systemd starts no other
    daemon then."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:
            with contextlib.suppress(JournalError):
                _say_unguarded(unguarded(Path(os.environ.get("VSRTUNE_JOURNAL") or JOURNAL)))
            raise


@click.command(cls=DaemonCommand)
@options(
    policies_option,
    click.option(
        "--metrics",
        callback=_address,
        metavar="ADDRESS",
        default=METRICS,
        show_default=True,
        envvar="VSRTUNE_METRICS",
        help="Where to serve Prometheus metrics and the status page, or off.",
    ),
    click.option(
        "--interval",
        type=Duration(1, 86400),
        default="10s",
        show_default=True,
        metavar="TIME",
        envvar="VSRTUNE_INTERVAL",
        help="Look at the host at least this often.",
    ),
    click.option(
        "--trace",
        "trace_seconds",
        type=Duration(0, 10),
        default="250ms",
        show_default=True,
        metavar="TIME",
        envvar="VSRTUNE_TRACE",
        help="Watch transmissions this long while a worker's interface is uncertain.",
    ),
    click.option(
        "--changes/--no-changes",
        "watch_changes",
        default=True,
        show_default=True,
        envvar="VSRTUNE_CHANGES",
        help="Have the kernel tell at once what other programs change, and who does.",
    ),
    click.option(
        "--on-stop",
        type=click.Choice(["restore", "keep"]),
        default="restore",
        show_default=True,
        envvar="VSRTUNE_ON_STOP",
        help="Put the host back when stopped, or leave it tuned.",
    ),
    journal_option,
    attach_ledger_option,
    groups_option,
    uri_option,
    click.option("--verbose", is_flag=True, envvar="VSRTUNE_VERBOSE", help="Log every event."),
)
def daemon(
    policy_dirs: tuple[Path, ...],
    metrics: tuple[str, int] | None,
    interval: float,
    trace_seconds: float,
    watch_changes: bool,
    on_stop: str,
    journal: Path,
    attach_ledger: Path,
    groups: Path,
    uri: str,
    verbose: bool,
) -> int:
    """Keep the host tuned until stopped, then put it back.

    Guests that start later are tuned when libvirt announces them, or within the
    interval. Policy files that change are read, as they are on SIGHUP (systemctl reload
    vsrtune); wrong ones are reported and the older ones stay in force. If one is wrong
    at the start, the daemon tunes nothing and ends. What an earlier run left tuned it
    puts back first, because nobody would guard these guests; with --on-stop keep it
    stays.

    \b
    Exit codes: 0 stopped and put back, 1 an error, 2 a policy is wrong (nothing is
    tuned), 75 handed over to the next daemon (SIGUSR2; the guests stay tuned).
    """
    wrong, policies = _read(policy_dirs, journal, keep=on_stop == "keep")
    systemd.setup(verbose)
    if namespace_of_its_own("cgroup"):
        demand_of_container()
    gc.set_threshold(*GC_THRESHOLD)
    if wrong is not None:
        systemd.log_each(wrong)
        systemd.LOGGER.error(
            "with wrong policies no daemon runs: what an earlier run left tuned is put back, "
            "because nobody would guard it"
        )
    elif not policies:
        systemd.LOGGER.warning("%s", no_policies(policy_dirs))

    notifier = Notifier()
    with Journal.open(journal, boot_id()) as opened:
        served = Metrics()
        if metrics is not None and wrong is None:
            try:
                http.serve(served, *metrics)
            except VsrtuneError as error:
                # Tuning matters more than monitoring.
                systemd.LOGGER.error("%s", error)
        libvirt.register()

        def wanted() -> QemuFilter:
            return qemu_filter(reconciler.policies, opened.guests())

        def told() -> bool:
            return changes.watching.is_set()

        observer = live_observer(uri, wanted, notifier.ping, told)
        ops = LiveSysOps(
            libvirt_uri=uri,
            budgets_end=opened.budgets_end,
            original=opened.original,
            pulse=notifier.ping,
        )
        reconciler = Reconciler(
            observer,
            ops,
            opened,
            policies,
            trace=trace_seconds,
            meter=LoadMeter(LiveRoot(), least_ns=least_ns(interval)),
            pulse=notifier.ping,
            remember=observer.remember_fixed,
        )
        # The daemon's unit keeps it out of the directories of guests' files.
        host = LiveHost(uri, files=False)
        keeper = AttachKeeper(attach_ledger, journal, host, boot_id(), SETTLED_PATH)
        aside, recent, limits = Aside(), RecentKeeper(LiveRoot()), BottleneckKeeper(LiveRoot())

        def publish(state: DaemonState) -> None:
            aside.step(state.snapshot)
            served.update(state if metrics is None else limits.update(recent.update(state)))

        running = Daemon(
            reconciler,
            lambda: load_dirs(policy_dirs),
            notifier,
            attachments=AttachThread(keeper, notifier.ping),
            publish=publish,
            timing=Timing(interval=interval),
            keep=on_stop == "keep",
        )
        running.install_signals()

        def latest() -> Snapshot | None:
            return reconciler.state.snapshot

        changes = ChangeEvents(latest, running.changed)  # which the observer asks, in any case
        if wrong is not None:
            with contextlib.suppress(OSError):
                remove_stale()
            # Status 1 has systemd try again.
            return ExitCode.WRONG if running.put_back() is ExitCode.DONE else ExitCode.FAILED
        libvirt.LibvirtEvents(uri, running.mark_dirty).start()

        def starving(found: tuple[Starved, ...]) -> None:
            running.starving(found)
            with contextlib.suppress(OSError):
                tell_others(STARVED_PATH, found)

        def watched(found: tuple[GroupGuest, ...]) -> None:
            running.watched(found)
            with contextlib.suppress(OSError):
                tell_others(GROUPS_PATH, found)

        LinkEvents(latest, running.mark_dirty).start()
        if watch_changes:
            changes.start()
        else:
            with contextlib.suppress(OSError):
                remove_stale()

        def host_told() -> bool:
            return told() and not changes.missing

        Patrol(LiveRoot(), latest, running.mark_dirty, told=host_told).start()
        StandstillGuard(LiveRoot(), lambda: reconciler.state, running.step_down, starving).start()
        GroupKeeper(
            LiveRoot(),
            attach_ledger,
            groups,
            RuleLoader(uri, attach_ledger, journal),
            latest,
            watched,
        ).start()
        PolicyWatch(policy_dirs, running.policies_changed).start()
        try:
            return running.run()
        finally:
            if changes.is_alive():
                changes.stop()
                changes.join(CHANGES_END)


def _read(
    policy_dirs: tuple[Path, ...], journal: Path, *, keep: bool
) -> tuple[PolicyError | None, tuple[Policy, ...]]:
    """The policies; or what is wrong with them, if an earlier run has left settings that are to be
    put back. Raises PolicyError when there are none, or they are to stay."""
    try:
        return None, load_dirs(policy_dirs)
    except PolicyError as error:
        left = 0
        try:
            left = unguarded(journal)
        except JournalError as unread:
            complain(unread)
        if keep or not left:
            _say_unguarded(left)
            raise
        return error, ()
