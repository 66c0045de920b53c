"""page_data.py, page.html.j2: what the status page tells of recorded hosts, that no name breaks
it, and that it stays small."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import recorded_hosts
import recorded_state
import shell_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from top_samples import GOLDEN

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.http import html
from vsrtune.model.daemon_state import DaemonState, GuestState, PlanState, Recent
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.host import Cpu
from vsrtune.model.load import CpuShares, FrameRates, mean
from vsrtune.model.plan import Plan, Refusal
from vsrtune.views import page_data
from vsrtune.views.page_data import status_page


class Outline(HTMLParser):
    """Elements with their attributes, and all text outside the style sheet."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def fields(state: DaemonState) -> Any:
    """The fields of /status.json, as attributes."""
    data = json.dumps(encode(status_page(state)))
    return json.loads(data, object_hook=lambda fields: SimpleNamespace(**fields))


def document(state: DaemonState) -> Outline:
    return Outline(html(status_page(state)))


def tuned(name: str, rename: str = "") -> DaemonState:
    """A recorded host that is tuned, with made-up traffic."""
    with recorded_state.passes(name, rename=rename) as (_, passes):
        passes.run()
        return recorded_state.with_traffic(passes.state)


def test_a_recorded_host_on_which_somebody_has_changed_a_queue() -> None:
    with recorded_state.passes("trixie-e1000e") as (host, passes):
        passes.run()
        device = recorded_state.set_queue(host, 0, 77)
        passes.run()
        state = recorded_state.with_traffic(replace(passes.state, last_pass=0.0))
    data = encode(status_page(state))
    golden.matches(GOLDEN / "status-keys.txt", golden.keys(data))
    assert data["cpus"][0] == {
        "cpu": 0, "online": True, "busy": 0.665, "softirq": 0.585, "isolated": False, "node": 0,
        "interrupts": ["p0", "p1"], "reserved": False, "threads": [], "left_out": 0,
    }  # fmt: skip
    left = "reported: something changed it to 77, we had set 300; a reload takes it back"
    assert data["drift"] == [
        {
            "guest": "vr1", "setting": f"{device} txqueuelen", "was_set_to": "300", "found": "77",
            "by": "", "key": "queue.macvtap", "rule": "report", "left": left,
        }
    ]  # fmt: skip
    assert data["plan"]["skipped"][0] == {
        "guest": "vr1", "setting": f"{device} queue", "because": left, "held": True,
        "pending": False,
    }  # fmt: skip
    first = data["guests"][0]
    assert (first["forwarded"][-1], first["dropped"][-1]) == (48000.0, 6000.0)
    assert first["threads"][0] == {
        "tid": 445, "thread": "vcpu 0", "sched_class": "rr", "sched": "rr:10 reset-on-fork",
        "priority": 10, "runtime_ns": None, "period_ns": None, "used": None, "cpus": "2",
        "last_cpu": 1, "load": None, "pending": False,
    }  # fmt: skip
    assert first["interfaces"][0] == {
        "device": device, "kind": "macvtap", "lower": "p0", "queues": 2, "queue_length": 77,
        "ring_drops": 0,
    }  # fmt: skip
    shown = document(state).text
    for word in (device, "unknown", "report", "a reload takes it back"):
        assert word in shown


def test_interrupt_cpus_that_a_policy_names() -> None:
    source = recorded_state.POLICY.replace("irq: auto", "irq: 1").replace("vcpu: auto", "vcpu: 2")
    source = source.replace("vhost: auto", "vhost: 2")
    with recorded_state.passes("trixie-napi", source=source) as (_, passes):
        passes.run()
        page = fields(passes.state)
    assert [c.reserved for c in page.cpus] == [False, True, False]
    assert "interrupt CPU by policy" in document(passes.state).text


@pytest.mark.parametrize("name", [file.stem for file in recorded_hosts.FILES])
def test_every_thread_and_interface_of_a_recorded_host_is_told(name: str) -> None:
    state = tuned(name)
    page = fields(state)
    snapshot = recorded_hosts.shown(recorded_hosts.file(name))
    assert page.totals.tuned == len(snapshot.guests)
    told = {g.name: g for g in page.guests}
    text = document(state).text
    for guest in snapshot.guests:
        view = told[guest.ref]
        assert view.policy.endswith("routers.yaml" if guest.source == "libvirt" else "plain.yaml")
        assert {t.tid for t in view.threads} == {t.key.tid for t in guest.threads}
        assert {t.priority for t in view.threads if t.sched_class == "rr"} == {10}
        assert {i.device for i in view.interfaces} == {i.target for i in guest.interfaces}
        assert all(i.queue_length == 300 for i in view.interfaces if "macvtap" in i.kind)
        for word in (guest.ref, *(i.target for i in guest.interfaces)):
            assert word in text
    assert f"vsrtune: {len(told)} of {len(told)} guests tuned, 0 drift" in text
    assert "Nothing to change." in text
    assert "Nobody has changed what was set." in text


