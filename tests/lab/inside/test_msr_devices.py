"""A multistage router's devices: made, kept, taken back and gone, on a real host.

The first router of the lab stands in for a balancer of both sides, all others are the
routers behind it. Nothing forwards meanwhile, as the stand-in has no rules; test_msr.py is
about that.

    p0 - eth0 [vr1] - edge-1b - edge-1l - edge-1r1 - [vr2] - edge-2r1 - edge-2l - edge-2b - [vr1] eth1 - p1
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kmodhelp
import labhelp
import pytest
from labhelp import LabGuest
from test_attach import LEDGER, forwards, picture
from test_pvr import group

from vsrtune.execute.ledger import read_pending

GROUPS = Path("/etc/vsrtune/groups")
GROUP = """\
group:
  name: edge
  kind: msr
  lower: {{in: p0, out: p1}}
  balancers: {{"{balancer}": [in, out]}}
  routers: [{routers}]
  links: {links}
"""


def links_of_host() -> list[tuple[str, str, str, bool]]:
    """Name (of a macvtap its kind alone, libvirt numbers them), kind, MAC, up."""
    found = []
    for link in json.loads(labhelp.sh("ip", "-d", "-j", "link", "show").stdout):
        kind = link.get("linkinfo", {}).get("info_kind", "")
        name = kind if kind == "macvtap" else link["ifname"]
        found.append((name, kind, link["address"], "UP" in link["flags"]))
    return sorted(found)


def link(name: str) -> dict[str, Any]:
    """What iproute2 says of a device."""
    (found,) = json.loads(labhelp.sh("ip", "-d", "-j", "link", "show", name).stdout)
    return dict(found)


def everything(guests: list[LabGuest]) -> object:
    return [picture(guest) for guest in guests], links_of_host()


def write(guests: list[LabGuest], links: str) -> None:
    routers = ", ".join(f'"{g.name}"' for g in guests[1:])
    text = GROUP.format(balancer=guests[0].name, routers=routers, links=links)
    (GROUPS / "edge.yaml").write_text(text)


@pytest.fixture
def staged(guests: list[LabGuest]) -> Iterator[list[LabGuest]]:
    """A balancer and routers; the test fails when one of them, or the host, is not what it
    was before."""
    if len(guests) < 2 or any(g.kind != "libvirt" for g in guests):
        pytest.skip("needs two or more libvirt guests and no other")
    if labhelp.sh("modprobe", "-n", "napi_macvlan", check=False).returncode != 0:
        pytest.skip("this lab has no module napi_macvlan")
    for guest in guests:
        forwards(guest)
    before = everything(guests)
    yield guests
    if LEDGER.exists() and LEDGER.stat().st_size:
        labhelp.vsrtune("attach", "--recover", check=False)
        labhelp.vsrtune("group", "delete", "edge", check=False)
    (GROUPS / "edge.yaml").unlink(missing_ok=True)
    for guest in guests:
        if not guest.runs:
            labhelp.start_guest(guest)
        forwards(guest)
    assert everything(guests) == before
    assert read_pending(LEDGER) == []


def uplink(name: str) -> bool:
    return bool(kmodhelp.flags(name)["uplink"])


def ends(links: str, routers: int) -> list[str]:
    """The balancer's devices of one side, without the group and the side."""
    return ["b"] if links == "bridge" else [f"b{n}" for n in range(1, routers + 1)]


def loads(rules: str, devices: int) -> None:
    """nft takes the rules, twice, in a namespace with devices of the names that stand at
    their head."""
    made = "".join(f"ip link add eth{n} type dummy; " for n in range(devices))
    script = f"set -e; {made} nft -f /dev/stdin <<'END'\n{rules}END\n"
    script += f"nft -f /dev/stdin <<'END'\n{rules}END\nnft list ruleset"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{rules}\n{done.stderr}"
    assert done.stdout.count("hook ingress") == 4, done.stdout


