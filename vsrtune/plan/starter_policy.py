# SPDX-License-Identifier: GPL-2.0-or-later
"""A starting policy for one guest of a host, as text with comments.

Candidates are planned on the snapshot, the most useful first. The first that the host does not
refuse is used, so the text holds nothing that `vsrtune plan` would refuse here. It writes only
what differs from the default profile. Its comments list the values of the profile, what they mean
on this host, and the refused candidates.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import counted
from vsrtune.model.guest import DATA_PLANE, Guest, Role, WorkerKind
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import Target, Value
from vsrtune.plan.interrupt_cpus import IrqChoice, interrupt_cpus
from vsrtune.plan.planner import plan
from vsrtune.plan.requirements import label
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.matching import Match, match
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse
from vsrtune.policy.schema import DEFAULT_PROFILE, PROFILES, as_written

_WIDTH = 96
_NAME = "policy"

# The values of a policy as YAML texts, by section and key.
_Values = Mapping[tuple[str, str], str]
_PROFILE: _Values = {key: as_written(v) for key, v in PROFILES[DEFAULT_PROFILE].items()}
# Pins alone forwarded less than an untuned host; batch keeps a waking thread from interrupting the
# one that runs.
_BATCH: _Values = {("scheduler", role): "{class: batch}" for role in ("vcpu", "vhost")}
_IRQ = ("cpus", "irq")
_MORE = "# Every key: man vsrtune-policy\n"


@dataclass(frozen=True, slots=True)
class Start:
    """The policy's text, and the plan for the host with it."""

    text: str
    plan: Plan


@dataclass(slots=True)
class _Case:
    """The host and the guest on which candidates are tried."""

    snapshot: Snapshot
    guest: Guest
    name: str
    others: Sequence[Policy]
    applied: Mapping[Target, Value]

    def plan(self, text: str) -> tuple[Plan, str]:
        """The plan with a policy of this text, and why the host refuses it ("": it does
        not)."""
        try:
            policies = [parse(text, _NAME), *self.others]
            overruled = {target.guest for target in self.applied}
            made = plan(self.snapshot, policies, self.applied, overruled)
        except VsrtuneError as error:
            return Plan(), error.what
        refused = (f"{r.reason}; {r.hint}" for r in made.refusals if r.guest == self.guest.ref)
        return made, next(refused, "")


def start(
    snapshot: Snapshot,
    guest: Guest,
    others: Sequence[Policy] = (),
    applied: Mapping[Target, Value] | None = None,
    no_realtime: str = "",
) -> Start:
    """A starting policy for ``guest``.

    ``others`` are the existing policies (one that names this very guest is left out), ``applied``
    the values written on the host. ``no_realtime`` says why the kernel would refuse classes fifo
    and rr, "" when it does not. Raises VsrtuneError for a guest that no policy can name.
    """
    others = [p for p in others if match(p, guest) is not Match.EXACT]
    case = _Case(snapshot, guest, policy_name(guest), others, {} if applied is None else applied)
    tried: list[tuple[str, str]] = []
    if no_realtime:
        tried.append(("realtime classes", no_realtime))
    second = _second(case, realtime=not no_realtime)
    for title, written in _candidates(case, realtime=not no_realtime):
        made, refused = case.plan(_body(case.name, written, {}))
        if not refused:
            return Start(_text(case, written, made, tried, second), made)
        tried.append((title, refused))
    body = f"guest: {case.name}\nprofile: none\n"
    return Start(f"{_head(case, tried)}\n{body}\n{second}{_MORE}", case.plan(body)[0])


