"""A multistage router on the imitated host."""

from __future__ import annotations

from pathlib import Path

from attach_host import FakeAttachHost
from switch_faults import survey

from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.group import msr_rules, planner
from vsrtune.group.parser import Group, parse
from vsrtune.model.domain_xml import nic

A0, A1 = "02:00:00:00:0a:00", "02:00:00:00:0a:01"
B0, B1 = "02:00:00:00:0b:00", "02:00:00:00:0b:01"
L0, M1 = "02:00:00:00:01:00", "02:00:00:00:02:01"
FILE = """\
group:
  name: edge
  kind: msr
  lower: {in: p0, out: p1}
  balancers: {lb1: [in], lb2: [out]}
  routers: [a, b]
"""


def edge(links: str = "bridge", text: str = FILE) -> Group:
    return parse(f"{text}  links: {links}\n", "edge.yaml")


def create(host: AttachHostState, links: str = "bridge") -> Switch:
    return planner.create(edge(links), host)


def delete(host: AttachHostState) -> Switch:
    return planner.delete("edge", host)


def fresh() -> FakeAttachHost:
    """A balancer on p0, another on p1, two routers on both; the queue of one macvtap is not
    the usual one."""
    fake = FakeAttachHost()
    fake.add("lb1", (L0, "p0"), queues=1)
    fake.add("lb2", (M1, "p1"), queues=1)
    fake.add("a", (A0, "p0"), (A1, "p1"), queues=1)
    fake.add("b", (B0, "p0"), (B1, "p1"), queues=1)
    fake.set_queue(next(k.index for k in fake.table.values() if k.mac == B1), 123)
    fake.changes = 0
    return fake


def live(host: FakeAttachHost, name: str) -> list[tuple[str, str]]:
    """Host device and MAC of each interface of a running guest."""
    return sorted((n.device, n.mac) for n in map(nic, host.fakes[f"uuid-{name}"].live or ()))


def book(host: FakeAttachHost, path: Path, wanted: Group | None = None) -> str:
    """What all balancers are told."""
    with AttachLedger.open(path) as ledger:
        found = msr_rules.of_group("edge", wanted, survey(host, ledger))
    return "".join(found.text(name) for name in ("lb1", "lb2"))