@pytest.mark.parametrize("links", ["bridge", "hub", "vlan"])
def test_created_and_deleted_all_is_as_it_was(staged: list[LabGuest], links: str) -> None:
    balancer, *routers = staged
    write(staged, links)
    before = everything(staged)
    assert "uplink on" in group("create", "edge", "--dry-run")
    ahead = group("rules", "edge")
    assert everything(staged) == before
    told = group("create", "edge")
    assert f"vsrtune group rules edge {balancer.name}" in told
    for side in ("1", "2"):
        for number, end in enumerate(ends(links, len(routers)), 1):
            name = f"edge-{side}{end}"
            assert uplink(name)
            below = link(name)["link"]
            assert link(f"edge-{side}r{number}")["link"] == below
            if links == "vlan":
                info = link(below)
                assert (info["link"], info["linkinfo"]["info_data"]["id"]) == (
                    f"edge-{side}l", 100 + number,
                )  # fmt: skip
            assert all("UP" in link(n)["flags"] for n in (name, below))
    status = json.loads(group("status", "--json"))
    inner = 2 * len(ends(links, len(routers)))
    roles = [(p["member"], p["role"], p["state"]) for p in status]
    assert roles.count((balancer.name, "balancer", "plugged")) == inner
    for router in routers:
        assert roles.count((router.name, "router", "plugged")) == 2
    rules = group("rules", "edge")
    assert rules == ahead
    loads(rules, 2 + inner)
    for number in range(1, len(routers) + 1):
        loads(group("rules", "edge", "--routers", str(number)), 2 + inner)
    # Somebody takes one away, flag and all; the next look brings it back.
    kmodhelp.set_flag(f"edge-1{ends(links, 1)[0]}", "uplink", on=False)
    if len(routers) > 1:
        group("drain", "edge", routers[0].name)
        assert group("rules", "edge") == group("rules", "edge", "--without", routers[0].name)
        group("scale", "edge", str(len(routers)))
        assert group("rules", "edge") == rules
    labhelp.vsrtune("attach", "--devices")
    assert uplink(f"edge-1{ends(links, 1)[0]}")
    group("delete", "edge")
    assert everything(staged) == before


def moments(routers: int) -> list[str]:
    """Changes of a create with bridges: devices and flags, ups, the balancer's plugs, the
    routers' unplugs and plugs, definitions."""
    made, both = 6 + 2 * routers, 2 * routers
    plugged = made + 4 + both
    last = plugged + 2 + 2 * both + 2 + both
    return [
        f"fail:{plugged + 2}", f"kill:{plugged + 2 + both + 1}", f"kill:{last}", "kill:3",
        f"fail:{last}", f"fail:{made}", f"kill:{plugged + 2}", f"fail:{plugged + 2 + both}",
        f"kill:{plugged + 2 + both}", f"fail:{last - both}",
    ]  # fmt: skip


@pytest.mark.parametrize("number", labhelp.shared(range(10)))
def test_an_interrupted_create_is_taken_back(staged: list[LabGuest], number: int) -> None:
    fault = moments(len(staged) - 1)[number]
    write(staged, "bridge")
    before = everything(staged)
    told = group("create", "edge", check=False, fault=fault)
    if fault.startswith("kill"):
        assert everything(staged) != before
        assert "was taken back" in labhelp.vsrtune("attach", "--recover").stdout
    else:
        assert "everything is as it was before" in told
    assert everything(staged) == before, fault
    assert read_pending(LEDGER) == []


def test_an_interrupted_delete_is_taken_back(staged: list[LabGuest]) -> None:
    write(staged, "vlan")
    group("create", "edge")
    created = everything(staged)
    told = group("delete", "edge", check=False, fault="fail:6")
    assert "everything is as it was before" in told
    assert everything(staged) == created
    group("delete", "edge", check=False, fault="kill:3")
    assert "was taken back" in labhelp.vsrtune("attach", "--recover").stdout
    assert everything(staged) == created


def test_after_a_boot_all_are_where_they_were(staged: list[LabGuest]) -> None:
    """The boot's part of it: no guest runs, no device is there, then the unit makes them."""
    write(staged, "vlan")
    group("create", "edge")
    created = everything(staged)
    for guest in staged:
        labhelp.sh("virsh", "destroy", guest.name)
    for side in ("1", "2"):
        labhelp.sh("ip", "link", "del", f"edge-{side}l")
    # The daemon of an earlier test may have asked for the unit already, which then stays active.
    labhelp.sh("systemctl", "restart", "vsrtune-devices")
    for guest in staged:
        labhelp.sh("virsh", "start", guest.name)
        labhelp.libvirt_talks(guest)
    labhelp.vsrtune("attach", "--devices")
    assert everything(staged) == created
    assert uplink("edge-1b1")
    labhelp.start()
    kmodhelp.set_flag("edge-1b1", "uplink", on=False)
    labhelp.wait_for(lambda: uplink("edge-1b1"), "the daemon sets the flag again", 90)
    labhelp.stop()


def test_what_is_refused_changes_nothing(staged: list[LabGuest]) -> None:
    before = everything(staged)
    write(staged, "bridge")
    path = GROUPS / "edge.yaml"
    path.write_text(path.read_text().replace("[in, out]", "[in]"))
    assert f"{path}:5: group.balancers: no balancer" in group("create", "edge", check=False)
    write(staged, "bridge")
    path.write_text(path.read_text().replace("p1", "nosuch0"))
    assert f"{path}:4: there is no such device" in group("create", "edge", check=False)
    assert "created groups: none" in group("delete", "edge", check=False)
    assert everything(staged) == before
    assert not LEDGER.exists() or not LEDGER.stat().st_size
