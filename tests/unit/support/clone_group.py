"""Groups of clones of a template, on the imitated host."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from attach_host import BOOT, FakeAttachHost
from clone_samples import DISK, MACHINE, MACS, UUID, definition, nic
from switch_faults import Choose, Switches
from switch_faults import do as carry_out
from switch_faults import refused as why_refused

from vsrtune.attach.ledger import ENDED, AttachLedger
from vsrtune.attach.plan.clone_model import Clone, File, Template
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.transaction import Switcher
from vsrtune.core.codec import encode
from vsrtune.group import planner
from vsrtune.group.parser import parse
from vsrtune.model.domain_xml import nic as read

A0, A1 = "02:00:00:00:0a:00", "02:00:00:00:0a:01"
TEXT = "group: {name: edge, kind: pvr, members: [%s], lower: {in: p0, out: p1}, template: router}"
SHARED = [(MACS[0], "edge-in"), (MACS[1], "edge-out")]


def fresh() -> FakeAttachHost:
    """A guest on p0 and p1, and a template that would be on them; neither runs."""
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"), (A1, "p1"), queues=1, running=False)
    router = fake.add("router", running=False)
    del fake.fakes[router.uuid]
    wires = nic(MACS[0], "p0", 2) + nic(MACS[1], "p1", 3)
    fake.fakes[UUID] = router
    router.uuid, router.config = UUID, definition(DISK + wires)
    return fake


def seen(host: FakeAttachHost, ledger: AttachLedger) -> AttachHostState:
    switcher = Switcher(host, ledger, BOOT)
    texts = {}
    for clone in switcher.clones():
        texts[clone] = host.fakes[clone.uuid].config if clone.uuid in host.fakes else ""
    template = None
    if UUID in host.fakes:
        text = host.fakes[UUID].config
        template = Template("router", UUID, text, machine=MACHINE, taken=host.file_there)
    links = host.links().values()
    return AttachHostState(
        host.guests(), links, switcher.origins(), clones=texts, template=template
    )


def ended(ledger: Path, file: Path) -> None:
    """A clone that was ended, and left a file."""
    clone = Clone("edge", "vr1", str(uuid4()), "router", (File(str(file), "/nowhere"),))
    with AttachLedger.open(ledger) as opened:
        opened.add(ENDED, encode(clone))


def create(*members: str, text: str = TEXT) -> Choose:
    group = parse(text % ", ".join(members), "edge.yaml")
    return lambda host: planner.create(group, host)


def delete(host: AttachHostState) -> Switch:
    return planner.delete("edge", host)


def keep(host: AttachHostState) -> Switch:
    return planner.delete("edge", host, keep_clones=True)


def uuid(host: FakeAttachHost, name: str) -> str:
    return next(g.uuid for g in host.fakes.values() if g.name == name)


def live(host: FakeAttachHost, name: str) -> list[tuple[str, str]]:
    cards = host.fakes[uuid(host, name)].live
    return sorted((n.mac, n.device) for n in map(read, cards or ()))


def do(host: FakeAttachHost, path: Path, choose: Choose) -> Switch:
    """Carry a switch out, whole."""
    return carry_out(host, path, choose, seen)


def refused(host: FakeAttachHost, path: Path, choose: Choose) -> str:
    return why_refused(host, path, choose, seen)


READY: dict[str, tuple[Choose, ...]] = {
    "create": (),
    "mixed": (),
    "delete": (create("vr1", "vr2"),),
    "keep": (create("vr1", "vr2"),),
}
CHOICES: dict[str, Choose] = {
    "create": create("vr1", "vr2"),
    "mixed": create("a", "vr2"),
    "delete": delete,
    "keep": keep,
}


class Cloned(Switches):
    def prepare(self, what: str, host: FakeAttachHost) -> None:
        if what == "mixed":
            host.start(host.fakes["uuid-a"])

    def late(self, switch: Switch) -> int:
        """Two devices, and of each ended clone a stop, an undefine and a file."""
        return len(switch.leaves) + 3 * len(switch.ended)


SWITCHES = Cloned(fresh, CHOICES, READY, seen)
