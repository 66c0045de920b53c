# SPDX-License-Identifier: GPL-2.0-or-later
"""One policy, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import PolicyError
from vsrtune.core.text import counted
from vsrtune.model.guest import DATA_PLANE, REALTIME, Attachment, Role, Sched, SchedClass
from vsrtune.model.plan import DriftRule
from vsrtune.model.targets import DeviceNumber
from vsrtune.policy.schema import DEFAULT, PROFILES
from vsrtune.policy.validation import line_of
from vsrtune.policy.yaml_reader import KeyPath


class Auto(Enum):
    """The planner chooses the CPUs."""

    AUTO = "auto"


AUTO = Auto.AUTO
# The key of Policy.irq.
IRQ_KEYS: KeyPath = ("cpus", "irq")
# The kernel's own default; longer turns starve more.
MAX_SLICE_MS = 100
# What the kernel keeps from realtime threads by default, of each second.
MAX_REST_MS = 50

# How the names of guests begin that no libvirt of this host runs.
PROXMOX = "proxmox:"
KUBEVIRT = "kubevirt:"
WITHOUT_LIBVIRT = ("qemu:", PROXMOX, KUBEVIRT)

CpuChoice = CpuSet | Auto
# By vcpu number, device, MAC or NUMA node, as a policy writes them.
CpuMap = tuple[tuple[str, CpuSet], ...]


class PolicyErrors(PolicyError):
    """All errors of one or more files, policies or other specifications, in ``errors``."""

    def __init__(self, errors: Iterable[PolicyError]) -> None:
        self.errors = tuple(errors)
        super().__init__(f"{counted(len(self.errors), 'error')} in files")

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


@dataclass(frozen=True)
class SchedRule:
    """A scheduling class to set. ``priority`` is 0 for classes other, batch and deadline; the
    times (nanoseconds) are 0 for all but deadline; ``slice_ms`` is 0 when unset and for all but
    rr."""

    cls: SchedClass
    priority: int = 0
    runtime_ns: int = 0
    deadline_ns: int = 0
    period_ns: int = 0
    slice_ms: int = 0

    @cached_property
    def sched(self) -> Sched:
        """The parameters to write. Realtime classes and deadline are reset on fork, so that a
        thread that QEMU starts later does not inherit them (sched(7)). Otherwise a DEADLINE thread
        could not even fork (EAGAIN)."""
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
    """One policy file. ``lines`` gives the line of every key path. Neither that nor ``path`` counts
    when policies are compared. The plain QEMUs that it names must belong to ``user``; ``uid`` is
    the number of that user, None until somebody looks the name up (config_files).
    ``irq`` are the interrupt CPUs, of all lower devices or by device and NUMA
    node; with ``irq_set``, vsrtune moves interrupts there. ``pool``: the CPUs among which ``auto``
    chooses for threads that handle frames. ``whole_cores``: it chooses CPUs on cores of their own
    for vcpu and vhost threads. ``keep_off``: guests that no policy names leave the CPUs of those
    threads.
    ``budget`` is that of all vcpu and vhost threads of a guest together (guest_budget.py).
    ``rest_us``: what realtime threads leave of each second on their CPU, in us; 0 when unset.
    ``devices`` are the values of device settings by their keys (DeviceNumber.key)."""

    path: str = field(compare=False)
    guest: str
    user: str | int | None = None
    uid: int | None = 0
    irq: CpuChoice | CpuMap | None = None
    irq_set: bool | None = None
    vcpu: CpuChoice | CpuMap | None = None
    vhost: CpuChoice | CpuMap | None = None
    emulator: CpuChoice | None = None
    iothread: CpuChoice | None = None
    vcpu_sched: SchedRule | None = None
    vhost_sched: SchedRule | None = None
    softirq_sched: SchedRule | None = None
    rest_us: int = 0
    napi: CpuChoice | CpuMap | None = None
    napi_sched: SchedRule | None = None
    budget: SchedRule | None = None
    devices: Mapping[str, int] = field(default_factory=dict, hash=False)
    attachment: Attachment | None = None
    drift: Mapping[str, DriftRule] = field(default_factory=dict, hash=False)
    placement: Auto | None = None
    accept_standstill: bool = False
    keep_off: bool = False
    # Its scheduling rules are not those of the file (stepdown).
    lowered: bool = False
    profile: str = "none"
    pool: CpuSet | None = None
    whole_cores: bool = False
    lines: Mapping[KeyPath, int] = field(default_factory=dict, compare=False)

    def at(self, *keys: str) -> str:
        """``file:line`` of a key, or of the nearest key above it that is written. For a key that
        the profile gave: the line of ``profile`` or ``guest``, and the profile's name."""
        if not self.by_profile(*keys):
            return f"{self.path}:{line_of(self.lines, keys)}"
        place = ("profile",) if ("profile",) in self.lines else ("guest",)
        return f"{self.path}:{line_of(self.lines, place)} (profile {self.profile})"

    def by_profile(self, *keys: str) -> bool:
        """Whether the value of a key is the profile's."""
        return keys[:2] in PROFILES[self.profile] and keys[:2] not in self.lines

    def desired(self, setting: type[DeviceNumber]) -> int | None:
        """The value that the policy requires for a setting of devices: a number, True or False."""
        return self.devices.get(setting.key)

    def drift_rule(self, setting: str) -> DriftRule | None:
        """What vsrtune does when somebody changes a setting: the rule of the setting, of its
        section, or the default; None when unset."""
        keys = (setting, setting.partition(".")[0], DEFAULT)
        return next((self.drift[key] for key in keys if key in self.drift), None)

    @property
    def asks(self) -> bool:
        """Whether the policy asks for any setting."""
        bare = Policy(
            self.path, self.guest, self.user, self.uid, self.irq, self.irq_set,
            drift=self.drift, accept_standstill=self.accept_standstill, lowered=self.lowered,
            keep_off=self.keep_off, profile=self.profile, pool=self.pool,
            whole_cores=self.whole_cores,
        )  # fmt: skip
        return self.moves_irqs or self != bare

    @property
    def moves_irqs(self) -> bool:
        """Whether vsrtune moves interrupts (irqs_of says where)."""
        return self.irq_set is True and bool(irq_lists(self))

    @property
    def pins(self) -> bool:
        """True when the policy gives CPUs to threads that handle frames."""
        choices = (self.placement, self.vcpu, self.vhost, self.napi)
        return any(choice is not None for choice in choices)

    @property
    def realtime(self) -> bool:
        """True when the policy gives a realtime class to any thread."""
        return any(rule.realtime for rule in self._rules)

    @property
    def deadline(self) -> bool:
        """True when the policy gives class deadline to any thread."""
        return any(rule.deadline for rule in self._rules)

    @property
    def _rules(self) -> list[SchedRule]:
        """Those of the guest's own threads."""
        rules = (self.vcpu_sched, self.vhost_sched, self.napi_sched)
        return [rule for rule in rules if rule is not None]


