# SPDX-License-Identifier: GPL-2.0-or-later
"""Plans the members of a group that are made from its template. Pure.

The template and its clones are protected from each other: clones write to overlays, and while the
group's devices are up on the template's lower devices, the kernel refuses the macvtaps without
which the template cannot start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vsrtune.attach.plan.clone_model import Clone, CloneDefinition, CloneFiles, CloneRun
from vsrtune.attach.plan.model import AttachHostState, GuestNics
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import clone_xml
from vsrtune.group.members import Layout, free_mac, macs
from vsrtune.group.parser import Group
from vsrtune.model import domain_xml

# A stand-in, and the XML that replaces its interface of each MAC.
Member = tuple[GuestNics, Mapping[str, str]]


def missing(group: Group, host: AttachHostState) -> tuple[str, ...]:
    """Members that would be clones: there is a template, and no guest of that name."""
    known = {guest.name for guest in host.guests}
    return tuple(name for name in group.members if group.template and name not in known)


def source(group: Group, host: AttachHostState) -> GuestNics:
    """The template, if clones can be made from it now. Raises VsrtuneError."""
    name, where = group.template, group.at("group", "template")
    found = next((g for g in host.guests if g.name == name), None)
    if found is None or found.config is None or host.template is None:
        raise VsrtuneError(
            f"there is no libvirt guest {name} that is defined, to make "
            f"{', '.join(missing(group, host))} from",
            where=where,
            hint="see: virsh list --all",
        )
    own = [nic.mac for nic in found.config]
    for unfit, what, hint in (
        (
            found.live is not None,
            f"{name} runs, and writes to the disks that its clones would stand on",
            f"virsh shutdown {name}",
        ),
        (
            host.template.saved,
            f"{name} was saved in the middle of its work, and so are its disks",
            f"start it and shut it down: virsh start {name}",
        ),
        (
            len(set(own)) < len(own),
            f"{name} has several interfaces with the MAC {max(own, key=own.count)}",
            f"give every interface its own MAC (virsh edit {name})",
        ),
    ):
        if unfit:
            raise VsrtuneError(what, where=where, hint=hint)
    return found


def stand_in(group: Group, name: str, template: GuestNics, host: AttachHostState) -> GuestNics:
    """A clone as if it ran already, with its template's interfaces and MACs of its own. Its group
    treats the clone as this guest, and leaves this guest behind when the clone is kept."""
    assert host.template is not None
    where = group.at("group", "members", str(group.members.index(name)))
    if "/" in name or name.startswith("."):
        raise VsrtuneError(
            f"{name!r} cannot be the name of a file, and its overlays would be called so",
            where=where,
            hint="another name",
        )
    own = clone_xml.own_uuid(host.template, group.name, name)
    if own in host.by_uuid:
        raise VsrtuneError(
            f"{host.by_uuid[own].name} was made as {name} of this group, and has its UUID",
            where=where,
            hint=f"virsh domrename {host.by_uuid[own].name} {name}, or another name",
        )
    taken = macs(host)
    cards = tuple(
        domain_xml.nic(
            domain_xml.with_mac(nic.xml, free_mac(f"{own}/{nic.mac}", taken, b"\x52\x54\x00"))
        )
        for nic in template.config or ()
    )
    return GuestNics(name, own, cards, cards)


def make(
    group: Group,
    template: GuestNics,
    members: Collection[Member],
    host: AttachHostState,
    layout: Layout,
) -> None:
    """Add the clones, the steps that make and start them, and notes to a layout. Raises
    VsrtuneError."""
    assert host.template is not None
    notes: dict[str, None] = {}
    for guest, interfaces in members:
        own = {
            old.mac: new.mac
            for old, new in zip(template.config or (), guest.config or (), strict=True)
        }
        shared = {old: interfaces[new] for old, new in own.items() if new in interfaces}
        copy = clone_xml.copy(
            host.template, guest.name, guest.uuid, shared, own.__getitem__, group.overlays
        )
        for file in copy.files:
            if host.template.taken(file.path):
                raise VsrtuneError(
                    f"{guest.name} would get {file.path}, and there is a file of that name already",
                    where=template.name,
                    hint="remove it if nothing needs it, or name another directory (overlays:)",
                )
        layout.clones.append(Clone(group.name, guest.name, guest.uuid, template.name, copy.files))
        if copy.files:
            layout.files.append(CloneFiles(guest.name, copy.files))
        layout.guests += [
            CloneDefinition(guest.name, guest.uuid, template.name, copy.xml),
            CloneRun(guest.name, guest.uuid),
        ]
        notes |= dict.fromkeys(copy.notes)
    layout.notes += notes


def of_group(name: str, host: AttachHostState) -> tuple[Clone, ...]:
    """The members of a group that vsrtune made."""
    return tuple(clone for clone in host.clones if clone.group == name)


def end(clones: Collection[Clone], host: AttachHostState) -> list[str]:
    """Notes for the operator about the end of the clones. It cannot be taken back, so it comes
    after the last step of all, and until then they run. Raises VsrtuneError if one cannot end."""
    notes: list[str] = []
    for clone in clones:
        guest = host.by_uuid.get(clone.uuid)
        if guest is None:
            files = ", ".join(f.path for f in clone.files)
            rest = f"; what was made for it goes: {files}" if files else ""
            notes.append(f"{clone.guest} was undefined by somebody meanwhile{rest}")
            continue
        definition = host.clones[clone]
        for overlay in (f.path for f in clone.files if f.format and definition):
            if overlay not in clone_xml.disks(definition):
                raise VsrtuneError(
                    f"it does not stand on its overlay {overlay} any more, which may be below "
                    "another file now",
                    where=guest.name,
                    hint="--keep-clones leaves it alone; after a snapshot: virsh blockcommit "
                    f"{guest.name} ... --active --pivot",
                )
    return notes