def test_changes_that_are_not_made_are_told_with_their_error() -> None:
    with recorded_state.passes("bookworm-veth-plain") as (host, passes):
        recorded_state.refuse_classes(host)
        passes.run()
        page = fields(passes.state)
        assert {g.state for g in page.guests} == {"degraded"}
        assert (page.totals.tuned, page.totals.degraded) == (0, 2)
        whys = {(c.guest, c.why) for c in page.plan.changes}
        assert any(guest == "vr1" and "not permitted" in why for guest, why in whys)
        assert any("another change of the guest failed" in why for _, why in whys)
        text = document(passes.state).text
        assert "Changes that are not made yet" in text
        passes.run()
        waits = fields(passes.state).plan.changes
        assert {c.why for c in waits if c.guest == "vr1"} == {
            "it failed before, and is tried again less and less often"
        }


def test_refused_and_without_a_policy() -> None:
    source = 'guest: "vr1"\ncpus: {{vcpu: 7}}\nprofile: none\n'
    with recorded_state.passes("bookworm-veth-plain", source=source) as (_, passes):
        passes.policies = passes.policies[:1]
        passes.run()
        page = fields(passes.state)
    assert [(g.name, g.state) for g in page.guests] == [
        ("vr1", "refused"),
        ("qemu:pq1", "no policy"),
    ]
    (refusal,) = page.plan.refusals
    assert refusal.guest == "vr1"
    assert refusal.instead in document(passes.state).text


def test_budget_and_load() -> None:
    guest = samples.guest()
    emulator, vcpu, worker = guest.threads
    budget = Sched(
        SchedClass.DEADLINE, runtime_ns=2_000_000, deadline_ns=5_000_000, period_ns=10_000_000
    )
    vcpu = replace(vcpu, sched=budget, load=(0.25, 0.75))
    state = DaemonState(
        snapshot=samples.snapshot(replace(guest, threads=(emulator, vcpu, worker))),
        guests=(GuestState("vr1", "libvirt", tuned=False, drift=1, pending=1, policy="a.yaml"),),
        recent=Recent(budgets={vcpu.key: 0.98}),
        reload_success=False,
    )
    page = fields(state)
    (view,) = page.guests
    assert view.state == "pending"
    (thread,) = [t for t in view.threads if t.thread == "vcpu 0"]
    assert (thread.runtime_ns, thread.period_ns) == (2_000_000, 10_000_000)
    assert (thread.used, thread.load, thread.priority) == (0.98, mean(vcpu.load), None)
    assert view.interfaces[0].ring_drops == 7
    text = document(state).text
    assert "98 %" in text
    assert "older policies stay in force" in text
    assert "tracefs is not mounted" in text


@pytest.mark.parametrize("rule", ["report", "adopt"])
def test_a_tuned_guest_with_an_override(rule: str) -> None:
    source = recorded_state.POLICY.replace("queue: report", f"queue: {rule}")
    with recorded_state.passes("trixie-e1000e", source=source) as (host, passes):
        passes.run()
        recorded_state.set_queue(host, 0, 77)
        passes.run()
        page = fields(passes.state)
        shown = document(passes.state)
        table = page_data.screen(status_page(passes.state), "", "")[1]
    first, second = page.guests
    assert (first.state, first.overrides, second.overrides) == ("tuned", 1, 0)
    assert (page.totals.tuned, page.totals.overridden) == (2, 1)
    assert "2 tuned, 1 with overrides" in shown.text
    tags = {a.get("class") for tag, a in shown.elements if tag == "span"}
    assert {"tag warn", "tag good"} <= tags
    assert [row[:2] for row in table.rows] == [("vr1", "tuned, 1 override"), ("vr2", "tuned")]


