"""A parallel virtual router on the imitated host."""

from __future__ import annotations

from attach_host import FakeAttachHost

from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.group import planner
from vsrtune.group.parser import parse
from vsrtune.model.domain_xml import nic

A0, A1 = "02:00:00:00:0a:00", "02:00:00:00:0a:01"
B0, B1 = "02:00:00:00:0b:00", "02:00:00:00:0b:01"
EDGE = parse(
    "group: {name: edge, kind: pvr, members: [a, b], lower: {in: p0, out: p1}}", "edge.yaml"
)


def create(host: AttachHostState) -> Switch:
    return planner.create(EDGE, host)


def delete(host: AttachHostState) -> Switch:
    return planner.delete("edge", host)


def fresh() -> FakeAttachHost:
    """Two guests on p0 and p1; the queue of one macvtap is not the usual one."""
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"), (A1, "p1"), queues=1)
    fake.add("b", (B0, "p0"), (B1, "p1"), queues=1)
    fake.set_queue(next(k.index for k in fake.table.values() if k.mac == B1), 123)
    fake.changes = 0
    return fake


def live(host: FakeAttachHost, name: str) -> list[tuple[str, str]]:
    """MAC and host device of each interface of a running guest."""
    return sorted((n.mac, n.device) for n in map(nic, host.fakes[f"uuid-{name}"].live or ()))
