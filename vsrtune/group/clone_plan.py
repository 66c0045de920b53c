"""Plans the members of a group that are made from its template. Pure.

The template and its clones are protected from each other: clones write to overlays, and while the
group's devices are up on the template's lower devices, the kernel refuses the macvtaps without
which the template cannot start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vsrtune.attach.plan.clone_model import Clone, Cloning, File
from vsrtune.attach.plan.clone_steps import DefineGuest, MakeFiles, StartGuest, StopGuest
from vsrtune.attach.plan.model import AttachHostState, GuestNics
from vsrtune.attach.plan.steps import Step
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import clone_xml
from vsrtune.group.parser import Group
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic


@dataclass(frozen=True, slots=True)
class Made:
    """The steps that make clones and start them: ``files`` before a guest is interrupted,
    ``guests`` after the group's devices are up."""

    clones: tuple[Clone, ...]
    files: tuple[Step, ...]
    guests: tuple[Step, ...]
    notes: tuple[str, ...]


def missing(group: Group, host: AttachHostState) -> tuple[str, ...]:
    """Members that would be clones: there is a template, and no guest of that name."""
    known = {guest.name for guest in host.guests}
    return tuple(name for name in group.members if group.template and name not in known)


def source(group: Group, host: AttachHostState) -> GuestNics:
    """The template, if clones can be made from it now. Raises VsrtuneError."""
    where = group.at("group", "template")
    found = next((g for g in host.guests if g.name == group.template), None)
    if found is None or found.config is None or host.cloning is None:
        raise VsrtuneError(
            f"there is no libvirt guest {group.template} that is defined, to make "
            f"{', '.join(missing(group, host))} from",
            where=where,
            hint="see: virsh list --all",
        )
    if found.live is not None:
        raise VsrtuneError(
            f"{group.template} runs, and writes to the disks that its clones would stand on",
            where=where,
            hint=f"virsh shutdown {group.template}",
        )
    if host.cloning.template.saved:
        raise VsrtuneError(
            f"{group.template} was saved in the middle of its work, and so are its disks",
            where=where,
            hint=f"start it and shut it down: virsh start {group.template}",
        )
    macs = [nic.mac for nic in found.config]
    doubled = {mac for mac in macs if macs.count(mac) > 1}
    if doubled:
        raise VsrtuneError(
            f"{group.template} has several interfaces with the MAC {min(doubled)}",
            where=where,
            hint=f"give every interface its own MAC (virsh edit {group.template})",
        )
    return found


def stand_in(group: Group, name: str, template: GuestNics, host: AttachHostState) -> GuestNics:
    """A clone as if it ran already, with its template's interfaces and MACs of its own. Its group
    treats the clone as this guest, and leaves this guest behind when the clone is kept."""
    assert host.cloning is not None
    if "/" in name or name.startswith("."):
        raise VsrtuneError(
            f"{name!r} cannot be the name of a file, and its overlays would be called so",
            where=group.at("group", "members", str(group.members.index(name))),
            hint="another name",
        )
    own = clone_xml.own_uuid(host.cloning.machine, host.cloning.template, group.name, name)
    if own in host.by_uuid:
        raise VsrtuneError(
            f"{host.by_uuid[own].name} was made as {name} of this group, and has its UUID",
            where=group.at("group", "members", str(group.members.index(name))),
            hint=f"virsh domrename {host.by_uuid[own].name} {name}, or another name",
        )
    taken = _macs(host)
    cards = tuple(
        domain_xml.nic(domain_xml.with_mac(nic.xml, clone_xml.own_mac(own, nic.mac, taken)))
        for nic in template.config or ()
    )
    return GuestNics(name, own, cards, cards)


def in_the_place(original: GuestNics, clone: GuestNics, mac: str) -> DomainNic:
    """The template's interface that is the clone's interface of that MAC."""
    pairs = zip(original.config or (), clone.config or (), strict=True)
    return next(old for old, new in pairs if new.mac == mac)


def make(
    group: Group,
    template: GuestNics,
    guests: Collection[GuestNics],
    interfaces: Mapping[tuple[str, str], str],
    host: AttachHostState,
) -> Made:
    """The steps for the stand-ins ``guests``. ``interfaces`` is the XML that replaces a clone's
    (UUID) interface of that MAC. Raises VsrtuneError."""
    assert host.cloning is not None
    clones: list[Clone] = []
    files: list[Step] = []
    started: list[Step] = []
    notes: list[str] = []
    for guest in guests:
        pairs = list(zip(template.config or (), guest.config or (), strict=True))
        macs = {old.mac: new.mac for old, new in pairs}
        shared = {
            old.mac: interfaces[guest.uuid, new.mac]
            for old, new in pairs
            if (guest.uuid, new.mac) in interfaces
        }
        copy = clone_xml.copy(
            host.cloning.template, guest.name, guest.uuid, shared, macs.__getitem__, group.overlays
        )
        _free(copy.files, host.cloning, guest.name)
        clones.append(Clone(group.name, guest.name, guest.uuid, template.name, copy.files))
        if copy.files:
            files.append(MakeFiles(guest.name, copy.files))
        started.append(DefineGuest(guest.name, guest.uuid, template.name, copy.xml))
        started.append(StartGuest(guest.name, guest.uuid))
        notes += copy.notes
    return Made(tuple(clones), tuple(files), tuple(started), tuple(dict.fromkeys(notes)))


def of_group(name: str, host: AttachHostState) -> tuple[Clone, ...]:
    """The members of a group that vsrtune made."""
    return tuple(clone for clone in host.clones if clone.group == name)


def end(clones: Collection[Clone], host: AttachHostState) -> tuple[list[Step], list[str]]:
    """The steps that end the clones, and notes for the operator. The part that cannot be taken
    back (undefine the clones, remove their files) comes after the last step of all. Raises
    VsrtuneError."""
    steps: list[Step] = []
    notes: list[str] = []
    for clone in clones:
        guest = host.by_uuid.get(clone.uuid)
        overlays = [f.path for f in clone.files if f.format]
        if guest is None:
            files = ", ".join(f.path for f in clone.files)
            notes.append(
                f"{clone.guest} was undefined by somebody meanwhile"
                + (f"; what was made for it goes: {files}" if files else "")
            )
            continue
        named = clone_xml.disks(host.clones[clone]) if host.clones[clone] else overlays
        for path in overlays:
            if path not in named:
                raise VsrtuneError(
                    f"it does not stand on its overlay {path} any more, which may be below "
                    "another file now",
                    where=guest.name,
                    hint="--keep-clones leaves it alone; after a snapshot: virsh blockcommit "
                    f"{guest.name} ... --active --pivot",
                )
        if guest.live is not None:
            steps.append(StopGuest(guest.name, guest.uuid))
    return steps, notes


def _free(files: Collection[File], cloning: Cloning, guest: str) -> None:
    for file in files:
        if cloning.taken(file.path):
            raise VsrtuneError(
                f"{guest} would get {file.path}, and there is a file of that name already",
                where=cloning.template.name,
                hint="remove it if nothing needs it, or name another directory (overlays:)",
            )


def _macs(host: AttachHostState) -> set[str]:
    """All MACs that are in use on this host."""
    guests = {n.mac for g in host.guests for n in (*(g.live or ()), *(g.config or ()))}
    return guests | {link.mac for link in host.links.values()}