def policy_name(guest: Guest) -> str:
    """The guest's name as a policy writes it, in quotes, with a line for its user unless that is
    root; its UUID if the name cannot be written. Raises VsrtuneError for a guest that no policy
    can name."""
    if guest.source == "foreign":
        raise VsrtuneError(
            "another libvirt runs this guest, so no policy reaches it",
            where=guest.ref,
            hint="a session's: define it in qemu:///system; otherwise use --connect with the "
            "system's libvirt that runs it",
        )
    kind = "" if guest.source == "libvirt" else f"{guest.source}:"
    user = f"\nuser: {guest.uid}" if guest.uid else ""
    literal = "".join(f"[{c}]" if c in "*?[" else c for c in guest.name)
    for name in (kind + literal, kind + guest.uuid):
        text = json.dumps(name, ensure_ascii=False) + user
        try:
            written = parse(f"guest: {text}\n", _NAME)
        except VsrtuneError:
            continue
        if match(written, guest) is Match.EXACT:
            return text
    raise VsrtuneError(
        "neither the name nor the UUID of this guest can be written in a policy",
        where=guest.ref,
        hint="name it with a glob",
    )


def _candidates(case: _Case, *, realtime: bool) -> Iterator[tuple[str, _Values]]:
    """The candidates, the most useful first: a title, and what is written above the default
    profile. A realtime thread beside interrupts starves reception, so a candidate with interrupt
    CPUs by hand has no realtime class."""
    if realtime:
        yield f"profile {DEFAULT_PROFILE}", {}
    yield "class batch", _BATCH
    online = case.snapshot.host.online
    if len(online) > 1:
        by_hand = {_IRQ: str(online.first()), **_BATCH}
        yield "class batch, with the interrupt CPU by hand", by_hand


def _second(case: _Case, *, realtime: bool) -> str:
    """A second placement as comments, where moved interrupts leave a CPU to threads; "" where
    they do not, or the host refuses it."""
    irq = _interrupts(case).cpus
    if len(irq) < 2:
        return ""
    first = CpuSet([irq.first()])
    moved = {_IRQ: str(first), ("irq", "set"): "true", **({} if realtime else _BATCH)}
    made, refused = case.plan(_body(case.name, moved, {}))
    if refused:
        return ""
    notes = _notes(case, made, moved)
    told = (
        f"A second placement: all interrupts of its NICs on CPU {first}, which leaves CPU "
        f"{irq - first} to threads. Write these lines instead of those above, and keep "
        "irqbalance away from the interrupts (docs/interrupts.md)."
    )
    then = ["The threads are then placed so:"]
    then += [f"cpus.{key}: {notes[('cpus', key)]}" for key in ("vcpu", "vhost", "emulator")]
    body = "".join(
        f"# {line}".rstrip() + "\n" for line in _body(case.name, moved, notes).splitlines()
    )
    return f"{_comment([told, ''])}{body}#\n{_comment(then)}\n"


def _after(case: _Case, made: Plan) -> Guest:
    """The guest as the plan leaves it."""
    result = project_actions(case.snapshot, made.actions)
    return next(g for g in result.guests if g.pid == case.guest.pid)


def _body(name: str, written: _Values, notes: _Values) -> str:
    """The policy itself; ``notes`` are comments by key."""
    return "\n".join([f"guest: {name}", *_sections(written, notes)]) + "\n"


def _sections(values: _Values, notes: _Values) -> Iterator[str]:
    """The lines of values, section by section."""
    last = ""
    for (section, key), value in values.items():
        if section != last:
            yield f"{section}:"
        last, note = section, notes.get((section, key), "")
        yield f"  {key}: {value}" + (f"    # {_safe(note)}" if note else "")


def _text(
    case: _Case, written: _Values, made: Plan, tried: list[tuple[str, str]], second: str
) -> str:
    notes = _notes(case, made, written)
    warnings = _comment([f"Warning: {w}" for w in made.warnings])
    told = (
        f"profile: {DEFAULT_PROFILE}, the default, has these values. A key that is written above "
        "replaces one:"
    )
    given = {key: value for key, value in _PROFILE.items() if key not in written}
    profile = "".join(f"# {line}\n" for line in _sections(given, notes))
    return (
        f"{_head(case, tried)}{warnings}\n{_body(case.name, written, notes)}\n"
        f"{_comment([told, ''])}{profile}\n{second}{_MORE}"
    )


