"""Policy files: YAML text to a frozen Policy, every error with its line.

A policy says what one guest, or the guests a glob names, should look like.
``None`` means unset: what the key governs is left alone. What depends on the
host (CPUs that exist, vcpus a guest has) is the planner's to judge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from vsrtune import policy_irq
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import PolicyError, VsrtuneError
from vsrtune.core.text import parse_time, time_text
from vsrtune.model.guest import REALTIME, Attachment, Sched, SchedClass
from vsrtune.policy_budget import BUDGET_KEYS, BudgetReader
from vsrtune.policy_drift import DriftRules, read_rules
from vsrtune.policy_messages import line_of, structural
from vsrtune.policy_schema import QUEUE_MAX, QUEUE_MIN
from vsrtune.policy_yaml import KeyPath, dotted, read, shown


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Shortest and longest ring allowed, frames."""

    low: int = QUEUE_MIN
    high: int = QUEUE_MAX

    def __str__(self) -> str:
        return f"adaptive, {self.low} to {self.high}"


class Auto(Enum):
    """The CPUs are chosen by the planner."""

    AUTO = "auto"


AUTO = Auto.AUTO
ADAPTIVE = "adaptive"
# The kernel's own default; longer turns starve more.
MAX_SLICE_MS = 100

CpuChoice = CpuSet | Auto
VcpuMap = tuple[tuple[int, CpuSet], ...]
DeviceMap = tuple[tuple[str, CpuSet], ...]


class PolicyErrors(PolicyError):
    """All errors of one or more policy files, in ``errors``."""

    def __init__(self, errors: Iterable[PolicyError]) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        super().__init__(f"{count} error{'' if count == 1 else 's'} in policy files")

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