def test_what_is_wrong_with_a_guest_stands_above_its_tables() -> None:
    with recorded_state.passes("bookworm-veth-plain") as (host, passes):
        recorded_state.refuse_classes(host)
        passes.run()
        text = re.sub(r"\s+", " ", document(passes.state).text)
    for name in ("vr1", "qemu:pq1"):
        above = text.partition(f" {name} degraded ")[2].partition(" thread class ")[0]
        assert re.search(
            r"is other, should be rr:10.* \(failed: .*not permitted\); \d+ more, see `vsrtune verify`",
            above,
        ), name


def test_the_reasons_of_the_guests_that_are_listed_are_not_cut() -> None:
    state = many(1000)
    refusals = [Refusal(f"router{n:04}", "a.yaml:1", "no CPU is left", "-") for n in range(1000)]
    plan = PlanState.after(Plan(refusals=tuple(reversed(refusals))), ())
    page = fields(replace(state, plan=plan))
    assert {g.name for g in page.guests} <= {r.guest for r in page.plan.refusals}


def test_a_plot_has_a_step_for_each_value_that_is_known() -> None:
    assert page_data.plot([None, None], [10, 10]) == {}
    assert page_data.plot([], []) == {}
    told = page_data.plot([None, 5, 0, 10], [10, 10, 20, 40])
    assert told == {
        "path": "M0 40V40H38V20H75V40H150V0H300V40z",
        "now": 10, "least": 0, "most": 10, "span": "80 s",
    }  # fmt: skip
    assert page_data.plot([1, 10_000], [60, 60])["path"].startswith("M0 40V39H150")
    assert page_data.plot([0.0], [300])["path"] == "M0 40V40H300V40z"


def test_a_pass_that_failed_says_why() -> None:
    for snapshot in (None, samples.snapshot()):
        state = DaemonState(snapshot=snapshot, failure="libvirtd does not answer")
        assert "libvirtd does not answer" in document(state).text
        assert fields(state).failure == "libvirtd does not answer"


def test_before_the_first_pass() -> None:
    text = document(DaemonState()).text
    assert "No pass has ended yet." in text
    assert "No guest is running" in text


def test_a_thread_that_was_moved_since_it_ran_stands_where_it_may_run() -> None:
    guest = samples.guest()
    threads = tuple(replace(t, affinity=CpuSet([2]), last_cpu=0) for t in guest.threads)
    page = fields(DaemonState(snapshot=samples.snapshot(replace(guest, threads=threads))))
    assert [len(c.threads) for c in page.cpus] == [0, 0, 3, 0]


# -- foreign names


EVIL = [
    '<script>alert(1)</script>',
    '"><img src=x onerror=alert(1)>',
    "</title></style></td></table><h1>",
    "' onmouseover='x",
    "&lt;b&gt;",
    "]]>--><!--",
    "javascript:alert(1)",
]  # fmt: skip


@pytest.mark.parametrize("name", EVIL)
def test_a_name_is_text_wherever_it_stands(name: str) -> None:
    """The same elements as with a harmless name, and the name as it is among the texts."""
    harmless = document(tuned("bookworm-veth-plain", "vr9"))
    outline = document(tuned("bookworm-veth-plain", name))
    assert outline.elements == harmless.elements
    assert outline.text.count(name) == harmless.text.count("vr9") > 2


@given(st.text(st.characters(), max_size=400))
def test_any_text_is_text(text: str) -> None:
    guest = replace(samples.guest(), name=text, problems=(text,))
    told = GuestState(guest.ref, "libvirt", tuned=True, policy=text)
    recent = Recent((10.0,), {guest.ref: (FrameRates(1, 0),)}, {0: CpuShares(1, 0)})
    state = DaemonState(snapshot=samples.snapshot(guest), guests=(told,), recent=recent)
    outline = Outline(html(status_page(state)).encode().decode())
    assert outline.open == []
    tags = Counter(tag for tag, _ in outline.elements)
    assert not {"script", "img", "iframe"} & set(tags)
    # A CPU's bar, and two plots.
    assert tags["svg"] == 3
    shown = fields(state).guests[0].name
    assert shown.isprintable()
    assert shown in outline.text or not shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("bad\udcff", "bad\\udcff"),
        ("line\nbreak", "line\\nbreak"),
        ("txt\u202egpj", "txt\\u202egpj"),
        ("vr 1.\u00fc", "vr 1.\u00fc"),
        ("x" * 999, "x" * 300 + "\u2026"),
    ],
)
def test_what_cannot_be_shown_is_escaped_and_what_is_long_is_cut(name: str, shown: str) -> None:
    guest = samples.guest(name)
    told = GuestState(guest.ref, "libvirt", tuned=True)
    page = fields(DaemonState(snapshot=samples.snapshot(guest), guests=(told,)))
    assert page.guests[0].name == shown