def user_number(user: str | int | None) -> int | None:
    """The number of a policy's user; None for a name that has to be looked up."""
    if user is None or user == "root":
        return 0
    return user if isinstance(user, int) else None


def by_hand(policy: Policy) -> list[tuple[KeyPath, CpuSet]]:
    """The CPU lists that the policy writes out for threads that handle frames."""
    return cpu_lists(policy, "vcpu", "vhost", "napi")


def irq_lists(policy: Policy) -> list[tuple[KeyPath, CpuSet]]:
    """The CPU lists that the policy writes out for interrupts."""
    return cpu_lists(policy, "irq")


def cpu_lists(policy: Policy, *keys: str) -> list[tuple[KeyPath, CpuSet]]:
    """The CPU lists that the policy writes out below these keys of ``cpus``."""
    found: list[tuple[KeyPath, CpuSet]] = []
    for key in keys:
        choice: CpuChoice | CpuMap | None = getattr(policy, key)
        if isinstance(choice, CpuSet):
            found.append((("cpus", key), choice))
        elif isinstance(choice, tuple):
            found += [(("cpus", key, part), cpus) for part, cpus in choice]
    return found


def rule_for(policy: Policy, role: Role) -> SchedRule | None:
    """The scheduling that the policy requires for a role."""
    rules = {
        Role.VCPU: policy.vcpu_sched,
        Role.VHOST: policy.vhost_sched,
        Role.NAPI: policy.napi_sched,
    }
    return rules.get(role)


def sched_keys(policy: Policy, role: Role) -> KeyPath:
    """The key that requires the scheduling of a role."""
    together = policy.budget is not None and role in (Role.VCPU, Role.VHOST)
    return ("scheduler", "budget" if together else role.value)


def cpus_for(policy: Policy, role: Role) -> CpuChoice | CpuMap | None:
    """The CPUs that the policy requires for a role of the data plane."""
    choice = {Role.VCPU: policy.vcpu, Role.VHOST: policy.vhost, Role.NAPI: policy.napi}[role]
    return policy.placement if choice is None else choice


def asks_of_host(policy: Policy) -> bool:
    """Whether a guest with this policy needs settings of the host itself: those of ``host_keys``,
    or the root domains of class deadline."""
    return bool(host_keys(policy)) or policy.deadline


def host_keys(policy: Policy) -> frozenset[str]:
    """The keys under which the policy asks for settings of the host itself."""
    desired = {
        "irq.set": policy.moves_irqs,
        "scheduler.softirq": policy.softirq_sched is not None,
        "scheduler.slice": slice_of(policy)[0] > 0,
        "scheduler.rest": policy.realtime and policy.rest_us > 0,
    }
    return frozenset(key for key, needed in desired.items() if needed)


def slice_of(policy: Policy) -> tuple[int, str]:
    """The shortest time slice of class rr that the policy requires, in ms, and the key below
    ``scheduler`` that requires it; 0 for none."""
    rules = {role.value: rule_for(policy, role) for role in DATA_PLANE}
    rules["softirq"] = policy.softirq_sched
    found = ((rule.slice_ms, key) for key, rule in rules.items() if rule and rule.slice_ms)
    return min(found, default=(0, ""))
