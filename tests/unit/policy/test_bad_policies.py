"""Every file of tests/bad_policies is one mistake and the exact message for it.

The comment at its head holds the message, one line for each mistake, and names the host that
the policy is checked on (``# host: NAME``), if any. The policy is what follows. It is checked
as ``policy.yaml``, so messages count its lines without that comment. VSRTUNE_REGENERATE=1
writes the messages anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from golden import cases, matches
from planning_samples import change, cpus, host, nic, router, snapshot

from vsrtune.core.errors import PolicyError
from vsrtune.model.guest import Role
from vsrtune.model.plan import Refusal
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.config_files import read_all, read_policy
from vsrtune.plan.planner import plan

CASES = Path(__file__).resolve().parents[2] / "bad_policies"
HOST = "# host: "


def _no_vcpus() -> Snapshot:
    guest = router()
    kept = tuple(t for t in guest.threads if t.role is not Role.VCPU)
    return snapshot(replace(guest, threads=kept, problems=("QMP did not answer",)))


def _scope(allowed: str) -> Snapshot:
    guest = router()
    for role in (Role.VCPU, Role.VHOST, Role.EMULATOR):
        narrow = cpus(allowed)
        inside = {"affinity": narrow, "cpuset_effective": narrow, "cpuset_limit": narrow}
        guest = change(guest, role, **inside, pin=narrow)
    return snapshot(guest)


# A case that needs a host names one of these.
HOSTS: dict[str, Callable[[], Snapshot]] = {
    "router": lambda: snapshot(router()),
    "offline-3": lambda: snapshot(router(online="0-2"), on=host(offline="3")),
    "no-nic": lambda: snapshot(router(interfaces=())),
    "smt": lambda: snapshot(router(), on=host(siblings={0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})),
    "one-cpu": lambda: snapshot(router(online="0", interfaces=()), on=host(1)),
    "irqs-everywhere": lambda: snapshot(router(), on=host(nics=[nic("p0", "0-3")])),
    "no-vcpus": _no_vcpus,
    "scope-0-2": lambda: _scope("0-2"),
    "scope-0": lambda: _scope("0"),
}


def _error(refusal: Refusal) -> PolicyError:
    what = f"{refusal.guest}: {refusal.reason}"
    return PolicyError(what, where=refusal.policy, hint=refusal.hint)


# Policies that no file with a comment at its head can hold.
MADE: dict[str, tuple[bytes, str]] = {
    "control-character": (
        b"guest: vr1\a\n",
        "policy.yaml:1: the text holds a control character that YAML does not allow; remove it",
    ),
    "no-character": (
        b'guest: "\\U00110000"\n',
        (
            "policy.yaml:1: an escape (\\U, \\u, \\x) in the text names no character; write the "
            "character"
        ),
    ),
    "not-utf8": (
        b"guest: vr1\n# r\xe9seau\n",
        "policy.yaml:2: the text is not UTF-8; save the file as UTF-8",
    ),
    "only-comments": (
        b"# guest: vr1\n",
        "policy.yaml:1: the file holds no policy; write keys such as guest: NAME",
    ),
    "too-large": (
        b"guest: vr1\n" + 900 * (b"# filler " + 70 * b"x" + b"\n"),
        "policy.yaml:1: the file is larger than 64 KiB; a policy is a few lines",
    ),
}


def messages(policy: bytes, on: Snapshot | None = None) -> list[str]:
    """What is said of the policy in ``policy.yaml`` here."""
    Path("policy.yaml").write_bytes(policy)
    errors = read_all([Path("policy.yaml")])[1]
    if on is not None and not errors:
        refusals = plan(on, [read_policy(Path("policy.yaml"))]).refusals
        errors = [_error(r) for r in refusals]
    assert errors, "the policy is accepted"
    assert all(e.what and e.where and e.hint for e in errors)
    assert all(e.exit_code == 2 for e in errors)
    return [str(e) for e in errors]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the file as the operator did."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", cases(CASES), ids=lambda p: p.stem)
def test_message(case: Path) -> None:
    lines = case.read_bytes().decode().splitlines(keepends=True)
    head = [*takewhile(lambda line: line.startswith("#"), lines)]
    named = [line for line in head if line.startswith(HOST)]
    on = HOSTS[named[0].removeprefix(HOST).strip()]() if named else None
    policy = "".join(lines[len(head) :])
    said = [f"# {message}\n" for message in messages(policy.encode(), on)]
    matches(case, "".join([*said, *named, policy]))


@pytest.mark.parametrize("name", MADE)
def test_message_of_bytes(name: str) -> None:
    policy, message = MADE[name]
    assert messages(policy) == [message]
