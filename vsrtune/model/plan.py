# SPDX-License-Identifier: GPL-2.0-or-later
"""A plan: actions in order, skipped settings, refusals and drift; and its JSON, which
``vsrtune plan --json`` prints and ``apply --plan`` executes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import InputError, StaleError, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.model.targets import Setting, Target, V, Value, decode_target, decode_value


@dataclass(frozen=True, slots=True)
class Action:
    """Change ``target`` from ``before`` to ``after``, because of ``reason``. ``enforced``:
    another party set ``before``, and undo must not restore it. ``release``: ``after`` is the
    journalled original of a setting that no policy asks for any more."""

    target: Target
    before: Value
    after: Value
    reason: str
    enforced: bool = False
    release: bool = False

    @staticmethod
    def of(setting: Setting[V], before: V, after: V, reason: str) -> Action:
        """An action whose values are of the setting's type, which mypy checks."""
        return Action(cast(Target, setting), cast(Value, before), cast(Value, after), reason)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON; ``from_data`` gives an equal Action."""
        data = cast(dict[str, Any], encode(self))
        if not self.release:
            # The journal stores actions too, and never a release.
            del data["release"]
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Action:
        """Read ``to_data`` output. Raises VsrtuneError as ``decode`` does."""
        target = decode_target(data.get("target"))
        return cls(
            target,
            decode_value(target, data.get("before"), "$.before"),
            decode_value(target, data.get("after"), "$.after"),
            decode(str, data.get("reason"), "$.reason"),
            decode(bool, data.get("enforced", False), "$.enforced"),
            decode(bool, data.get("release", False), "$.release"),
        )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A setting that the plan leaves as it is, and why. ``held``: an operator changed it after
    vsrtune, so it is drift although nothing will be written. ``pending``: the kernel accepts it
    only once its thread has run, or libvirt once it is done with the guest. ``stepped``: the guard
    took it from the guest (stepdown). ``vain``: the policy asks for it, and it cannot be made."""

    guest: str
    subject: str
    reason: str
    held: bool = False
    pending: bool = False
    stepped: bool = False
    vain: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A requirement of a policy that this host cannot meet; its guest gets no action at all.
    ``hint`` says what to write instead."""

    guest: str
    policy: str
    reason: str
    hint: str


class DriftRule(Enum):
    """What vsrtune does about a setting that somebody changed."""

    ENFORCE = "enforce"  # put it back
    ADOPT = "adopt"  # accept the new value until a reload
    REPORT = "report"  # leave it, and say so


# What the kernel says was changed: the key of a kind of setting, and the thread, device or
# interrupt.
Place = tuple[str, int | str]


@dataclass(frozen=True, slots=True)
class Culprit:
    """The process that the kernel saw change a setting. ``comm`` is the name that its thread had
    then, which anybody chooses freely; ``unit`` is systemd's unit, "" when it had ended before
    it was looked at; ``when`` is in seconds of the monotonic clock."""

    pid: int
    comm: str
    unit: str = ""
    when: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.comm} (pid {self.pid}, {self.unit or 'which has ended'})"


@dataclass(frozen=True, slots=True)
class Drift:
    """A setting that somebody changed after vsrtune set it. ``setting`` is the key of the policy
    (``cpus.vcpu``), ``rule`` says what vsrtune does about it, ``by`` who changed it, as far as
    there is evidence ("" when unknown), ``left`` why it is not put back ("" when it is),
    ``culprit`` the process, where the kernel told."""

    target: Target
    setting: str
    rule: DriftRule
    desired: str
    found: str
    by: str
    left: str
    culprit: Culprit | None = None


# By guest: the interrupt CPUs that its policy lists, and the lower devices that it lists them for.
Heeded = Mapping[str, tuple[CpuSet, frozenset[str]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that ``plan`` prints and ``apply`` executes, with its actions in order.
    ``for_verify`` holds the settings that are already as the policies say, for those who remember
    them. ``heeded`` are the guests whose interrupt CPUs get no vcpu, vhost or NAPI thread: the
    CPUs that are listed, and those that the host shows for other devices. ``accepted`` are the
    guests whose policies accept a standstill. ``disowned`` are targets of the journal that no
    policy asks for any more and that somebody else has changed: they are forgotten. These four are
    neither compared nor stored."""

    actions: tuple[Action, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    drift: tuple[Drift, ...] = ()
    for_verify: Mapping[Target, Value] = field(default_factory=dict, compare=False, repr=False)
    heeded: Heeded = field(default_factory=dict, compare=False, repr=False)
    accepted: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    disowned: tuple[Target, ...] = field(default=(), compare=False, repr=False)

    def about(self, guests: Collection[str]) -> Plan:
        """The part of the plan that is about these guests, to be shown."""
        return replace(
            self,
            actions=tuple(a for a in self.actions if a.target.guest in guests),
            skipped=tuple(s for s in self.skipped if s.guest in guests),
            refusals=tuple(r for r in self.refusals if r.guest in guests),
            drift=tuple(d for d in self.drift if d.target.guest in guests),
            notes=tuple(n for n in self.notes if n.partition(": ")[0] in guests),
        )


PLAN_VERSION = 1
# What is stored beside the actions.
_STORED = ("skipped", "refusals", "warnings", "notes", "drift")


def plan_text(plan: Plan, boot_id: str) -> str:
    """JSON text; ``read_plan`` with the same boot_id gives an equal Plan."""
    data = {
        "version": PLAN_VERSION,
        "boot_id": boot_id,
        "actions": [a.to_data() for a in plan.actions],
        **{name: encode(getattr(plan, name)) for name in _STORED},
    }
    return json.dumps(data, indent=2, ensure_ascii=False)


def read_plan(text: str, boot_id: str, where: str = "plan") -> Plan:
    """Read a stored plan.

    Raises InputError for text that is no plan, StaleError for a plan of another boot or host: its
    thread ids mean other threads.
    """
    try:
        data: Any = json_value(text)
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where=where) from None
    if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
        raise InputError(
            f"not a plan of version {PLAN_VERSION}",
            where=where,
            hint="write one with `vsrtune plan --json`",
        )
    if data.get("boot_id") != boot_id:
        raise StaleError(
            "the plan was made on another host, or before this one was booted",
            where=where,
            hint="make a new one with `vsrtune plan --json`",
        )

    def items(key: str) -> list[Any]:
        value = data.get(key, [])
        if not isinstance(value, list):
            raise InputError("expected a list", where=f"{where}: $.{key}")
        return value

    def action(value: Any) -> Action:
        if not isinstance(value, dict):
            raise InputError("expected a mapping", where="$.actions")
        return Action.from_data(value)

    try:
        return Plan(
            tuple(action(a) for a in items("actions")),
            tuple(decode(Skipped, s) for s in items("skipped")),
            tuple(decode(Refusal, r) for r in items("refusals")),
            tuple(decode(str, w) for w in items("warnings")),
            tuple(decode(str, n) for n in items("notes")),
            tuple(decode(Drift, d) for d in items("drift")),
        )
    except VsrtuneError as error:
        raise InputError(error.what, where=f"{where}: {error.where}") from None
