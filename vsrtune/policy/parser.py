# SPDX-License-Identifier: GPL-2.0-or-later
"""Policy files: from YAML text to a frozen Policy, with the line of every error.

A policy describes one guest, or the guests that a glob names. ``None`` means unset: vsrtune leaves
alone what the key governs. The planner judges everything that depends on the host (CPUs that
exist, vcpus that a guest has).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import PolicyError, VsrtuneError
from vsrtune.core.text import parse_time, time_text
from vsrtune.model.deadline import (
    MAX_PERIOD_NS,
    MIN_PERIOD_NS,
    MIN_RUNTIME_NS,
    parse_percent,
)
from vsrtune.model.guest import Attachment, SchedClass
from vsrtune.model.plan import DriftRule
from vsrtune.model.targets import DEVICE_SETTINGS
from vsrtune.policy.model import (
    AUTO,
    IRQ_KEYS,
    KUBEVIRT,
    MAX_REST_MS,
    MAX_SLICE_MS,
    PROXMOX,
    WITHOUT_LIBVIRT,
    CpuChoice,
    CpuMap,
    Policy,
    PolicyErrors,
    SchedRule,
    by_hand,
    irq_lists,
    user_number,
)
from vsrtune.policy.schema import DEFAULT, DEFAULT_PROFILE, PROFILES
from vsrtune.policy.validation import line_of, structural
from vsrtune.policy.yaml_reader import Document, KeyPath, dotted, read, shown

BUDGET_KEYS = ("runtime", "period", "deadline", "bandwidth")
# As fnmatch reads them: a character that stands for itself, and a set of characters.
_ESCAPED = re.compile(r"\[([*?[])\]")
_LITERAL = re.compile(r"(\[[*?[]\]|[^*?[])*")
_BRACKETS = re.compile(r"\[(!.|[^!])[^]]*\]", re.DOTALL)
# A VMID, or a glob of them.
_VMID = re.compile(r"[-0-9*?!\[\]]+", re.ASCII)
# NAMESPACE/NAME, or a glob of both.
_MACHINE = re.compile(r"[-0-9a-z*?!\[\]]+/[-.0-9a-z*?!\[\]]+", re.ASCII)
_BUDGET = "write {class: deadline, runtime: 8ms, period: 10ms}"


def parse(text: str, path: str) -> Policy:
    """Read one policy file's text; ``path`` is used in messages and ``Policy.path``.

    Raises PolicyErrors with every error found.
    """
    document = read(text, path)
    require_mapping(document, path, "write keys such as guest: NAME")
    document.data = _with_profile(document.data)
    broken = structural(document, path)
    reader = _Reader(document.lines, path, {keys for keys, _ in broken})
    policy = reader.policy(document.data)
    errors = [*document.errors, *(error for _, error in broken), *reader.errors]
    if errors:
        raise PolicyErrors(sorted(errors, key=lambda e: int(e.where.rpartition(":")[2])))
    return policy


def _with_profile(data: dict[str, Any]) -> dict[str, Any]:
    """The keys of a file, and below them those of its profile."""
    profile = data.get("profile", DEFAULT_PROFILE)
    values = PROFILES.get(profile, {}) if isinstance(profile, str) else {}
    merged = dict(data)
    for (section, key), value in values.items():
        written = merged.get(section, {})
        if isinstance(written, dict) and not ("budget" in written and key in ("vcpu", "vhost")):
            merged[section] = {key: value, **written}
    return merged


def require_mapping(document: Document, path: str, hint: str, kind: str = "policy") -> None:
    """Raises PolicyErrors for a document that is no mapping; ``kind`` is the word for what it
    should hold."""
    if isinstance(document.data, dict):
        return
    if document.data is not None or not document.errors:
        empty = document.data is None
        what = f"no {kind}" if empty else f"{shown(document.data)}, not a mapping"
        error = PolicyError(f"the file holds {what}", where=f"{path}:1", hint=hint)
        document.errors.append(error)
    raise PolicyErrors(document.errors)


def broken_below(broken: Iterable[KeyPath], key: str) -> bool:
    """True when something at or below a key does not fit the schema."""
    return any(keys[:1] == (key,) for keys in broken)


def literal(pattern: str) -> str | None:
    """The one name a guest pattern stands for, or None when it is a glob.

    ``[*]``, ``[?]`` and ``[[]`` stand for the character between the brackets.
    """
    return _ESCAPED.sub(r"\1", pattern) if _LITERAL.fullmatch(pattern) else None


def _unclosed(pattern: str) -> bool:
    """True when a [ has no ] that ends it (fnmatch would take it literally)."""
    return "[" in _BRACKETS.sub("", pattern)


class _Reader:
    """Turns data that fits the schema into a Policy and checks what the schema cannot. It skips
    the keys in ``broken``, whose errors were found already."""

    def __init__(self, lines: dict[KeyPath, int], path: str, broken: set[KeyPath]) -> None:
        self.lines = lines
        self.path = path
        self.broken = broken
        self.errors: list[PolicyError] = []

    def policy(self, data: dict[str, Any]) -> Policy:
        user, together = self.user(data), self.guest_budget(data)
        policy = Policy(
            path=self.path,
            guest=self.guest(data),
            user=user,
            uid=user_number(user),
            irq=self.cpu_map(data, "irq"),
            irq_set=self.get(data, "irq", "set"),
            vcpu=self.cpu_map(data, "vcpu"),
            vhost=self.cpu_map(data, "vhost"),
            napi=self.cpu_map(data, "napi"),
            emulator=self.cpus(data, "cpus", "emulator"),
            iothread=self.cpus(data, "cpus", "iothread"),
            pool=self.cpu_list(self.get(data, "cpus", "pool"), ("cpus", "pool")),
            whole_cores=self.get(data, "cpus", "cores") is not None,
            vcpu_sched=together or self.sched(data, "vcpu"),
            vhost_sched=together or self.sched(data, "vhost"),
            softirq_sched=self.sched(data, "softirq"),
            rest_us=self.rest(data),
            napi_sched=self.sched(data, "napi"),
            budget=together,
            devices={
                row.key: value
                for row in DEVICE_SETTINGS
                if (value := self.get(data, *row.key.split("."))) is not None
            },
            attachment=self.attachment(data),
            drift=self.drift(data),
            placement=None if self.get(data, "placement") is None else AUTO,
            accept_standstill=self.get(data, "standstill") is not None,
            keep_off=self.get(data, "others") is not None,
            profile=self.get(data, "profile") or DEFAULT_PROFILE,
            lines=self.lines,
        )
        if policy.guest.startswith(KUBEVIRT):
            self.in_pod(data, policy)
        here = ("scheduler", "rest")
        if policy.rest_us and not policy.by_profile(*here) and not policy.realtime:
            self.fail(
                here,
                "no thread of the guest is given class fifo or rr",
                "remove it, or give vcpu or vhost class rr",
            )
        self.irq_places(policy)
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
        if text.startswith(PROXMOX) and not _VMID.fullmatch(text, len(PROXMOX)):
            hint = f"write {PROXMOX}101 (`qm list` has the numbers) or {PROXMOX}*"
            self.fail(("guest",), f"{text[len(PROXMOX) :]!r} is not the VMID of a guest", hint)
        if text.startswith(KUBEVIRT) and not _MACHINE.fullmatch(text, len(KUBEVIRT)):
            what = f"{text[len(KUBEVIRT) :]!r} is not the namespace and name of a virtual machine"
            self.fail(("guest",), what, f"write {KUBEVIRT}NAMESPACE/NAME (`kubectl get vmi -A`)")
        if _unclosed(text):
            self.fail(("guest",), "a [ has no closing ]", "write [[] for the character [ itself")
        return str(text)

    def user(self, data: Any) -> str | int | None:
        user = self.get(data, "user")
        if user is not None and not str(self.get(data, "guest") or "").startswith("qemu:"):
            self.fail(
                ("user",),
                "libvirt, Proxmox VE or KubeVirt itself says which process is its guest",
                "remove it, or name a plain QEMU: guest: qemu:NAME",
            )
        return user if user is None or isinstance(user, int) else str(user)

    def attachment(self, data: Any) -> Attachment | None:
        name = self.get(data, "attachment")
        if name is None:
            return None
        if str(self.get(data, "guest") or "").startswith(WITHOUT_LIBVIRT):
            self.fail(
                ("attachment",),
                "plain QEMU cannot be given other interfaces",
                "remove it, and start QEMU on the device it shall have",
            )
        return Attachment(name)

    def in_pod(self, data: Any, policy: Policy) -> None:
        """Errors for what a guest in a pod cannot have."""
        keys = [("cpus", "napi"), ("scheduler", "napi"), ("irq", "set")]
        keys += [(section, key) for section, key in (r.key.split(".") for r in DEVICE_SETTINGS)]
        mapped = [("cpus", "vhost")] if isinstance(policy.vhost, tuple) else []
        for here in (k for k in (*keys, *mapped) if self.get(data, *k) is not None):
            what = "its devices are in its pod's network namespace, where vsrtune does not look"
            self.fail(here, what, "write a CPU list or auto" if here in mapped else "remove it")
        rules = {"vcpu": policy.vcpu_sched, "vhost": policy.vhost_sched}
        if policy.budget is not None:
            rules = {"budget": policy.budget}
        for role in (role for role, rule in rules.items() if rule is not None and rule.deadline):
            what = "class deadline needs a partition of CPUs, and the kubelet gives these out"
            self.fail(("scheduler", role), what, "write class: rr or batch")

    def drift(self, data: Any) -> dict[str, DriftRule]:
        value = self.get(data, "drift")
        if value is None or broken_below(self.broken, "drift"):
            return {}
        rules = {DEFAULT: value} if isinstance(value, str) else value
        return {str(key): DriftRule(rule) for key, rule in rules.items()}

    def cpus(self, data: Any, *keys: str) -> CpuChoice | None:
        value = self.get(data, *keys)
        if isinstance(value, str) and value.strip() == "auto":
            return AUTO
        return self.cpu_list(value, keys)

    def cpu_list(self, value: Any, keys: KeyPath) -> CpuSet | None:
        if value is None or isinstance(value, dict):
            return None
        try:
            cpus = CpuSet.parse(str(value))
        except VsrtuneError as error:
            self.fail(keys, error.what, error.hint or "write CPUs as 1-2,5")
            return None
        if not cpus:
            self.fail(keys, f"{value} names no CPU", "write CPUs as 1-2,5, or leave the key out")
        return cpus or None

    def cpu_map(self, data: Any, role: str) -> CpuChoice | CpuMap | None:
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
        for key in BUDGET_KEYS:
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
        if self.get(data, *here) is None:
            return 0
        if cls is not SchedClass.RR:
            self.fail(here, f"class {cls.value} has no slice", "remove it, or write class: rr")
            return 0
        nanoseconds = self.time(data, *here)
        if nanoseconds is None:
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

    def rest(self, data: Any) -> int:
        """What realtime threads leave of each second in microseconds, 0 when unset."""
        here = ("scheduler", "rest")
        nanoseconds = self.time(data, *here)
        if nanoseconds is None:
            return 0
        if nanoseconds and not 1_000_000 <= nanoseconds <= MAX_REST_MS * 1_000_000:
            what = f"{time_text(nanoseconds)} is not from 1ms to {MAX_REST_MS}ms"
            self.fail(here, what, "write 10ms, or 0ms to leave the host's value alone")
        return nanoseconds // 1000

    def time(self, data: Any, *keys: str) -> int | None:
        """A time in nanoseconds; None when unset or wrong."""
        text = self.get(data, *keys)
        try:
            return None if text is None else parse_time(str(text))
        except VsrtuneError as error:
            self.fail(keys, error.what, error.hint)
            return None

    def budget(self, data: Any, keys: KeyPath) -> SchedRule | None:
        """The rule of class deadline. A value that the kernel would refuse is an error here: the
        limits are those of ``__checkparam_dl`` in kernel/sched/deadline.c."""
        if any((*keys, key) in self.broken for key in BUDGET_KEYS):
            return None
        before = len(self.errors)
        given = {key for key in BUDGET_KEYS if self.get(data, *keys, key) is not None}
        if self.get(data, *keys, "priority") is not None:
            self.fail((*keys, "priority"), "class deadline has no priority", "remove it")
        if {"runtime", "bandwidth"} <= given:
            keep = "keep one of the two"
            self.fail((*keys, "bandwidth"), "runtime stands there too", keep)
        elif given.isdisjoint(("runtime", "bandwidth")):
            self.fail(keys, "class deadline needs a runtime or a bandwidth", _BUDGET)
        if "period" not in given:
            self.fail(keys, "class deadline needs a period", _BUDGET)
        if len(self.errors) > before:
            return None
        period = self.time(data, *keys, "period")
        deadline = self.time(data, *keys, "deadline") if "deadline" in given else period
        share = "runtime" if "runtime" in given else "bandwidth"
        if share == "runtime":
            runtime = self.time(data, *keys, "runtime")
        else:
            runtime = self.share(data, (*keys, "bandwidth"), period or 0)
        if period is None or deadline is None or runtime is None:
            return None
        self.budget_limits(keys, share, runtime, deadline, period)
        if len(self.errors) > before:
            return None
        return SchedRule(SchedClass.DEADLINE, 0, runtime, deadline, period)

    def guest_budget(self, data: Any) -> SchedRule | None:
        """The budget of all vcpu and vhost threads together, which may be more than one CPU."""
        keys, before = ("scheduler", "budget"), len(self.errors)
        if self.get(data, *keys, "cpu") is None or self.get(data, *keys, "period") is None:
            return None
        for role in ("vcpu", "vhost"):
            if self.get(data, "scheduler", role) is not None:
                what = "scheduler.budget stands there too, which is for these threads"
                self.fail(("scheduler", role), what, "keep one of the two")
        period = self.time(data, *keys, "period") or 0
        runtime = self.share(data, (*keys, "cpu"), period)
        if len(self.errors) == before:
            self.budget_limits(keys, "cpu", min(runtime, period), period, period)
        if len(self.errors) > before:
            return None
        return SchedRule(SchedClass.DEADLINE, 0, runtime, period, period)

    def share(self, data: Any, keys: KeyPath, period: int) -> int:
        """The runtime in nanoseconds of a bandwidth, whose text the schema has checked."""
        return int(parse_percent(str(self.get(data, *keys))) * period)

    def budget_limits(
        self, keys: KeyPath, key: str, runtime: int, deadline: int, period: int
    ) -> None:
        """Check a budget, in nanoseconds, whose runtime the policy gives by ``key``."""
        share = (*keys, key)
        order = "write runtime <= deadline <= period"
        if not MIN_PERIOD_NS <= period <= MAX_PERIOD_NS:
            limits = f"{time_text(MIN_PERIOD_NS)} to {time_text(MAX_PERIOD_NS)}"
            what = f"{time_text(period)} is outside {limits}"
            self.fail((*keys, "period"), what, f"write a period from {limits}")
        if runtime < MIN_RUNTIME_NS:
            what = f"a runtime of {time_text(runtime)} is below the kernel's {MIN_RUNTIME_NS} ns"
            self.fail(share, what, "write more, or a longer period")
        if deadline > period:
            what = f"{time_text(deadline)} is longer than the period {time_text(period)}"
            self.fail((*keys, "deadline"), what, order)
        elif runtime > deadline:
            after = "deadline" if deadline != period else "period"
            text = f"a runtime of {time_text(runtime)} is longer than the {after}"
            self.fail(share, f"{text} {time_text(deadline)}", order)

    def irq_places(self, policy: Policy) -> None:
        """Interrupts can be moved to CPUs that the policy names only."""
        if not policy.irq_set or isinstance(policy.irq, CpuSet | tuple):
            return
        if IRQ_KEYS not in self.broken and not broken_below(self.broken, "irq"):
            self.fail(
                ("irq", "set"),
                "the CPUs to which interrupts are to be moved are not named",
                "add cpus: {irq: 0}",
            )

    def irq_overlap(self, policy: Policy) -> None:
        """CPUs that are listed for both interrupts and threads are wrong on any host."""
        hint = "choose CPUs outside cpus.irq, or change cpus.irq"
        for keys, cpus in by_hand(policy):
            for place, irq in irq_lists(policy):
                if both := cpus & irq:
                    what = f"CPU {both} is an interrupt CPU ({dotted(place)} {irq})"
                    self.fail(keys, what, hint)
