"""A frame of `vsrtune top` as tables of text, for any display. Pure."""

from __future__ import annotations

from vsrtune.views.tables import NOTHING, Table, cpu_list
from vsrtune.views.top_model import CpuRow, DropRow, Frame, Resident, ThreadRow

# The names of pidstat(1) and mpstat(1).
CPU_HEADS = ("CPU", "for", "%busy", "%soft", "on it")
THREAD_HEADS = ("guest", "thread", "CPU", "%CPU", "%wait", "%budget", "allowed", "class", "tid")
DROP_HEADS = ("drops/s", "in all", "where", "place", "guest")
PENDING_HEADS = ("guest", "setting", "now", "then", "because")
DRIFT_HEADS = ("guest", "setting", "was set to", "found", "changed by", "policy key", "rule")


def headline(frame: Frame) -> str:
    """The frame in one line."""
    guests = f"{len(frame.guests)} guest{'' if len(frame.guests) == 1 else 's'}"
    parts = [guests, f"over {frame.seconds:.1f} s" if frame.seconds else "measuring"]
    parts.append(f"{count(sum(d.rate or 0.0 for d in frame.drops))} frames/s dropped")
    if frame.planned:
        parts += [f"{len(frame.pending)} pending", f"{len(frame.drift)} drift"]
    parts.append(f"kernel {frame.kernel}")
    return "vsrtune top: " + ", ".join(parts)


def tables(frame: Frame) -> list[Table]:
    """All tables of a frame: headline, CPUs, threads, drops, then pending changes, drift and
    notes, if any."""
    found = [Table(headline(frame), ()), cpu_table(frame), thread_table(frame), drop_table(frame)]
    return [
        *found,
        *(t for t in (pending_table(frame), drift_table(frame), note_table(frame)) if t),
    ]


def cpu_table(frame: Frame) -> Table:
    """The threads and interrupts on each CPU."""
    return Table("CPUs", CPU_HEADS, [_cpu(row) for row in frame.cpus])


def thread_table(frame: Frame) -> Table:
    """Where each thread runs, and how much CPU time it gets."""
    if not frame.guests:
        return Table("Threads: no guest to show", ())
    return Table("Threads", THREAD_HEADS, [_thread(row) for row in frame.threads])


def drop_table(frame: Frame) -> Table:
    """Where frames are dropped."""
    if not frame.drops:
        return Table("Dropped frames: none, at any place that can be read", ())
    return Table("Dropped frames", DROP_HEADS, [_drop(row) for row in frame.drops])


def pending_table(frame: Frame) -> Table | None:
    """Changes that the policies ask for and that are not made yet; None without any."""
    rows: list[tuple[str, ...]] = [
        (p.guest, p.setting, p.now, p.then, p.reason) for p in frame.pending
    ]
    return Table("Pending", PENDING_HEADS, rows, "warn") if rows else None


def drift_table(frame: Frame) -> Table | None:
    """Settings that somebody has changed; None without any."""
    rows: list[tuple[str, ...]] = [
        (d.guest, d.setting, d.desired, d.found, d.by, d.key, d.rule) for d in frame.drift
    ]
    return Table("Drift", DRIFT_HEADS, rows, "warn") if rows else None


def note_table(frame: Frame) -> Table | None:
    """Notes on failures to read; None without any."""
    rows: list[tuple[str, ...]] = [(note,) for note in frame.notes]
    return Table("Notes", ("note",), rows, "warn") if rows else None


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


def _cpu(row: CpuRow) -> tuple[str, ...]:
    on_it = ", ".join(map(resident_text, row.residents)) or NOTHING
    return (str(row.cpu), row.use or NOTHING, percent(row.busy), percent(row.softirq), on_it)


def _thread(row: ThreadRow) -> tuple[str, ...]:
    budget = "pending" if row.pending else percent(row.budget)
    if row.throttled:
        budget += " throttled"
    return (
        row.guest,
        row.thread,
        str(row.cpu),
        percent(row.load),
        percent(row.wait),
        budget,
        cpu_list(row.allowed),
        row.sched,
        str(row.tid),
    )


def _drop(row: DropRow) -> tuple[str, ...]:
    rate = NOTHING if row.rate is None else count(row.rate)
    return (rate, f"{row.total:,}", row.where, row.place, row.guest or NOTHING)
