# SPDX-License-Identifier: GPL-2.0-or-later
"""A frame of `vsrtune top` as tables of text, for any display. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vsrtune.core.codec import encode
from vsrtune.core.text import counted
from vsrtune.views.host_view import ThreadView
from vsrtune.views.tables import NOTHING, Table, cpu_list, filled
from vsrtune.views.top_frame import CpuRow, DropRow, Frame, Resident


def headline(frame: Frame) -> str:
    """The frame in one line."""
    guests = counted(len(frame.guests), "guest")
    parts = [guests, f"over {frame.seconds:.1f} s" if frame.seconds else "measuring"]
    parts.append(f"{count(sum(d.rate or 0.0 for d in frame.drops))} frames/s dropped")
    parts.append(f"kernel {frame.kernel}")
    return "vsrtune top: " + ", ".join(parts)


def tables(frame: Frame) -> list[Table]:
    """All tables of a frame: headline, CPUs, threads, rates, drops, and notes, if any."""
    first = [Table(headline(frame), ()), cpu_table(frame), thread_table(frame)]
    flow = filled(rate_table(frame), bottleneck_table(frame))
    return [*first, *flow, drop_table(frame), *filled(note_table(frame))]


def cpu_table(frame: Frame) -> Table:
    """The threads and interrupts on each CPU."""
    rows = [_cpu(row) for row in frame.cpus]
    return Table.of("CPUs", rows, text=("on it",), right=("CPU", "%busy", "%soft"), wraps=False)


def thread_table(frame: Frame) -> Table:
    """Where each thread runs, and how much CPU time it gets."""
    if not frame.guests:
        return Table("Threads: no guest to show", ())
    rows = [_thread(view) for view in frame.threads]
    return Table.of("Threads", rows, spare=("tid",), right=("CPU", "%CPU", "%wait"))


def rate_table(frame: Frame) -> Table:
    """The frames that each guest forwards, and those that are dropped in front of it. No rows
    where no counter tells them."""
    rows = [
        {
            "guest": guest,
            "forwarded/s": NOTHING if rates is None else count(rates.forwarded),
            "dropped/s": NOTHING if rates is None else count(rates.dropped),
        }
        for guest in (frame.guests if frame.rates else ())
        for rates in (frame.rates.get(guest),)
    ]
    return Table.of("Frames", rows, right=("forwarded/s", "dropped/s"))


def bottleneck_table(frame: Frame) -> Table:
    """The stage that limits each guest, and what would help."""
    rows = [
        {
            "guest": one.guest,
            "limited by": f"{one.where or one.stage}" + ("" if one.sure else "?"),
            "stage": one.stage.value,
            "because": one.why,
            "what helps": one.help,
        }
        for one in frame.bottlenecks
    ]
    return Table.of("Bottlenecks", rows, text=("because", "what helps"), spare=("stage",))


def drop_table(frame: Frame) -> Table:
    """Where frames are dropped."""
    if not frame.drops:
        return Table("Dropped frames: none, at any place that can be read", ())
    rows = [_drop(row) for row in frame.drops]
    return Table.of("Dropped frames", rows, right=("drops/s", "in all"))


def note_table(frame: Frame) -> Table:
    """Notes on what could not be read."""
    return Table.of("Notes", [{"note": note} for note in frame.notes], "warn", text=("note",))


def data(frame: Frame) -> dict[str, Any]:
    """What `top --json` prints of a frame."""
    return {
        **encode(replace(frame, threads=())),
        "threads": [_thread_data(view) for view in frame.threads],
    }


def percent(share: float | None) -> str:
    """A share in percent, with one decimal."""
    return NOTHING if share is None else f"{100 * share:.1f}"


def count(number: float) -> str:
    """A number or rate; fractions only where they matter."""
    return f"{number:.1f}" if 0 < number < 10 and number % 1 else f"{number:,.0f}"


def resident_text(resident: Resident) -> str:
    """``vr1 vcpu 0 42.0%``; ``irq 41 p0-rx-0 (vr1) 1,200/s``, without the guest when the
    interrupt works for several."""
    if resident.kind == "thread":
        text = f"{resident.guests[0]} {resident.label}"
    else:
        alone = len(resident.guests) == 1
        text = f"{resident.label} ({resident.guests[0]})" if alone else resident.label
    if resident.load is not None:
        text += f" {percent(resident.load)}%"
    return text if resident.rate is None else f"{text} {count(resident.rate)}/s"


# Columns have the names of mpstat(1) and pidstat(1).


def _cpu(row: CpuRow) -> dict[str, str]:
    return {
        "CPU": str(row.cpu),
        "for": row.use or NOTHING,
        "%busy": percent(row.busy),
        "%soft": percent(row.softirq),
        "on it": ", ".join(map(resident_text, row.residents)) or NOTHING,
    }


def _thread(view: ThreadView) -> dict[str, str]:
    budget = "pending" if view.pending else percent(view.use.budget)
    return {
        "guest": view.guest,
        "thread": view.label,
        "CPU": str(view.thread.last_cpu),
        "%CPU": percent(view.use.load),
        "%wait": percent(view.use.wait),
        "%budget": budget + (" throttled" if view.use.throttled else ""),
        "allowed": cpu_list(view.thread.affinity),
        "class": view.sched,
        "tid": str(view.thread.key.tid),
    }


def _thread_data(view: ThreadView) -> dict[str, Any]:
    thread = view.thread
    return {
        "guest": view.guest,
        "thread": view.label,
        "role": thread.role.value,
        "tid": thread.key.tid,
        "cpu": thread.last_cpu,
        "allowed": str(thread.affinity),
        "sched": view.sched,
        **encode(view.use),
        "throttled": view.use.throttled,
        "pending": view.pending,
        "beside_interrupts": view.beside_interrupts,
    }


def _drop(row: DropRow) -> dict[str, str]:
    return {
        "drops/s": NOTHING if row.rate is None else count(row.rate),
        "in all": f"{row.total:,}",
        "where": row.where,
        "place": row.place,
        "guest": row.guest or NOTHING,
    }
