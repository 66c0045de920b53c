"""The plan with what has to go: settings of ours that no policy asks for any more.

Putting such a setting back is an action like any other, so `plan` shows it, a
stored plan holds it, and the journal forgets it once the original is on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vsrtune import planner
from vsrtune.actions import Action, Plan, Skipped, Target, Value
from vsrtune.journal_records import Entry
from vsrtune.model import Snapshot
from vsrtune.policy import Policy
from vsrtune.projection import after, project_actions

REASON = "no policy asks for it any more"


FOREIGN = "no policy asks for it any more, but somebody else has changed it: left alone"


def full_plan(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    entries: Sequence[Entry],
    *,
    reassert: bool = False,
) -> Plan:
    """planner.plan for the host as it is once left-overs are put back, with the actions
    that put them back, latest first, ahead of the others. ``entries`` are the journal's."""
    ours: Mapping[Target, Value] = {e.target: e.written for e in entries}
    released = planner.released(snapshot, policies, ours)
    if not released:
        return planner.plan(snapshot, policies, ours, reassert)
    back: list[Action] = []
    foreign: list[Skipped] = []
    for entry in reversed(entries):
        target = entry.target
        if target not in released:
            continue
        # Writing what is there already changes nothing.
        if after(snapshot, Action(target, entry.written, entry.written, "")) == snapshot:
            back.append(Action(target, entry.written, entry.original, REASON))
        else:
            subject = str(target).removeprefix(f"{target.guest}: ")
            foreign.append(Skipped(target.guest, subject, FOREIGN))
    kept = {target: value for target, value in ours.items() if target not in released}
    made = planner.plan(project_actions(snapshot, back), policies, kept, reassert)
    return replace(made, actions=(*back, *made.actions), skipped=(*foreign, *made.skipped))
