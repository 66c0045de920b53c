"""The plan together with the undo of settings that no policy asks for any more.

An action that puts such a setting back is like any other: `plan` shows it, a stored plan holds
it, and the journal forgets the setting once the original is on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vsrtune.model.journal_records import Entry, undo_order
from vsrtune.model.plan import Action, Plan, Skipped
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import NO_STEPS, Steps
from vsrtune.model.targets import (
    CgroupTarget,
    CpusetFile,
    CpusetList,
    Partition,
    PartitionState,
    Target,
    TimeSlice,
    Value,
)
from vsrtune.plan import brought_pins, planner
from vsrtune.plan.safety.projection import after, project_actions
from vsrtune.policy.model import Policy

REASON = "no policy asks for it any more"


FOREIGN = "no policy asks for it any more, but somebody else has changed it: left alone"


def full_plan(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    entries: Sequence[Entry],
    *,
    reassert: bool = False,
    steps: Steps = NO_STEPS,
) -> Plan:
    """planner.plan for the host after left-overs are put back. The actions that put them back
    come first, the latest entry first. ``entries`` and ``steps`` are the journal's. Pins that
    guests have brought along are put back even if a policy asks for them."""
    entries = (*entries, *brought_pins.entries(snapshot.guests, snapshot.host, entries))
    came = {e.target for e in entries if e.reason == brought_pins.REASON}
    applied: Mapping[Target, Value] = {e.target: e.written for e in entries}
    released = planner.released(snapshot, policies, applied, steps) | came
    if not released:
        return planner.plan(snapshot, policies, applied, reassert, steps=steps)
    back: list[Action] = []
    foreign: list[Skipped] = []
    for entry in undo_order(entries):
        target = entry.target
        if target not in released:
            continue
        if target in came:
            back.append(Action(target, entry.written, entry.original, entry.reason))
        elif _still_ours(snapshot, target, entry.written):
            back.append(Action(target, entry.written, entry.original, REASON))
        else:
            subject = str(target).removeprefix(f"{target.guest}: ")
            foreign.append(Skipped(target.guest, subject, FOREIGN))
    kept = {target: value for target, value in applied.items() if target not in released}
    left = project_actions(snapshot, back)
    made = planner.plan(left, policies, kept, reassert, steps=steps)
    return replace(made, actions=(*back, *made.actions), skipped=(*foreign, *made.skipped))


def _still_ours(snapshot: Snapshot, target: Target, written: Value) -> bool:
    group = snapshot.host.cpuset(target.path) if isinstance(target, CgroupTarget) else None
    if isinstance(target, Partition) and isinstance(written, PartitionState):
        # A partition that became invalid is still ours.
        return group is not None and PartitionState(group.partition).wanted == written.wanted
    if isinstance(target, CpusetFile) and isinstance(written, CpusetList) and group is not None:
        now = group.cpus if target.file == "cpuset.cpus" else group.exclusive
        return now == written.text
    if isinstance(written, TimeSlice):
        slice_ms = snapshot.host.rr_timeslice_ms
        return slice_ms is not None and written.reached_by(TimeSlice(slice_ms))
    # The setting is ours if writing our value changes nothing.
    return after(snapshot, Action(target, written, written, "")) == snapshot
