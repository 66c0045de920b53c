# SPDX-License-Identifier: GPL-2.0-or-later
"""Loads for the daemon: measures them while a policy places by load, counts moves, and saves
the loads for other processes; and for the status page, how busy CPUs and guests were of late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon.systemd import LOGGER
from vsrtune.host.cpus import parse_cpu_times
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import guest_frames, parse_net_dev
from vsrtune.model.daemon_state import DaemonState, Recent
from vsrtune.model.guest import DATA_PLANE, ThreadKey
from vsrtune.model.load import (
    Bottleneck,
    CpuTimes,
    GuestFrames,
    HostSample,
    counted_devices,
    moves,
    shared_devices,
)
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import samples
from vsrtune.observe.load import LoadMeter
from vsrtune.observe.one_pass import FEW
from vsrtune.policy.model import Policy
from vsrtune.views import page_data
from vsrtune.views.top_frame import make_frame

# Minimum time between two placements of all guests by load on a host with many, seconds.
WHOLE = 30.0
# Samples for the status page: this many intervals, each of so many seconds at least. That is five
# minutes with passes every 10 s.
INTERVALS, SPACING = 30, 9.0
# Bottlenecks: the time between two samples, seconds, and the guests of one, about ten files each.
LIMITS, BATCH = 30.0, 100


class LoadKeeper:
    """``meter`` None: nothing is measured. ``due`` is true when there are new loads and it is time
    to plan for all guests, because the loads of guests outside a pass count too."""

    def __init__(self, meter: LoadMeter | None) -> None:
        self._meter = meter
        self._said = ""
        self._fresh = False
        self._planned = 0.0
        self.due = False

    def measured(self, snapshot: Snapshot, policies: Sequence[Policy], now: float) -> Snapshot:
        """The snapshot, with loads while a policy places by load. ``now`` is in seconds of any
        steady clock."""
        if self._meter is None or not any(p.placement is not None for p in policies):
            self.due = False
            return snapshot
        snapshot = self._meter.update(snapshot)
        self._fresh = self._fresh or self._meter.fresh
        wait = WHOLE if len(snapshot.guests) > FEW else 0.0
        self.due = self._fresh and now - self._planned >= wait
        if self.due:
            self._fresh, self._planned = False, now
        return snapshot

    def counted(
        self, snapshot: Snapshot, state: DaemonState, done: Sequence[Action]
    ) -> DaemonState:
        """The state with the moves among ``done`` counted. Save the loads for other processes,
        and log a failure to save once."""
        moved = moves(done)
        if moved:
            totals = replace(state.totals, moves=state.totals.moves + moved)
            state = replace(state, totals=totals)
        if self._meter is None:
            return state
        try:
            self._meter.remember(snapshot.host.boot_id)
        except VsrtuneError as error:
            if str(error) != self._said:
                LOGGER.warning("%s", error)
            self._said = str(error)
        return state


class BottleneckKeeper:
    """Names the bottlenecks of all guests, and tells how their threads use their budgets. A sample
    is of BATCH guests at most, in turn, and thus costs the same on every larger host."""

    def __init__(self, root: HostRoot, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._at: float | None = None
        self._turn = 0
        self._before: dict[int, HostSample] = {}
        self._found: dict[str, Bottleneck] = {}
        self._waited: dict[ThreadKey, float] = {}
        self._budgets: dict[ThreadKey, float] = {}

    def update(self, state: DaemonState) -> DaemonState:
        """``state`` with the latest bottleneck of each guest, the times that its threads have
        waited, and their use of budgets; new ones if it is time."""
        now = self._clock()
        if state.snapshot is not None and (self._at is None or now - self._at >= LIMITS):
            self._at = now
            self._sample(state.snapshot)
        recent = replace(
            state.recent, bottlenecks=self._found, waited=self._waited, budgets=self._budgets
        )
        return replace(state, recent=recent)

    def _sample(self, snapshot: Snapshot) -> None:
        guests = snapshot.guests
        if self._turn * BATCH >= len(guests):
            self._turn = 0
        part = guests[self._turn * BATCH :][:BATCH]
        sample = samples.take(
            self._root, replace(snapshot, guests=part), lambda: int(self._clock() * 1e9)
        )
        frame = make_frame(self._before.get(self._turn, sample), sample)
        self._before[self._turn] = sample
        self._turn += 1
        others = {g.ref for g in guests} - {g.ref for g in part}
        kept = {ref: one for ref, one in self._found.items() if ref in others}
        # The other guest of a device may be in another sample.
        shared = shared_devices(guests)
        alone = {g.ref for g in part if not any(i.ifindex in shared for i in g.interfaces)}
        self._found = kept | {one.guest: one for one in frame.bottlenecks if one.guest in alone}
        alive = {t.key for g in guests for t in g.threads if t.role in DATA_PLANE}
        waited = self._waited | {k: r.wait_ns / 1e9 for k, r in sample.threads.items()}
        self._waited = {key: seconds for key, seconds in waited.items() if key in alive}
        used = self._budgets | frame.budgets
        self._budgets = {key: share for key, share in used.items() if key in alive}


class RecentKeeper:
    """Samples the CPUs, and the guests that the status page lists. A sample reads two files, and
    less than 1,300 rates are kept, however many guests there are."""

    def __init__(self, root: HostRoot, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._at: float | None = None
        self._cpus: Mapping[int, CpuTimes] = {}
        self._frames: Mapping[str, GuestFrames] = {}
        self._recent = Recent()

    def update(self, state: DaemonState) -> DaemonState:
        """``state`` with the samples up to now; a new one if it is time."""
        now = self._clock()
        if self._at is None or now - self._at >= SPACING:
            cpus, frames = self._read(state)
            if self._at is not None:
                self._recent = self._with(cpus, frames, now - self._at)
            self._at, self._cpus, self._frames = now, cpus, frames
        return replace(state, recent=self._recent)

    def _read(self, state: DaemonState) -> tuple[dict[int, CpuTimes], dict[str, GuestFrames]]:
        """Empty where the files cannot be read."""
        cpus = samples.parsed(self._root, "/proc/stat", parse_cpu_times)
        devices = samples.parsed(self._root, "/proc/net/dev", parse_net_dev)
        shared = shared_devices(state.snapshot.guests if state.snapshot is not None else ())
        frames = {
            guest.ref: guest_frames(counted_devices(guest, shared), devices)
            for guest in page_data.listed(state)
        }
        return cpus, {ref: found for ref, found in frames.items() if found is not None}

    def _with(
        self, cpus: Mapping[int, CpuTimes], frames: Mapping[str, GuestFrames], seconds: float
    ) -> Recent:
        last = self._recent
        unknown = (None,) * len(last.seconds)
        shares = {cpu: times.since(self._cpus.get(cpu)) for cpu, times in cpus.items()}
        return Recent(
            (*last.seconds, seconds)[-INTERVALS:],
            {
                ref: (
                    *last.rates.get(ref, unknown),
                    found.since(self._frames.get(ref), seconds),
                )[-INTERVALS:]
                for ref, found in frames.items()
            },
            {cpu: share for cpu, share in shares.items() if share is not None},
        )