def _notes(case: _Case, made: Plan, written: _Values) -> dict[tuple[str, str], str]:
    """What each setting means on this host now."""
    after = _after(case, made)
    irq = _interrupts(case).cpus
    notes = {
        _IRQ: f"now CPU {irq}" if irq else "none: the guest has no NIC on a lower device",
        ("cpus", "vcpu"): _placed(after, Role.VCPU),
        ("cpus", "vhost"): _placed(after, Role.VHOST) or "the guest has no vhost worker",
        ("cpus", "emulator"): f"now CPU {after.main.affinity}" if after.main is not None else "",
    }
    if ("irq", "set") in written:
        notes[_IRQ] = f"the interrupts are served on CPU {irq} now"
    elif _IRQ in written:
        notes[_IRQ] = (
            f"by hand; the interrupts are served on CPU {irq}, and irq: {{set: true}} moves them "
            "here"
        )
    if ("scheduler", "vcpu") in written:
        notes["scheduler", "softirq"] = "for real-time threads, of which there are none"
        notes["scheduler", "rest"] = "likewise"
    else:
        notes["scheduler", "vcpu"] = "rr: under fifo a busy vcpu never gives way to a worker"
        notes["scheduler", "softirq"] = "ksoftirqd beside them, else routed frames are lost"
        notes["scheduler", "rest"] = "before 6.12 the kernel stops them for 50 ms at a time"
    return notes


def _placed(guest: Guest, role: Role) -> str:
    return ", ".join(f"{label(t)} on {t.affinity}" for t in guest.by_role(role))


def _interrupts(case: _Case) -> IrqChoice:
    return interrupt_cpus(case.snapshot.host, case.guest)


def _head(case: _Case, tried: Iterable[tuple[str, str]]) -> str:
    host, guest = case.snapshot.host, case.guest
    choice = _interrupts(case)
    online = host.online
    busy = CpuSet.union(
        t.affinity
        for other in case.snapshot.guests
        if other.pid != guest.pid
        for t in other.threads
        if t.role in DATA_PLANE and len(t.affinity) == 1
    )
    free = online - choice.cpus - busy
    threads = [t for t in guest.threads if t.role in DATA_PLANE]
    workers = guest.by_role(Role.VHOST)
    kinds = {WorkerKind.KTHREAD: "kernel threads", WorkerKind.TASK: "threads of QEMU"}
    kind = " and ".join(sorted({kinds[t.worker] for t in workers if t.worker is not None}))
    nics = ", ".join(
        f"{i.target} ({i.kind.value}" + (f" on {i.lower[-1]}" if i.lower else "") + ")"
        for i in guest.interfaces
    )
    share = f"{counted(len(threads), 'thread')}: " + (
        "one for each" if len(free) >= len(threads) else "they share CPUs"
    )
    lines = [
        f"Starting policy for {guest.ref}, for this host as it is now. Put it into",
        "/etc/vsrtune/policies, then look at `vsrtune plan`: it changes nothing.",
        "",
        f"Kernel {host.kernel}, CPUs {online}"
        + (f", isolated {host.isolated}" if host.isolated else ""),
        *choice.notes,
        f"{counted(len(guest.by_role(Role.VCPU)), 'vcpu')}, {counted(len(workers), 'vhost worker')}"
        + (f" ({kind})" if kind else ""),
        f"interfaces: {nics or 'none'}",
        f"{counted(len(free), 'CPU')} without interrupts and guests ({free or 'none'}), {share}",
        *(f"refused here: {what}: {why}" for what, why in tried),
    ]
    return _comment(lines)


def _comment(lines: Iterable[str]) -> str:
    """Comment lines, wrapped; the indent of a line stays that of its continuation."""
    out: list[str] = []
    for line in lines:
        safe = _safe(line)
        indent = " " * (len(safe) - len(safe.lstrip()))
        wrapped = textwrap.wrap(
            safe.strip(), _WIDTH - 2 - len(indent), initial_indent=indent,
            subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        out += wrapped or [""]
    return "".join(f"# {line}".rstrip() + "\n" for line in out)


def _safe(text: str) -> str:
    """Text that cannot end a comment: names of guests and devices may hold anything."""
    return "".join(c if c.isprintable() else "?" for c in text)
