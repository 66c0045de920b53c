"""Originals that travel with a guest: the notes in its domain, and what becomes of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shell_samples as samples
from fake_host import FakeHost
from fake_kernel import BOOT, FakeKernel, make_host, make_plan, without_lists
from shell_samples import POLICY, travelled

from vsrtune.cli import main
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import WriteError
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute import executor
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.syscalls import LibvirtPins
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import NAMESPACE, Note, behind, notes_xml, parse_cputune
from vsrtune.model.guest import CarriedPin, Guest, Role, ThreadKey
from vsrtune.model.journal_records import Entry
from vsrtune.model.plan import Plan
from vsrtune.model.targets import EmulatorPin, Pin, ThreadAffinity, VcpuPin
from vsrtune.observe.guests import _cputune
from vsrtune.plan import brought_pins
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

ZERO, ONE, TWO, ALL = CpuSet([0]), CpuSet([1]), CpuSet([2]), CpuSet(range(4))
KEY = ThreadKey(100, 101, 5000)


def xml(cputune: str = "", notes: str | None = None, vcpu: str = "<vcpu>2</vcpu>") -> str:
    """A live domain XML as libvirt writes it; ``notes`` are the children of our element."""
    metadata = ""
    if notes is not None:
        metadata = (
            f'<metadata><vsrtune:originals xmlns:vsrtune="{NAMESPACE}">{notes}'
            "</vsrtune:originals></metadata>"
        )
    return f"<domain><name>vr1</name>{metadata}{vcpu}<cputune>{cputune}</cputune></domain>"


class TestNotes:
    def pinned(
        self, text: str, which: int | None, cpus: CpuSet, thread: ThreadKey | None = None
    ) -> str:
        """The XML after a pin by us."""
        found = parse_cputune(text)
        notes = behind(found.ahead(which, cpus, None, thread), which, cpus)
        return self.with_pin(text, notes, which, cpus)

    def with_pin(
        self, text: str, notes: dict[int | None, Note], which: int | None, cpus: CpuSet
    ) -> str:
        """The XML with these notes and a pin, whoever made it."""
        pins = {**parse_cputune(text).pins, which: cpus}
        lines = "".join(
            f"<emulatorpin cpuset='{c}'/>" if w is None else f"<vcpupin vcpu='{w}' cpuset='{c}'/>"
            for w, c in pins.items()
        )
        inner = notes_xml(notes).removeprefix("<originals>").removesuffix("</originals>")
        inner = inner.replace("<vcpu", "<vsrtune:vcpu").replace("<emul", "<vsrtune:emul")
        return xml(lines, inner if notes else None)

    def test_the_first_pin_notes_what_was_there(self) -> None:
        text = self.pinned(xml("<vcpupin vcpu='1' cpuset='0-2'/>"), 0, ONE)
        text = self.pinned(text, 1, TWO)
        text = self.pinned(text, None, ZERO)
        assert parse_cputune(text).notes == {
            0: Note(None, (ONE,)), 1: Note(CpuSet(range(3)), (TWO,)), None: Note(None, (ZERO,)),
        }  # fmt: skip
        assert set(parse_cputune(text).carried()) == {
            CarriedPin(0, ONE, None), CarriedPin(1, TWO, CpuSet(range(3))),
            CarriedPin(None, ZERO, None),
        }  # fmt: skip

    def test_later_pins_keep_the_original(self) -> None:
        text = xml("<vcpupin vcpu='0' cpuset='0-2'/>")
        for cpus in (ONE, TWO, ONE, ONE):
            text = self.pinned(text, 0, cpus)
        assert parse_cputune(text).notes == {0: Note(CpuSet(range(3)), (ONE,))}
        assert parse_cputune(self.pinned(text, 0, CpuSet(range(3)))).notes == {}

    def test_where_there_was_no_pin_the_note_stays(self) -> None:
        """libvirt cannot take a pin away, and carries the one to all CPUs along."""
        text = self.pinned(self.pinned(xml(), 0, ONE), 0, ALL)
        assert parse_cputune(text).carried() == (CarriedPin(0, ALL, None),)

    def test_a_note_names_the_thread_that_was_pinned_last(self) -> None:
        text = self.pinned(xml(), 0, ONE, replace(KEY, tid=77))
        text = self.pinned(text, 0, TWO, KEY)
        assert parse_cputune(text).notes == {0: Note(None, (TWO,), KEY)}
        assert parse_cputune(text).carried() == (CarriedPin(0, TWO, None, KEY),)

    def test_a_crash_between_note_and_pin_leaves_either_pin_ours(self) -> None:
        text = self.pinned(xml("<vcpupin vcpu='0' cpuset='0-2'/>"), 0, ONE)
        notes = parse_cputune(text).ahead(0, TWO)
        for cpus in (ONE, TWO):
            left = self.with_pin(text, notes, 0, cpus)
            assert parse_cputune(left).carried() == (CarriedPin(0, cpus, CpuSet(range(3))),)

    def test_a_pin_of_somebody_else_is_no_pin_of_ours_and_the_next_original(self) -> None:
        text = self.pinned(xml("<vcpupin vcpu='0' cpuset='0-2'/>"), 0, ONE)
        theirs = self.with_pin(text, dict(parse_cputune(text).notes), 0, CpuSet([3]))
        assert parse_cputune(theirs).carried() == ()
        assert parse_cputune(self.pinned(theirs, 0, TWO)).notes == {0: Note(CpuSet([3]), (TWO,))}

    def test_without_a_pin_a_thread_gets_the_domains_cpus(self) -> None:
        text = xml(
            "<vcpupin vcpu='0' cpuset='1'/>",
            "<vsrtune:vcpu id='0' ours='1'/>",
            "<vcpu cpuset='1-2'>1</vcpu>",
        )
        assert parse_cputune(text).carried() == (CarriedPin(0, ONE, CpuSet([1, 2])),)

    @pytest.mark.parametrize(
        "notes",
        [
            "<vsrtune:vcpu id='0' ours='x'/>",
            "<vsrtune:vcpu id='0'/>",
            "<vsrtune:vcpu ours='1'/>",
            "<vsrtune:vcpu id='0' ours='1'/><vsrtune:vcpu id='0' ours='1'/>",
            "<vsrtune:vcpu id='0' ours='1' original='99999999'/>",
            "<vsrtune:vcpu id='0' ours='1' thread='100 101'/>",
            "<vsrtune:later/>",
        ],
    )
    def test_notes_that_make_no_sense_are_none_and_said(self, notes: str) -> None:
        found = parse_cputune(xml("<vcpupin vcpu='0' cpuset='1'/>", notes))
        assert found.carried() == ()
        assert "make no sense" in found.problem
        assert found.ahead(0, TWO) == {0: Note(ONE, (TWO,))}

    def test_another_element_in_our_namespace_is_said(self) -> None:
        text = xml("", "").replace("originals", "others").replace(":others:1", ":originals:1")
        assert "not <originals>" in parse_cputune(text).problem


class TestLibvirt:
    """libvirt's own metadata, by its test driver."""

    @pytest.fixture
    def domain(self) -> Iterator[Any]:
        libvirt = pytest.importorskip("libvirt")
        connection = libvirt.open("test:///default")
        yield connection.lookupByName("test")
        connection.close()

    @pytest.fixture
    def pins(self) -> Iterator[LibvirtPins]:
        found = LibvirtPins("test:///default")
        yield found
        found.close()

    def test_a_pin_leaves_its_original_in_the_domain(self, domain: Any, pins: LibvirtPins) -> None:
        uuid = domain.UUIDString()
        domain.pinEmulator((True, True, False, False), 0)
        pins.pin(uuid, None, ONE)
        pins.pin(uuid, None, TWO)
        assert parse_cputune(domain.XMLDesc(0)).carried() == (CarriedPin(None, TWO, ZERO | ONE),)
        pins.pin(uuid, None, ZERO | ONE)
        assert "<metadata>" not in domain.XMLDesc(0)
        assert parse_cputune(domain.XMLDesc(0)).pins == {None: ZERO | ONE}

    def test_the_journal_tells_the_original(self, domain: Any, pins: LibvirtPins) -> None:
        """A guest that was tuned before there were notes, or pinned by somebody whose pin
        was nobody's to have, is noted with what undo restores."""
        uuid = domain.UUIDString()
        domain.pinEmulator((True, True, False, False), 0)
        for was, original in ((CpuSet(), None), (TWO, TWO)):
            pins.pin(uuid, None, ONE, was)
            found = parse_cputune(domain.XMLDesc(0)).carried()
            assert found == (CarriedPin(None, ONE, original),)

    def test_the_thread_stands_in_the_note(self, domain: Any, pins: LibvirtPins) -> None:
        pins.pin(domain.UUIDString(), None, ONE, None, KEY)
        found = parse_cputune(domain.XMLDesc(0)).carried()
        assert found == (CarriedPin(None, ONE, None, KEY),)

    def test_foreign_text_gives_way(self, domain: Any, pins: LibvirtPins) -> None:
        domain.setMetadata(2, "<b/>", "vsrtune", NAMESPACE, 1)
        domain.setMetadata(2, "<mine/>", "other", "urn:other", 1)
        pins.pin(domain.UUIDString(), None, ONE)
        found = parse_cputune(domain.XMLDesc(0))
        assert (found.problem, found.carried()) == ("", (CarriedPin(None, ONE, None),))
        assert "urn:other" in domain.XMLDesc(0)

    def test_without_its_note_nothing_is_pinned(
        self, domain: Any, pins: LibvirtPins, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        libvirt = sys.modules["libvirt"]

        def refuse(*_: object) -> None:
            raise libvirt.libvirtError("no metadata here")

        before = domain.emulatorPinInfo()
        monkeypatch.setattr(libvirt.virDomain, "setMetadata", refuse)
        uuid = domain.UUIDString()
        said = f"^domain {uuid} emulator: libvirt refused: no metadata here"
        with pytest.raises(WriteError, match=said):
            pins.pin(uuid, None, ONE)
        assert domain.emulatorPinInfo() == before


class Noting(FakeKernel):
    """Remembers of each pin what it was told that undo restores, and the thread, as a domain
    does."""

    def pin(
        self,
        uuid: str,
        which: int | None,
        cpus: CpuSet,
        was: CpuSet | None = None,
        thread: ThreadKey | None = None,
    ) -> None:
        super().pin(uuid, which, cpus)
        self.state["notes"]["emulator" if which is None else str(which)] = (str(was), thread)


@pytest.mark.parametrize("controller", [True, False])
def test_the_original_in_the_journal_is_what_is_noted(tmp_path: Path, controller: bool) -> None:
    host = Noting(make_host("6.12").state | {"notes": {}})
    if not controller:
        without_lists(host)
    with Journal.open(tmp_path / "journal", BOOT) as journal:
        ops = LiveSysOps(root=host, calls=host, original=journal.original)
        pins = [a for a in make_plan(host).actions if isinstance(a.target, VcpuPin | EmulatorPin)]
        assert executor.apply(Plan(tuple(pins)), ops, journal).failed == ()
        notes = dict(host.state["notes"])
        assert {which: was for which, (was, _) in notes.items()} == {
            "0": "", "1": "0-2", "emulator": "",
        }  # fmt: skip
        assert {thread for _, thread in notes.values()} == {a.target.thread for a in pins}
        executor.undo(ops, journal)
        assert host.state["notes"] == notes


def seen(guest: Guest) -> list[tuple[CpuSet, str | None]]:
    return [(t.affinity, t.cpuset_cpus) for t in guest.threads]


class TestBrought:
    """The daemon, ``plan`` and ``undo`` with a guest that has come with our pins."""

    UNTUNED = [(ALL, "")] * 3

    @pytest.fixture
    def host(self) -> FakeHost:
        return FakeHost(travelled())

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Iterator[Journal]:
        with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as opened:
            yield opened

    def policies(self) -> tuple[Policy, ...]:
        return (parse(POLICY, "test.yaml"),)

    def test_a_daemon_tunes_it_and_the_stop_gives_back_what_it_had(
        self, host: FakeHost, journal: Journal
    ) -> None:
        passes = Reconciler(host, host, journal, self.policies())
        assert passes.run()
        (guest,) = host.snapshot.guests
        assert guest.by_role(Role.VHOST)[0].affinity == TWO
        assert passes.stop()
        assert seen(host.snapshot.guests[0]) == self.UNTUNED

    def test_without_a_policy_it_gets_back_what_it_had_at_once(
        self, host: FakeHost, journal: Journal
    ) -> None:
        passes = Reconciler(host, host, journal, ())
        assert passes.run()
        assert seen(host.snapshot.guests[0]) == self.UNTUNED
        writes, size = host.writes, journal.path.stat().st_size
        for _ in range(3):
            assert not passes.run()
        assert (host.writes, journal.path.stat().st_size) == (writes, size), "once is enough"

    def test_a_stop_looks_at_guests_that_have_just_come(self, journal: Journal) -> None:
        host = FakeHost(samples.guest("vr0", 300))
        passes = Reconciler(host, host, journal, ())
        passes.run()
        host.start(travelled())
        assert passes.stop()
        assert seen(host.snapshot.guests[1]) == self.UNTUNED

    def test_the_journal_knows_more(self, host: FakeHost, journal: Journal) -> None:
        """The notes of a guest that is tuned here are ours as well; they change nothing."""
        passes = Reconciler(host, host, journal, self.policies())
        passes.run()
        (guest,) = host.snapshot.guests
        wrong = tuple(replace(c, original=CpuSet([3])) for c in guest.carried)
        host.snapshot = replace(host.snapshot, guests=(replace(guest, carried=wrong),))
        writes = host.writes
        assert not passes.run()
        assert host.writes == writes
        assert passes.stop()
        assert seen(host.snapshot.guests[0]) == self.UNTUNED

    def test_a_busy_guest_is_left_until_libvirt_is_done(self, journal: Journal) -> None:
        host = FakeHost(replace(travelled(), busy=True))
        passes = Reconciler(host, host, journal, ())
        assert not passes.run()
        host.snapshot = replace(host.snapshot, guests=(travelled(),))
        assert passes.run()
        assert seen(host.snapshot.guests[0]) == self.UNTUNED

    def test_a_thread_that_somebody_has_moved_stays(self, journal: Journal) -> None:
        made = travelled()
        emulator, vcpu, worker = made.threads
        host = FakeHost(replace(made, threads=(emulator, replace(vcpu, affinity=TWO), worker)))
        Reconciler(host, host, journal, ()).run()
        assert seen(host.snapshot.guests[0])[1] == (TWO, "1")

    def test_a_pin_to_all_cpus_after_an_undo_is_somebody_elses(self, journal: Journal) -> None:
        """Undo of this very thread left it on all CPUs, with its note and without a list."""
        made = samples.guest()
        emulator, vcpu, worker = made.threads
        carried = CarriedPin(0, ALL, None, vcpu.key)
        listed = replace(vcpu, cpuset_cpus="0-3", cpuset_effective=ALL)
        guest = replace(made, threads=(emulator, listed, worker), carried=(carried,))
        before = seen(guest)
        host = FakeHost(guest)
        assert not Reconciler(host, host, journal, ()).run()
        assert seen(host.snapshot.guests[0]) == before
        passes = Reconciler(host, host, journal, self.policies())
        assert passes.run()
        assert passes.stop()
        assert seen(host.snapshot.guests[0]) == before
        came = replace(guest, carried=(replace(carried, thread=replace(vcpu.key, pid=99)),))
        (entry,) = brought_pins.entries([came], host.snapshot.host, ())
        assert entry.original == Pin(ALL, "")

    def test_where_there_was_no_pin_it_gets_what_isolation_and_its_slice_leave(self) -> None:
        snapshot = samples.snapshot(travelled())
        cpus = tuple(replace(c, isolated=c.id == 3) for c in snapshot.host.cpus)
        host = replace(snapshot.host, cpus=cpus)
        found = brought_pins.entries(snapshot.guests, host, ())
        assert [e.original for e in found] == [Pin(CpuSet(range(3)), "")] * 2
        in_slice = tuple(replace(t, cpuset_limit=CpuSet([0, 3])) for t in travelled().threads)
        narrow = replace(travelled(), threads=in_slice)
        found = brought_pins.entries([narrow], host, ())
        assert [e.original for e in found] == [Pin(ZERO, "")] * 2
        pinned = replace(travelled(), carried=(CarriedPin(0, ONE, CpuSet([0, 3])),))
        (entry,) = brought_pins.entries([pinned], host, ())
        assert isinstance(entry.target, VcpuPin)
        assert entry.original == Pin(CpuSet([0, 3]), "0,3")

    def test_a_napi_thread_of_a_device_that_outlived_it_is_no_thread_of_its(
        self, host: FakeHost
    ) -> None:
        napi = samples.napi_guest().threads[-1]
        guest = replace(travelled(), threads=(*travelled().threads, napi))
        target = ThreadAffinity(guest.ref, napi.key, "napi")
        known = Entry(target, ALL, ONE, "done")
        assert len(brought_pins.entries([guest], host.snapshot.host, [known])) == 2
        worker = Entry(replace(target, thread=guest.threads[2].key), ALL, ONE, "done")
        assert brought_pins.entries([guest], host.snapshot.host, [known, worker]) == ()

    def test_a_vcpu_that_is_plugged_again_has_brought_its_pin(
        self, host: FakeHost, journal: Journal
    ) -> None:
        """libvirt starts it on our pin; the note names the thread that was unplugged."""
        host.snapshot = samples.snapshot(samples.guest())
        passes = Reconciler(host, host, journal, self.policies())
        assert passes.run()
        note = CarriedPin(0, ONE, None, host.snapshot.guests[0].by_role(Role.VCPU)[0].key)
        host.change("vcpu", key=replace(note.thread, tid=199))
        host.each(lambda guest: replace(guest, carried=(note,)))
        passes.run()
        assert host.snapshot.guests[0].by_role(Role.VCPU)[0].affinity == ONE
        assert not passes.run()
        assert passes.stop()
        assert seen(host.snapshot.guests[0]) == self.UNTUNED

    def test_plan_shows_what_is_put_back_and_then_what_is_set(self, host: FakeHost) -> None:
        made = full_plan(host.snapshot, self.policies(), ())
        back = [a for a in made.actions if a.reason == brought_pins.REASON]
        assert [(type(a.target), a.after) for a in back] == [
            (EmulatorPin, Pin(ALL, "")), (VcpuPin, Pin(ALL, "")),
        ]  # fmt: skip
        assert made.actions[:2] == tuple(back)
        assert all(a.before != a.after for a in made.actions)

    def test_undo_restores_without_any_entry_of_the_journal(
        self,
        host: FakeHost,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("vsrtune.cli.apply._with_libvirt_guests", lambda _: host.observe())
        monkeypatch.setattr("vsrtune.cli.apply.LiveSysOps", lambda **_: host)
        monkeypatch.setattr("vsrtune.cli.apply.boot_id", lambda: samples.BOOT)
        (tmp_path / "j").touch()
        (tmp_path / "l").touch()
        words = ["undo", "--journal", str(tmp_path / "j"), "--attach-ledger", str(tmp_path / "l")]
        assert main.run(words) == 0
        assert "2 settings restored" in capsys.readouterr().out
        assert seen(host.snapshot.guests[0]) == self.UNTUNED
        assert main.run(words) == 0
        assert "Nothing to undo" in capsys.readouterr().out

    def test_apply_journals_what_was_there_before_us(
        self, host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policies = tmp_path / "policies"
        policies.mkdir()
        (policies / "a.yaml").write_text(POLICY)
        monkeypatch.setattr("vsrtune.cli.apply.observe", lambda *_: host.observe())
        monkeypatch.setattr("vsrtune.cli.apply._with_libvirt_guests", lambda _: host.observe())
        monkeypatch.setattr("vsrtune.cli.apply.LiveSysOps", lambda **_: host)
        monkeypatch.setattr("vsrtune.cli.apply.boot_id", lambda: samples.BOOT)
        more = ["--journal", str(tmp_path / "j"), "--attach-ledger", str(tmp_path / "l")]
        assert main.run(["apply", "--policies", str(policies), *more]) == 0
        assert host.snapshot.guests[0].by_role(Role.VHOST)[0].affinity == TWO
        assert main.run(["undo", *more]) == 0
        assert seen(host.snapshot.guests[0]) == self.UNTUNED


def test_notes_that_make_no_sense_are_a_problem_of_their_guest() -> None:
    text = xml("<vcpupin vcpu='0' cpuset='1'/>", "<vsrtune:later/>")
    found = _cputune(domain_xml.parse(text))
    assert found.carried() == ()
    assert "<later>" in found.problem
