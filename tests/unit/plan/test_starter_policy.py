"""A starting policy is valid and refused nowhere: on the recorded hosts, on the hosts of all
cases of the planner, and for guests of any name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plan_cases
import pytest
import recorded_hosts
from golden import matches
from planning_samples import change, cpus, host, macvtap, router, snapshot

from vsrtune.cli.main import run
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.guest import Guest, Role, SchedClass, WorkerKind
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.planner import plan
from vsrtune.plan.starter_policy import start
from vsrtune.policy.matching import Match, match
from vsrtune.policy.model import AUTO, Policy, SchedRule
from vsrtune.policy.parser import parse

TESTS = Path(__file__).parents[2]
POLICIES = TESTS.parent / "policies"
HOSTS = recorded_hosts.FILES
# Every third: what they are about is planning; here they are hosts of many kinds.
CASES = plan_cases.CASES[::3]


def holds(seen: Snapshot, guest: Guest) -> Policy:
    """The policy that the text is; it plans on the host without a refusal of the guest, and
    leaves nothing that would make a second plan differ."""
    made = start(seen, guest)
    policy = parse(made.text, "p.yaml")
    assert match(policy, guest) is Match.EXACT
    again = plan(seen, [policy])
    assert [r for r in again.refusals if r.guest == guest.ref] == []
    written = [[(a.target, a.after) for a in one.actions] for one in (again, made.plan)]
    assert written[0] == written[1]
    for line in made.text.splitlines():
        assert line.isprintable()
    return policy


@pytest.mark.parametrize("recorded", HOSTS, ids=lambda path: path.stem)
def test_recorded_hosts(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = recorded_hosts.shown(recorded)
    for guest in seen.guests:
        policy = holds(seen, guest)
        assert (policy.vcpu, policy.vhost) == (AUTO, AUTO)
        assert policy.vcpu_sched is not None
        # The command writes the same, and what it writes can be planned.
        assert run(["policy", "init", guest.ref, "--root", str(recorded)]) == 0
        text = capsys.readouterr().out
        assert parse(text, "p.yaml").guest == policy.guest
        file = tmp_path / f"{guest.pid}.yaml"
        file.write_text(text)
    assert run(["policy", "check", str(tmp_path / f"{guest.pid}.yaml")]) == 0
    # All of the host's guests together.
    words = ["plan", "--json", "--root", str(recorded), "--policies", str(tmp_path)]
    capsys.readouterr()
    assert run(words) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["refusals"] == []
    assert planned["actions"] != []


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_hosts_of_the_planners_cases(case: Path) -> None:
    seen = plan_cases.read(case).snapshot
    for guest in seen.guests:
        if not any("guests are named" in problem for problem in guest.problems):
            holds(seen, guest)


@pytest.mark.parametrize(
    "name",
    ["vr 1.ü", "*", "a[b]?", "#1", "qemu:x", 'quo"te', "yes", "12", "vr\u2028x", "tab\there"],
)
def test_names_of_all_kinds(name: str) -> None:
    holds(snapshot(router(name)), router(name))


def test_what_it_says_about_the_guest_and_the_host() -> None:
    guest = router()
    head = start(snapshot(guest), guest).text.partition("\n\n")[0]
    assert head.splitlines()[3:] == [
        "# Kernel 6.12.0, CPUs 0-3",
        "# vr1: interrupt CPUs 0 from p0: where its interrupts (34) are served",
        "# vr1: interrupt CPUs 0 from p1: where its interrupts (35) are served",
        "# 1 vcpu, 2 vhost workers (threads of QEMU)",
        "# interfaces: macvtap10 (macvtap on p0), macvtap11 (macvtap on p1)",
        "# 3 CPUs without interrupts and guests (1-3), 3 threads: one for each",
    ]


def test_plain_qemu() -> None:
    guest = router(source="qemu")
    policy = holds(snapshot(guest), guest)
    assert policy.guest == "qemu:vr1"


@pytest.mark.parametrize(
    ("guest", "text"),
    [
        (replace(router("x" * 300), uuid=""), "can be written in a policy; name it with a glob$"),
        (replace(router(), source="foreign"), "^foreign:vr1: another libvirt .* qemu:///system"),
    ],
)
def test_a_guest_that_no_policy_can_name(guest: Guest, text: str) -> None:
    with pytest.raises(VsrtuneError, match=text):
        start(snapshot(guest), guest)


def test_one_cpu_leaves_nothing_but_the_name_and_the_reasons() -> None:
    guest = router(online="0")
    seen = snapshot(guest, on=host(1))
    policy = holds(seen, guest)
    assert (policy.vcpu, policy.vcpu_sched) == (None, None)
    text = start(seen, guest).text
    assert "refused here: profile router: " in text


def test_interrupts_everywhere_get_a_cpu_by_hand_and_no_realtime() -> None:
    guest = router(online="0-1")
    seen = snapshot(guest, on=host(2, {"p0": "0", "p1": "1"}))
    policy = holds(seen, guest)
    assert policy.irq == cpus("0")
    assert policy.vcpu_sched == SchedRule(SchedClass.BATCH)
    text = " ".join(start(seen, guest).text.replace("#", " ").split())
    assert "served on every online CPU" in text
    # What its comment offers moves them, and is no refusal.
    moved = parse(
        'guest: vr1\ncpus: {irq: "0", vcpu: auto}\nirq: {set: true}\nprofile: none\n', "p.yaml"
    )
    assert "irq: {set: true} moves them" in start(seen, guest).text
    assert plan(seen, [moved]).refusals == ()


def test_moved_interrupts_are_offered_where_they_leave_a_cpu_to_threads() -> None:
    guest = router(online="0-3", vcpus=2)
    seen = snapshot(guest, on=host(4, {"p0": "0", "p1": "1"}))
    made = start(seen, guest)
    first, found, second = made.text.partition("# A second placement: ")
    assert found
    assert "on CPU 0, which leaves CPU 1 to threads" in " ".join(second.replace("#", "").split())
    assert not parse(first, "p.yaml").moves_irqs
    lines = second[second.index("# guest:") : second.index("# The threads")].splitlines()
    moved = parse("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines), "p.yaml")
    assert moved.moves_irqs
    assert moved.irq == cpus("0")
    again = plan(seen, [moved])
    assert again.refusals == ()
    assert any(action.target.kind == "irq-affinity" for action in again.actions)
    # Both placements are shown.
    places = " ".join(first.split()), " ".join(second.replace("#", " ").split())
    assert "vcpu: auto # vcpu 0 on 2, vcpu 1 on 3" in places[0]
    assert "cpus.vcpu: vcpu 0 on 1, vcpu 1 on 2" in places[1]
    # One CPU that serves them all cannot be freed.
    assert "second" not in start(snapshot(guest, on=host(4, {"p0": "0", "p1": "0"})), guest).text


def test_vcpus_take_turns_with_workers() -> None:
    guest = router(online="0-2", vcpus=2)
    policy = holds(snapshot(guest, on=host(3)), guest)
    assert policy.vcpu_sched is not None
    assert policy.vcpu_sched.cls is SchedClass.RR
    assert (policy.vcpu_sched.slice_ms, policy.vhost_sched) == (8, policy.vcpu_sched)


def test_vcpus_that_would_share_a_cpu_are_left_alone() -> None:
    guest = router(online="0-1", vcpus=2)
    seen = snapshot(guest, on=host(2))
    assert holds(seen, guest).vcpu is None
    text = " ".join(start(seen, guest).text.replace("#", " ").split())
    assert "its 2 vcpus would share CPUs 1" in text
    assert "write cpus: {vcpu: 1} and let `vsrtune try` compare" in text


def test_a_kernel_that_refuses_realtime() -> None:
    guest = router()
    text = start(snapshot(guest), guest, no_realtime="RT_GROUP_SCHED").text
    policy = parse(text, "p.yaml")
    assert (policy.vcpu, policy.vcpu_sched) == (AUTO, SchedRule(SchedClass.BATCH))
    assert "refused here: realtime classes: RT_GROUP_SCHED" in text


def test_policies_that_are_there_count() -> None:
    """A guest whose lists leave one CPU: the new guest shares it, and nobody is refused."""
    first, second = router(), router("vr2", 2000)
    theirs = parse("guest: vr1\ncpus: {vcpu: 1, vhost: 2}\nprofile: none\n", "vr1.yaml")
    seen = snapshot(first, second)
    made = start(seen, second, [theirs])
    assert plan(seen, [theirs, parse(made.text, "p")]).refusals == ()
    assert "(3)" not in made.text  # vr1 is not pinned yet, so its CPUs count as free
    # One that names the guest already is replaced.
    assert start(seen, first, [theirs]).plan.refusals == ()


class TestCommand:
    @pytest.fixture
    def recorded(self) -> str:
        return str(HOSTS[0])

    def test_an_existing_file_is_left_alone(
        self, recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "vr1.yaml"
        words = ["policy", "init", "vr1", "--root", recorded, "-o", str(file)]
        assert run(words) == 0
        assert "vsrtune plan" in capsys.readouterr().out
        text = file.read_text()
        assert run(words) == 1
        err = capsys.readouterr().err
        assert str(file) in err
        assert "hint:" in err
        assert file.read_text() == text

    def test_no_second_policy_of_a_guest_comes_into_a_directory(
        self, recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With it no daemon would start. What is no policy of the directory is written."""
        here, other = tmp_path / "here", tmp_path / "other"
        for place in (here, other):
            place.mkdir()
        (here / "interrupts.yaml").write_text("# ours\nguest: vr1\n")
        words = ["policy", "init", "vr1", "--root", recorded, "-o"]
        dirs = ["--policies", str(here), "--policies", str(other)]
        for name in ("here/vr1.yaml", "other/vr1.yaml"):
            assert run([*words, str(tmp_path / name), *dirs]) == 1
            err = capsys.readouterr().err
            assert f"{here}/interrupts.yaml:2: this policy names vr1 already" in err
            assert "move it away" in err
        assert run(["policy", "check", *dirs]) == 0
        # A file of the same name in a later directory is read instead of this one.
        for name in ("vr1.yaml", "here/vr1.yaml.new", "other/interrupts.yaml"):
            assert run([*words, str(tmp_path / name), *dirs]) == 0
        assert run(["policy", "check", *dirs]) == 0

    def test_no_such_guest(self, recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["policy", "init", "nobody", "--root", recorded]) == 1
        assert "vr1" in capsys.readouterr().err

    def test_a_uuid(self, recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
        seen = recorded_hosts.shown(HOSTS[0])
        guest = next(g for g in seen.guests if g.name == "vr1")
        assert run(["policy", "init", guest.uuid, "--root", recorded]) == 0
        assert 'guest: "vr1"' in capsys.readouterr().out

    def test_a_directory_that_is_not_there(
        self, recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["policy", "init", "vr1", "--root", recorded, "-o", str(tmp_path / "no/p.yaml")]
        assert run(words) == 2
        assert f"{tmp_path}/no: the directory does not exist" in capsys.readouterr().err


def test_only_what_differs_from_the_profile_is_written() -> None:
    guest = router()
    short = [line for line in start(snapshot(guest), guest).text.splitlines() if line]
    assert [line for line in short if not line.startswith("#")] == ['guest: "vr1"']
    text = start(snapshot(guest), guest, no_realtime="RT_GROUP_SCHED").text
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == [
        'guest: "vr1"',
        "scheduler:",
        "  vcpu: {class: batch}",
        "  vhost: {class: batch}",
    ]


def test_the_values_of_the_profile_are_in_the_comments() -> None:
    """Of what init writes, and of the shipped policy: without their signs they are the profile."""
    guest = router()
    shipped = (POLICIES / "router.yaml").read_text(encoding="utf-8")
    for text in (start(snapshot(guest), guest).text, shipped):
        begin, end = text.index("# cpus:"), text.index("#   rest:")
        lines = [*text[begin:end].splitlines(), text[end:].partition("\n")[0]]
        values = "\n".join(line.removeprefix("# ") for line in lines)
        read = parse(f"guest: vr1\nprofile: none\n{values}\n", "p")
        asked = parse("guest: vr1\n", "p")
        assert replace(read, profile="", lines={}) == replace(asked, profile="", lines={})


def test_the_shipped_policy_asks_for_what_init_writes() -> None:
    """The measurements of the one hold for the other."""
    shipped = parse((POLICIES / "router.yaml").read_text(encoding="utf-8"), "router.yaml")
    guest = router(online="0-1")
    written = holds(snapshot(guest, on=host(2)), guest)
    same = {"path": "", "guest": "", "lines": ()}
    assert replace(shipped, **same) == replace(written, **same)


def _busy_host() -> Snapshot:
    """vr1's vcpu is pinned to CPU 1, and CPU 3 is isolated."""
    pinned = change(router(), Role.VCPU, affinity=cpus("1"))
    return snapshot(router("vr2", 2000), pinned, on=host(4, isolated="3"))


# The first guest of these hosts, and why the kernel would refuse realtime classes.
TEXTS: dict[str, tuple[Snapshot, str]] = {
    "router": (snapshot(router()), ""),
    "batch": (snapshot(router()), "RT_GROUP_SCHED"),
    "beside-another": (_busy_host(), ""),
    "few-cpus": (snapshot(router(online="0-1", vcpus=2), on=host(2)), ""),
    "interrupts-everywhere": (
        snapshot(router(online="0-1"), on=host(2, {"p0": "0", "p1": "1"})), "",
    ),
    "interrupts-on-two-cpus": (
        snapshot(router(vcpus=2), on=host(4, {"p0": "0", "p1": "1"})), "",
    ),
    "kernel-workers-without-nic": (
        snapshot(router(kind=WorkerKind.KTHREAD, interfaces=[replace(macvtap(10), lower=())])), "",
    ),
    "plain-qemu": (snapshot(router(source="qemu", interfaces=())), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_to_the_letter(name: str) -> None:
    """VSRTUNE_REGENERATE=1 writes it anew."""
    seen, no_realtime = TEXTS[name]
    text = start(seen, seen.guests[0], no_realtime=no_realtime).text
    matches(Path(__file__).parent / "starters" / f"{name}.txt", text)
