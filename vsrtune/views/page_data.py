# SPDX-License-Identifier: GPL-2.0-or-later
"""The data of the status page: /status.json prints it, page.html.j2 draws it. Pure.

docs/status-page.md explains the fields. Lists are cut to sizes that stay small with any number
of guests; the field ``NAME_left_out`` counts the entries that the list ``NAME`` leaves out, and
``left_out`` of a CPU its threads. Guests and settings left alone that need somebody come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from vsrtune import __version__
from vsrtune.core.codec import encode
from vsrtune.core.text import counted, printable
from vsrtune.model.daemon_state import DaemonState, GuestState, PlanState, Recent, Unmade
from vsrtune.model.guest import REALTIME, Guest, Interface, Role, SchedClass, Thread
from vsrtune.model.host import Cpu, Host
from vsrtune.model.plan import Drift, Skipped
from vsrtune.model.snapshot import Snapshot
from vsrtune.views.host_view import (
    ROLES,
    ThreadView,
    Use,
    interrupts,
    reported_use,
    thread_views,
)
from vsrtune.views.tables import (
    NOTHING,
    Table,
    change_row,
    filled,
    refusal_row,
    skipped_row,
    split_target,
)

T = TypeVar("T")
Data = dict[str, Any]

# Raised when a field changes its meaning or is removed; new fields do not raise it.
PAGE_VERSION = 2
# Maximum number of entries: of each, or in each.
CPUS, ON_CPU, GUESTS, THREADS, INTERFACES, ROWS = 512, 16, 40, 40, 12, 100
# Maximum length of a text, in characters: a plain QEMU may be called anything.
TEXT = 300

TUNED, DEGRADED, PENDING, REFUSED, NO_POLICY = (
    "tuned", "degraded", "pending", "refused", "no policy",
)  # fmt: skip
_ORDER = (DEGRADED, REFUSED, PENDING, TUNED, NO_POLICY)
# The host before the first pass.
_UNSEEN = Snapshot(Host("", "", 0, (), (), 0, 0), ())


def status_page(state: DaemonState) -> Data:
    """The page for ``state``; a pure function of it. CPU lists in it are CpuSets."""
    snapshot = state.snapshot or _UNSEEN
    guests = _guests(state)
    counts = Counter(standing for _, _, standing in guests)
    rank = {guest.ref: place for place, (guest, _, _) in enumerate(guests)}
    use = reported_use(state.recent.budgets)
    problems = [{"where": f"CPU {s.cpu}", "what": str(s)} for s in state.starved]
    problems += [{"where": p.reader, "what": p.what} for p in snapshot.problems]
    page = {
        "version": PAGE_VERSION,
        "vsrtune": __version__,
        "kernel": snapshot.host.kernel,
        "last_pass": state.last_pass,
        "policies": state.policies,
        "reload_success": state.reload_success,
        "failure": state.failure,
        "totals": {
            "guests": len(snapshot.guests),
            **{standing.replace(" ", "_"): counts[standing] for standing in _ORDER},
            "overridden": sum(told.tuned and told.overrides > 0 for _, told, _ in guests),
            "drift": state.drift,
        },
        **_cpus(snapshot, state),
        "intervals": list(state.recent.seconds),
        **_cut("guests", guests, GUESTS, lambda g: _guest(*g, snapshot.host, state.recent, use)),
        "plan": _plan(state.plan, rank),
        **_cut("drift", state.drifts, ROWS, _drift),
        **_cut("problems", problems, ROWS, dict),
    }
    bounded: Data = _bounded(page)
    return bounded


# -- the same on one screen: `vsrtune status`

# Maximum number of lines: of guests, and of what is wrong.
_SCREEN = 9


def wrong(page: Data) -> list[dict[str, str]]:
    """What is wrong according to the page, the most important first."""
    found = [{"where": "policies", "what": page["failure"]}] if page["failure"] else []
    for row in page["plan"]["refusals"]:
        what = f"refused: {row['because']}; {row['instead']}"
        found.append({"where": row["guest"], "what": what})
    found += page["problems"]
    found += [{"where": g["name"], "what": text} for g in page["guests"] for text in g["problems"]]
    changes: dict[str, list[Data]] = {}
    for row in page["plan"]["changes"]:
        changes.setdefault(row["guest"], []).append(row)
    for guest, rows in changes.items():
        # Others were taken back because of one that failed.
        row = next((r for r in rows if r["why"].startswith("failed")), rows[0])
        first = f"{row['setting']} is {row['now']}, should be {row['then']}"
        why = f" ({row['why']})" if row["why"] else ""
        more = f"; {len(rows) - 1} more, see `vsrtune verify`" if rows[1:] else ""
        found.append({"where": guest, "what": first + why + more})
    for row in page["plan"]["skipped"]:
        if row["held"] or row["pending"]:
            what = f"{row['setting']}: {row['because']}"
            found.append({"where": row["guest"], "what": what})
    return found + [{"where": "host", "what": text} for text in page["plan"]["warnings"]]


def overrides(number: int) -> str:
    """What follows the state of a guest with so many overrides: ``, 1 override``."""
    return f", {counted(number, 'override')}" if number else ""


def screen(page: Data, daemon: str, change: str) -> list[Table]:
    """The page on one screen: ``daemon`` says whether it runs, ``change`` what it did last."""
    totals = page["totals"]
    names = [state.replace(" ", "_") for state in _ORDER]
    counts = [f"{totals[n]} {s}" for n, s in zip(names, _ORDER, strict=True) if totals[n]]
    if not counts:
        counts = [f"{totals['guests']} of unknown state" if totals["guests"] else "none is running"]
    head: list[tuple[str, ...]] = [
        ("daemon", daemon),
        ("guests", ", ".join(counts)),
        ("last change", change or "vsrtune has set nothing here"),
    ]
    guests = [
        {
            "guest": guest["name"],
            "state": guest["state"] + overrides(guest["overrides"]),
            "differs": str(guest["drift"] or NOTHING),
            "policy": guest["policy"] or NOTHING,
        }
        for guest in page["guests"][:_SCREEN]
    ]
    more = totals["guests"] - len(guests)
    found = wrong(page)
    title = "What is wrong" + (f" ({_SCREEN} of {len(found)})" if len(found) > _SCREEN else "")
    return [
        Table(f"vsrtune {page['vsrtune']}", ("", ""), head),
        *filled(
            Table.of(f"Guests ({more} more)" if more else "Guests", guests, text=("policy",)),
            Table.of(title, found[:_SCREEN], "warn", text=("what",), wraps=False),
        ),
    ]


def _guests(state: DaemonState) -> list[tuple[Guest, GuestState, str]]:
    """The guests with their states, in numbers and in a word: those that need somebody, then by
    that word, then most drift, then name."""
    refused = {r.guest for r in state.plan.refusals}
    told = {s.ref: (s, _standing(s, refused)) for s in state.guests}
    found = [(g, *told[g.ref]) for g in (state.snapshot or _UNSEEN).guests if g.ref in told]

    def place(one: tuple[Guest, GuestState, str]) -> tuple[bool, int, int, str]:
        guest, told, standing = one
        well = standing in (TUNED, NO_POLICY) and not guest.problems
        return well, _ORDER.index(standing), -told.drift, guest.ref

    return sorted(found, key=place)


def listed(state: DaemonState) -> list[Guest]:
    """The guests that the page lists."""
    return [guest for guest, _, _ in _guests(state)[:GUESTS]]


def _standing(guest: GuestState, refused: Collection[str]) -> str:
    if guest.tuned:
        return TUNED
    if guest.ref in refused:
        return REFUSED
    if not guest.policy:
        return NO_POLICY
    return PENDING if guest.pending and guest.pending == guest.drift else DEGRADED


# -- the host


def _cpus(snapshot: Snapshot, state: DaemonState) -> Data:
    serving = interrupts(snapshot)
    reserved = {cpu for g in state.guests for cpu in g.irq}
    on: dict[int, list[ThreadView]] = {}
    for guest in snapshot.guests:
        for thread in guest.threads:
            if thread.role is not Role.WORKER:  # those would only flicker
                on.setdefault(_where(thread), []).append(ThreadView(guest.ref, thread))

    def view(cpu: Cpu) -> Data:
        here = sorted(on.get(cpu.id, ()), key=lambda v: ROLES.index(v.thread.role))
        shares = state.recent.cpus.get(cpu.id)
        return {
            "cpu": cpu.id,
            "online": cpu.online,
            "busy": None if shares is None else shares.busy,
            "softirq": None if shares is None else shares.softirq,
            "isolated": cpu.isolated,
            "node": cpu.node,
            "interrupts": serving.get(cpu.id, [])[:CPUS],
            "reserved": cpu.id in reserved,
            "threads": [_on_cpu(v) for v in here[:ON_CPU]],
            "left_out": max(0, len(here) - ON_CPU),
        }

    return _cut("cpus", snapshot.host.cpus, CPUS, view)


def _where(thread: Thread) -> int:
    """The CPU where the thread last ran, or runs next when it was pinned elsewhere since."""
    if thread.last_cpu in thread.affinity or not thread.affinity:
        return thread.last_cpu
    return thread.affinity.first()


def _on_cpu(view: ThreadView) -> Data:
    return {
        "guest": view.guest,
        "thread": view.label,
        "sched": view.sched,
        "pinned": len(view.thread.affinity) == 1,
    }


# -- guests


def _guest(
    guest: Guest,
    told: GuestState,
    standing: str,
    host: Host,
    recent: Recent,
    use: Callable[[Thread], Use],
) -> Data:
    steps = () if told.step is None else (str(told.step),)
    rates = recent.rates.get(guest.ref, ())
    limit = recent.bottlenecks.get(guest.ref)
    return {
        "name": guest.ref,
        "source": guest.source,
        "state": standing,
        "overrides": told.overrides,
        "policy": told.policy,
        "drift": told.drift,
        "held": told.held,
        "pending": told.pending,
        "forwarded": [None if r is None else r.forwarded for r in rates],
        "dropped": [None if r is None else r.dropped for r in rates],
        "bottleneck": None if limit is None else encode(limit),
        **_cut("threads", thread_views(guest, host, use), THREADS, _thread),
        **_cut("interfaces", guest.interfaces, INTERFACES, _interface),
        "problems": [*steps, *guest.problems][:ROWS],
    }


def _thread(view: ThreadView) -> Data:
    thread, sched = view.thread, view.thread.sched
    deadline = sched.cls is SchedClass.DEADLINE
    return {
        "tid": thread.key.tid,
        "thread": view.label,
        "sched_class": sched.cls.value,
        "sched": str(sched),
        "priority": sched.priority if sched.cls in REALTIME else None,
        "runtime_ns": sched.runtime_ns if deadline else None,
        "period_ns": sched.period_ns if deadline else None,
        "used": view.use.budget if deadline else None,
        "cpus": thread.affinity,
        "last_cpu": thread.last_cpu,
        "load": view.use.load,
        "pending": view.pending,
    }


def _interface(interface: Interface) -> Data:
    return {
        "device": interface.target,
        "kind": interface.kind.value,
        "lower": " > ".join(interface.lower),
        "queues": interface.queues,
        "queue_length": interface.txqueuelen,
        "ring_drops": interface.ring_drops,
    }


# -- plan and drift


def _plan(plan: PlanState, rank: Mapping[str, int]) -> Data:
    """The plan in the order of the guests, that of the host first."""

    def place(guest: str) -> int:
        return rank.get(guest, -1)

    skipped = sorted(plan.skipped, key=lambda s: (_urgency(s), place(s.guest)))
    changes = sorted(plan.unmade, key=lambda u: place(u.action.target.guest))
    refusals = sorted(plan.refusals, key=lambda r: place(r.guest))
    return {
        **_cut("changes", changes, ROWS, _change),
        **_cut("refusals", refusals, ROWS, refusal_row),
        **_cut("warnings", plan.warnings, ROWS, str),
        **_cut("skipped", skipped, ROWS, _skipped),
    }


def _change(unmade: Unmade) -> Data:
    return {**change_row(unmade.action), "why": unmade.why}


def _skipped(skipped: Skipped) -> Data:
    return {**skipped_row(skipped), "held": skipped.held, "pending": skipped.pending}


def _urgency(skipped: Skipped) -> int:
    """The rank of a setting left alone: held or pending, the rest, already as required."""
    if skipped.held or skipped.pending:
        return 0
    return 2 if skipped.reason.startswith("already ") else 1


def _drift(drift: Drift) -> Data:
    guest, setting = split_target(drift.target)
    return {
        "guest": guest,
        "setting": setting,
        "was_set_to": drift.desired,
        "found": drift.found,
        "by": str(drift.culprit or drift.by),
        "key": drift.setting,
        "rule": drift.rule.value,
        "left": drift.left,
    }


# -- plots

# Width and height of a plot, in the units of its path.
PLOT = (300, 40)


def plot(values: Sequence[float | None], seconds: Sequence[float]) -> Data:
    """A plot of the values that lasted so many ``seconds`` each: the path, with a step for each
    that is known, the last value (``now``), the least, the most, and the time in words. Empty when
    no value is known."""
    known = [value for value in values if value is not None]
    if not known:
        return {}
    width, height = PLOT
    whole, most, end, path = sum(seconds), max(known), 0.0, f"M0 {height}"
    for value, lasted in zip(values, seconds, strict=True):
        end += width * lasted / whole
        top = height - max(1, height * value / most) if value else height
        path += f"V{top:.0f}H{end:.0f}"
    path += f"V{height}z"
    span = f"{whole / 60:.0f} min" if whole >= 90 else f"{whole:.0f} s"
    return {"path": path, "now": values[-1], "least": min(known), "most": most, "span": span}


# -- sizes and texts


def _cut(name: str, items: Sequence[T], most: int, view: Callable[[T], Any]) -> Data:
    """The field ``name`` with views of the first ``most`` items, and the number of the others."""
    left_out = max(0, len(items) - most)
    return {name: [view(item) for item in items[:most]], f"{name}_left_out": left_out}


def _bounded(value: Any) -> Any:
    """The value, in which each text is printable and cut after TEXT characters."""
    if isinstance(value, str):
        long = len(value) > TEXT
        return printable(value[:TEXT] + "\N{HORIZONTAL ELLIPSIS}" if long else value)
    if isinstance(value, dict):
        return {key: _bounded(one) for key, one in value.items()}
    return [_bounded(one) for one in value] if isinstance(value, list) else value