# -- it needs nothing from elsewhere


def test_nothing_is_asked_of_anybody_else() -> None:
    text = html(status_page(tuned("trixie-veth-multiqueue")))
    elements = Outline(text).elements
    assert [a["href"] for tag, a in elements if tag == "link"] == ["data:,"]
    assert {a["href"] for tag, a in elements if tag == "a"} == {"status.json", "metrics"}
    assert not any({"src", "style", "onclick"} & set(a) for _, a in elements)
    assert not {"script", "img", "iframe", "form", "base"} & {tag for tag, _ in elements}
    assert "http:" not in text and "https:" not in text and "url(" not in text


# -- sizes


def many(guests: int, name: str = "router") -> DaemonState:
    found = tuple(samples.guest(f"{name}{n:04}", pid=1000 + 10 * n) for n in range(guests))
    snapshot = samples.snapshot(*found)
    cpus = tuple(Cpu(i, True, False, CpuSet([i]), 0) for i in range(64))
    return DaemonState(
        snapshot=replace(snapshot, host=replace(snapshot.host, cpus=cpus)),
        guests=tuple(
            GuestState(g.ref, "libvirt", tuned=n % 100 != 7, drift=n % 100 == 7, policy="a.yaml")
            for n, g in enumerate(found)
        ),
        recent=Recent(
            (10.0,) * 30,
            {g.ref: (FrameRates(123_456.7, 1234.5), FrameRates(98_765.4, 0)) * 15 for g in found},
            {cpu.id: CpuShares(0.7777, 0.5555) for cpu in cpus},
        ),
    )


def test_of_many_guests_those_that_need_somebody_come_first() -> None:
    state = many(1000)
    page = fields(state)
    assert len(page.guests) == page_data.GUESTS
    assert page.guests_left_out == 1000 - page_data.GUESTS
    assert [g.name for g in page.guests[:2]] == ["router0007", "router0107"]
    assert {g.state for g in page.guests[:10]} == {"degraded"}
    assert page.guests[10].name == "router0000"
    assert page.totals.guests == 1000
    (full,) = [c for c in page.cpus if c.threads]
    assert len(full.threads) + full.left_out == 3000
    shown = html(status_page(state))
    text = Outline(shown).text
    assert "960 more guests not listed here" in text
    assert "and 2,984 more threads" in text
    assert len(shown) < 200_000


def test_the_largest_page_stays_bounded() -> None:
    """Everything longer than it ever is."""
    guest = samples.guest("g" * 5000)
    thread, interface = guest.threads[1], guest.interfaces[0]
    guest = replace(
        guest,
        threads=tuple(replace(thread, index=n) for n in range(2000)),
        interfaces=(replace(interface, target="t" * 5000, lower=("l" * 5000,)),) * 200,
        problems=("p" * 5000,) * 500,
    )
    guests = tuple(replace(guest, name=f"{n}{guest.name}") for n in range(300))
    told = tuple(GuestState(g.ref, "libvirt", tuned=False, policy="x" * 5000) for g in guests)
    begin = time.process_time()
    page = status_page(DaemonState(snapshot=samples.snapshot(*guests), guests=told))
    assert len(html(page)) < 3_000_000
    assert len(json.dumps(encode(page))) < 3_000_000
    assert time.process_time() - begin < 20


def test_the_fields_that_the_documentation_names_exist() -> None:
    with recorded_state.passes("bookworm-veth-plain") as (host, passes):
        passes.run()
        recorded_state.set_queue(host, 0, 77)
        passes.run()
        page = status_page(passes.state)
    text = (recorded_hosts.PLACE.parents[1] / "docs/status-page.md").read_text("utf-8")
    guest = page["guests"][0]
    cpu = next(cpu for cpu in page["cpus"] if cpu["threads"])
    shapes = {
        "cpus": cpu | cpu["threads"][0],
        "guests": guest | {"intervals": page["intervals"]},
        "guests[].threads": guest["threads"][0],
        "guests[].interfaces": guest["interfaces"][0],
        "drift": page["drift"][0],
        "plan": page["plan"],
        "totals": page["totals"],
    }
    rows = dict(re.findall(r"^\| `([\w\[\].]+)` \| (.*)$", text, re.MULTILINE))
    for row, shape in shapes.items():
        assert set(re.findall(r"`(\w+)`", rows[row])) <= {*shape, row}
    assert set(rows) - set(shapes) <= set(page)
