# SPDX-License-Identifier: GPL-2.0-or-later
"""Loads for the daemon: measures them while a policy places by load, counts moves, and saves
the loads for other processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon.journald import LOGGER
from vsrtune.model.daemon_state import DaemonState
from vsrtune.model.load import moves
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.load import LoadMeter
from vsrtune.observe.one_pass import FEW
from vsrtune.policy.model import Policy

# Minimum time between two placements of all guests by load on a host with many, seconds.
WHOLE = 30.0


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
            state = replace(state, totals=totals, last_moves=moved, last_move=time.time())
        if self._meter is None:
            return state
        try:
            self._meter.remember(
                snapshot.host.boot_id, state.totals.moves, state.last_moves, state.last_move
            )
        except VsrtuneError as error:
            if str(error) != self._said:
                LOGGER.warning("%s", error)
            self._said = str(error)
        return state
