"""The interfaces of a guest's persistent definition: changed, added, removed. Looks first at
what is there, so everything may be repeated. Raises VsrtuneError."""

from __future__ import annotations

from vsrtune.attach_host import AttachHost
from vsrtune.attach_steps import Define
from vsrtune.core.errors import WriteError
from vsrtune.model.domain_xml import Nic, added, differences, nic, nics, replaced


def define(host: AttachHost, step: Define) -> None:
    """Change, add or remove the interface, unless that is done already."""
    where = f"{step.guest}: interface {step.mac} of the definition"
    text = host.definition(step.uuid)
    macs = [nic(xml).mac for xml in (step.before, step.after) if xml]
    now = _first(text, *macs)
    if now is None and not step.after:
        return
    if now is not None and step.after and not differences(step.after, now.xml):
        return
    if step.before:
        changed = replaced(text, now.mac if now is not None else step.mac, step.after)
    elif now is None:
        changed = added(text, step.after)
    else:
        raise WriteError("there is another one of that MAC", where=where)
    host.define(changed, where)
    now = _first(host.definition(step.uuid), macs[-1])
    if not step.after:
        other: tuple[str, ...] = ("is there still",) if now is not None else ()
    else:
        other = differences(step.after, now.xml if now is not None else "<interface/>")
    if other:
        raise WriteError(f"is not as asked: {'; '.join(other)}", where=where)


def undefine(host: AttachHost, inverse: Define) -> None:
    """Take back, unless somebody else has changed or removed the interface since."""
    present = nics(host.definition(inverse.uuid))
    if not inverse.before:
        if not any(now.mac == nic(inverse.after).mac for now in present):
            define(host, inverse)
        return
    mac = nic(inverse.before).mac
    for now in (n for n in present if n.mac == mac):
        if not differences(inverse.before, now.xml):
            define(host, inverse)


def _first(domain: str, *macs: str) -> Nic | None:
    """A domain's interface of the first of these MACs that it has."""
    by_mac = {n.mac: n for n in reversed(nics(domain))}
    return next((by_mac[mac] for mac in macs if mac in by_mac), None)