@dataclass(frozen=True)
class SchedRule:
    """A scheduling class to set; ``priority`` is 0 for classes other, batch and deadline, the
    times (nanoseconds) are 0 for all but deadline, ``slice_ms`` is 0 when unset and for
    all but rr."""

    cls: SchedClass
    priority: int = 0
    runtime_ns: int = 0
    deadline_ns: int = 0
    period_ns: int = 0
    slice_ms: int = 0

    @cached_property
    def sched(self) -> Sched:
        """The parameters to write. Realtime classes and deadline are reset on fork, so
        that a thread QEMU starts later does not inherit them (sched(7)); a DEADLINE
        thread could not even fork otherwise (EAGAIN)."""
        return Sched(
            self.cls,
            self.priority,
            reset_on_fork=self.realtime or self.deadline,
            runtime_ns=self.runtime_ns,
            deadline_ns=self.deadline_ns,
            period_ns=self.period_ns,
        )

    @property
    def deadline(self) -> bool:
        """True for class deadline."""
        return self.cls is SchedClass.DEADLINE

    @property
    def realtime(self) -> bool:
        """True for fifo and rr."""
        return self.cls in REALTIME


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy file. ``lines`` gives the line of every key path. ``user`` is whose the plain
    QEMUs must be that it names, ``uid`` the number of that user, None as long as nobody has
    looked the name up (policy_files). ``irq`` are the
    interrupt CPUs, written at ``irq_keys``; with ``irq_set`` interrupts are moved there."""

    path: str
    guest: str
    user: str | int | None = None
    uid: int | None = 0
    irq: CpuChoice | None = None
    irq_set: bool | None = None
    irq_keys: KeyPath = ("cpus", "irq")
    vcpu: CpuChoice | VcpuMap | None = None
    vhost: CpuChoice | DeviceMap | None = None
    emulator: CpuChoice | None = None
    vcpu_sched: SchedRule | None = None
    vhost_sched: SchedRule | None = None
    softirq_sched: SchedRule | None = None
    napi: CpuChoice | DeviceMap | None = None
    napi_sched: SchedRule | None = None
    napi_threaded: bool | None = None
    macvtap_queue: int | QueueBounds | None = None
    attachment: Attachment | None = None
    drift: DriftRules = ()
    placement: Auto | None = None
    accept_standstill: bool = False
    # Its scheduling rules are not those of the file (stepdown).
    lowered: bool = False
    lines: tuple[tuple[KeyPath, int], ...] = ()

    def at(self, *keys: str) -> str:
        """``file:line`` of a key, or of the nearest key above it that is written."""
        return f"{self.path}:{line_of(dict(self.lines), keys)}"

    @property
    def moves_irqs(self) -> CpuSet | None:
        """The CPUs to which interrupts are to be moved; None when they stay."""
        return self.irq if self.irq_set and isinstance(self.irq, CpuSet) else None

    @property
    def pins(self) -> bool:
        """True when the policy gives CPUs to threads that handle frames."""
        choices = (self.placement, self.vcpu, self.vhost, self.napi)
        return any(choice is not None for choice in choices)

    @property
    def realtime(self) -> bool:
        """True when the policy gives a realtime class to any thread."""
        rules = (self.vcpu_sched, self.vhost_sched, self.napi_sched)
        return any(rule is not None and rule.realtime for rule in rules)


def parse(text: str, path: str) -> Policy:
    """Read one policy file's text; ``path`` is used in messages and ``Policy.path``.

    Raises PolicyErrors with every error found.
    """
    document = read(text, path)
    if document.data is None and not document.errors:
        document.errors.append(
            PolicyError("the file holds no policy", where=f"{path}:1", hint="write guest: NAME")
        )
    if document.data is None:
        raise PolicyErrors(document.errors)
    if not isinstance(document.data, dict):
        document.errors.append(
            PolicyError(
                f"the file holds {shown(document.data)}, not a mapping",
                where=f"{path}:1",
                hint="write keys such as guest: NAME",
            )
        )
        raise PolicyErrors(document.errors)
    broken = structural(document, path)
    reader = _Reader(document.lines, path, {keys for keys, _ in broken})
    policy = reader.policy(document.data)
    errors = [*document.errors, *(error for _, error in broken), *reader.errors]
    if errors:
        raise PolicyErrors(sorted(errors, key=lambda e: int(e.where.rpartition(":")[2])))
    return policy


def broken_below(broken: Iterable[KeyPath], key: str) -> bool:
    """True when something at or below a key does not fit the schema."""
    return any(keys[:1] == (key,) for keys in broken)


def literal(pattern: str) -> str | None:
    """The one name a guest pattern stands for, or None when it is a glob.

    ``[*]``, ``[?]`` and ``[[]`` stand for the character between the brackets.
    """
    out: list[str] = []
    rest = pattern
    while rest:
        if len(rest) >= 3 and rest[0] == "[" and rest[1] in "*?[" and rest[2] == "]":
            out.append(rest[1])
            rest = rest[3:]
        elif rest[0] in "*?[":
            return None
        else:
            out.append(rest[0])
            rest = rest[1:]
    return "".join(out)


def _unclosed(pattern: str) -> bool:
    """True when a [ has no ] that ends it (fnmatch would take it literally)."""
    position = pattern.find("[")
    while position >= 0:
        start = position + 1
        if pattern[start : start + 1] == "!":
            start += 1
        end = pattern.find("]", start + 1)
        if end < 0:
            return True
        position = pattern.find("[", end + 1)
    return False


def user_number(user: str | int | None) -> int | None:
    """The number of a policy's user; None for a name that has to be looked up."""
    if user is None or user == "root":
        return 0
    return user if isinstance(user, int) else None


class _Reader:
    """Turns data that fits the schema into a Policy and judges what the schema
    cannot; keys in ``broken`` were judged already and are passed over."""

    def __init__(self, lines: dict[KeyPath, int], path: str, broken: set[KeyPath]) -> None:
        self.lines = lines
        self.path = path
        self.broken = broken
        self.errors: list[PolicyError] = []

    def policy(self, data: dict[str, Any]) -> Policy:
        irq = self.cpus(data, "cpus", "irq")
        beside = self.cpu_list(self.get(data, *policy_irq.LIST_KEYS), policy_irq.LIST_KEYS)
        user = self.user(data)
        policy = Policy(
            path=self.path,
            guest=self.guest(data),
            user=user,
            uid=user_number(user),
            irq=irq if beside is None else beside,
            irq_set=self.get(data, *policy_irq.SET_KEYS),
            irq_keys=policy_irq.place(beside),
            vcpu=self.vcpu(data),
            vhost=self.devices(data, "vhost"),
            napi=self.devices(data, "napi"),
            emulator=self.cpus(data, "cpus", "emulator"),
            vcpu_sched=self.sched(data, "vcpu"),
            vhost_sched=self.sched(data, "vhost"),
            softirq_sched=self.sched(data, "softirq"),
            napi_sched=self.sched(data, "napi"),
            napi_threaded=self.get(data, "napi", "threaded"),
            macvtap_queue=self.queue(data),
            attachment=self.attachment(data),
            drift=() if broken_below(self.broken, "drift") else read_rules(self.get(data, "drift")),
            placement=None if self.get(data, "placement") is None else AUTO,
            accept_standstill=self.get(data, "standstill") is not None,
            lines=tuple(self.lines.items()),
        )
        self.irq_places(irq, beside, policy.irq_set)
        self.irq_overlap(policy)
        return policy

    def get(self, data: Any, *keys: str) -> Any:
        """The value at a key path; None when unset or already found broken."""
        for depth, key in enumerate(keys, 1):
            if keys[:depth] in self.broken or not isinstance(data, dict):
                return None
            data = data.get(key)
        return data

    def fail(self, keys: KeyPath, what: str, hint: str) -> None:
        where = f"{self.path}:{line_of(self.lines, keys)}"
        self.errors.append(PolicyError(f"{dotted(keys)}: {what}", where=where, hint=hint))

    def guest(self, data: Any) -> str:
        text = self.get(data, "guest")
        if text is None:
            return ""
        if text == "qemu:":
            self.fail(("guest",), "no name follows qemu:", "write qemu:NAME or qemu:*")
        if _unclosed(text):
            self.fail(("guest",), "a [ has no closing ]", "write [[] for the character [ itself")
        return str(text)

    def user(self, data: Any) -> str | int | None:
        user = self.get(data, "user")
        if user is not None and not str(self.get(data, "guest") or "").startswith("qemu:"):
            self.fail(
                ("user",),
                "libvirt itself says which process is its guest",
                "remove it, or name a plain QEMU: guest: qemu:NAME",
            )
        return user if user is None or isinstance(user, int) else str(user)

    def attachment(self, data: Any) -> Attachment | None:
        name = self.get(data, "attachment")
        if name is None:
            return None
        if str(self.get(data, "guest") or "").startswith("qemu:"):
            self.fail(
                ("attachment",),
                "plain QEMU cannot be given other interfaces",
                "remove it, and start QEMU on the device it shall have",
            )
        return Attachment(name)

    def queue(self, data: Any) -> int | QueueBounds | None:
        value = self.get(data, "queue", "macvtap")
        low, high = (self.get(data, "queue", key) for key in ("min", "max"))
        if value == ADAPTIVE:
            low = QUEUE_MIN if low is None else low
            high = max(QUEUE_MAX, low) if high is None else high
            if low >= high:
                self.fail(
                    ("queue",),
                    f"min {low} is not below max {high}",
                    f"write the shortest as min and the longest as max, or macvtap: {high}",
                )
            return QueueBounds(low, high)
        for key, bound in (("min", low), ("max", high)):
            if bound is not None and ("queue", "macvtap") not in self.broken:
                hint = "remove it, or write macvtap: adaptive"
                self.fail(("queue", key), "it bounds an adaptive queue, which this is not", hint)
        return None if value is None else int(value)

    def cpus(self, data: Any, *keys: str) -> CpuChoice | None:
        value = self.get(data, *keys)
        if isinstance(value, str) and value.strip() == "auto":
            return AUTO
        return self.cpu_list(value, keys)

    def cpu_list(self, value: Any, keys: KeyPath) -> CpuSet | None:
        if value is None or isinstance(value, dict):
            return None
        try:
            return CpuSet.parse(str(value))
        except VsrtuneError as error:
            self.fail(keys, error.what, error.hint or "write CPUs as 1-2,5")
            return None

    def vcpu(self, data: Any) -> CpuChoice | VcpuMap | None:
        value = self.get(data, "cpus", "vcpu")
        if not isinstance(value, dict):
            return self.cpus(data, "cpus", "vcpu")
        found: list[tuple[int, CpuSet]] = []
        for key in value:
            keys = ("cpus", "vcpu", key)
            cpus = self.cpu_list(self.get(data, *keys), keys)
            if cpus is not None:
                found.append((int(key), cpus))
        return tuple(sorted(found, key=lambda item: item[0]))

    def devices(self, data: Any, role: str) -> CpuChoice | DeviceMap | None:
        value = self.get(data, "cpus", role)
        if not isinstance(value, dict):
            return self.cpus(data, "cpus", role)
        found: dict[str, CpuSet] = {}
        for key in value:
            keys = ("cpus", role, key)
            cpus = self.cpu_list(self.get(data, *keys), keys)
            name = key.lower() if ":" in key else key
            if name in found:
                self.fail(keys, "this MAC address stands here twice", "keep one of the two")
            elif cpus is not None:
                found[name] = cpus
        return tuple(found.items())

    def sched(self, data: Any, role: str) -> SchedRule | None:
        keys = ("scheduler", role)
        name = self.get(data, *keys, "class")
        if name is None:
            return None
        cls = SchedClass(name)
        here = (*keys, "priority")
        priority = self.get(data, *here)
        turn = self.turn(data, keys, cls)
        if cls is SchedClass.DEADLINE:
            return self.budget(data, keys)
        for key in ("runtime", "period", "deadline", "bandwidth"):
            if self.get(data, *keys, key) is not None:
                hint = "remove it, or write class: deadline"
                self.fail((*keys, key), f"class {name} has no {key}", hint)
        if cls in (SchedClass.OTHER, SchedClass.BATCH):
            if priority is not None:
                self.fail(here, f"class {name} has no priority", "remove it, or write class: rr")
            return SchedRule(cls)
        if priority is None:
            if here not in self.broken:
                self.fail(keys, f"class {name} needs a priority", "add priority: 10 (1 to 99)")
            return None
        return SchedRule(cls, priority, slice_ms=turn)

    def turn(self, data: Any, keys: KeyPath, cls: SchedClass) -> int:
        """The time slice in milliseconds, 0 when unset."""
        here = (*keys, "slice")
        text = self.get(data, *here)
        if text is None:
            return 0
        if cls is not SchedClass.RR:
            self.fail(here, f"class {cls.value} has no slice", "remove it, or write class: rr")
            return 0
        try:
            nanoseconds = parse_time(str(text))
        except VsrtuneError as error:
            self.fail(here, error.what, error.hint)
            return 0
        if nanoseconds % 1_000_000 or not 1 <= nanoseconds // 1_000_000 <= MAX_SLICE_MS:
            self.fail(
                here,
                f"{time_text(nanoseconds)} is no whole number of milliseconds from 1 to "
                f"{MAX_SLICE_MS}",
                "write 8ms",
            )
            return 0
        return nanoseconds // 1_000_000

    def budget(self, data: Any, keys: KeyPath) -> SchedRule | None:
        """The rule of class deadline; what the kernel would refuse is told here."""
        reader = BudgetReader(lambda key: self.get(data, *keys, key))
        rule = None
        if not any((*keys, key) in self.broken for key in BUDGET_KEYS):
            found = reader.read()
            rule = None if found is None else SchedRule(SchedClass.DEADLINE, 0, *found)
        for key, what, hint in reader.errors:
            self.fail((*keys, key) if key else keys, what, hint)
        return rule

    def irq_places(self, told: CpuChoice | None, beside: CpuSet | None, moved: bool | None) -> None:
        keys = ("cpus", "irq")
        if keys in self.broken or policy_irq.LIST_KEYS in self.broken:
            return
        listed = told if isinstance(told, CpuSet) else None
        wrong = policy_irq.judge(listed, line_of(self.lines, keys), beside, moved)
        if wrong is not None:
            self.fail(wrong.keys, wrong.what, wrong.hint)

    def irq_overlap(self, policy: Policy) -> None:
        """CPUs given by hand to both interrupts and threads need no host to be wrong."""
        if not isinstance(policy.irq, CpuSet):
            return
        name = dotted(policy.irq_keys)
        for keys, cpus in by_hand(policy):
            both = cpus & policy.irq
            if both:
                self.fail(
                    keys,
                    f"CPU {both} is an interrupt CPU ({name} {policy.irq})",
                    f"choose CPUs outside {name}, or change {name}",
                )


def by_hand(policy: Policy) -> list[tuple[KeyPath, CpuSet]]:
    """The CPU lists for threads that handle frames that the policy writes out."""
    found: list[tuple[KeyPath, CpuSet]] = []
    choices = (("vcpu", policy.vcpu), ("vhost", policy.vhost), ("napi", policy.napi))
    for role, choice in choices:
        if isinstance(choice, CpuSet):
            found.append((("cpus", role), choice))
        elif isinstance(choice, tuple):
            found += [(("cpus", role, str(key)), cpus) for key, cpus in choice]
    return found
