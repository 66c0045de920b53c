"""The kit for real hardware on two hosts: lab 1 has the router, lab 2 sends and counts, over ssh.

Runs outside, in `lab pair`, before test_role.py, which wants hosts without the package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_role import HOSTS, Pair, pair  # noqa: F401 (a fixture)

# The tunnel's end on lab 1: the labs' management networks do not meet.
PORT = 2222
RESULT = "/root/kit.json"
ONLY = ("vcpu = vhost", "vcpu 65 %", "queue 5")
KIT = (
    "vsrtune bench paper --guest vr1 --left sender:g0@gen --right sender:s0@sink"
    " --source 10.41.0.254 --destination 10.30.0.100 --pairs 2 --seconds 0.5s --most 16384"
    f" --seed 7 --json {RESULT} " + " ".join(f"--only '{name}'" for name in ONLY)
)
BEGIN = 900


@pytest.fixture(scope="module")
def hosts(pair: Pair) -> Iterator[Pair]:  # noqa: F811
    """With the package, and lab 2 known to lab 1's ssh as `sender`."""
    for number, host in enumerate(HOSTS, 1):
        shutil.copy(os.environ["LAB_DEB"], pair.place / str(number) / "vsrtune.deb")
        pair.on(host, "dpkg -i /mnt/share/vsrtune.deb")
    host_key = (pair.place / "hostkey.pub").read_text().strip()
    files = {
        "kit-key": (pair.place / "key").read_text(),
        "kit-known": f"[127.0.0.1]:{PORT} {host_key}\n",
        "kit-config": f"Host sender\n HostName 127.0.0.1\n Port {PORT}\n User root\n"
        " IdentityFile /root/.ssh/kit-key\n UserKnownHostsFile /root/.ssh/kit-known\n",
    }
    for name, text in files.items():
        (pair.place / "1" / name).write_text(text)
    pair.on("lab1", "install -m 600 /mnt/share/kit-* /root/.ssh/")
    pair.on("lab1", "cp /root/.ssh/kit-config /root/.ssh/config")
    told = subprocess.run([*pair.ssh, "-G", "lab2"], capture_output=True, text=True, check=True)
    (port,) = (line.split()[1] for line in told.stdout.splitlines() if line.startswith("port "))
    words = ("-N", "-o", "ExitOnForwardFailure=yes", "-R", f"{PORT}:127.0.0.1:{port}", "lab1")
    with subprocess.Popen([*pair.ssh, *words]) as tunnel:
        try:
            yield pair
        finally:
            tunnel.terminate()
            for host in HOSTS:
                pair.on(host, "dpkg --purge vsrtune")


def result(hosts: Pair) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hosts.on("lab1", f"cat {RESULT} 2>/dev/null || echo '{{}}'"))
    return found


def settings(hosts: Pair) -> dict[str, Any]:
    """Of the router's threads and the NICs' interrupts, which a bench may not leave changed."""
    state = hosts.state("lab1")
    for thread in state["guests"]["vr1"]:
        del thread["last"]
    return {"guests": state["guests"], "interrupts": state["interrupts"]}


def in_rounds(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The trials after the search, whose loads are powers of two."""
    totals = [sum(trial["load"]["pps"].values()) for trial in found.get("trials", ())]
    first = next((n for n, total in enumerate(totals) if total % 1024), len(totals))
    return found["trials"][first:] if totals else []


def leftovers(hosts: Pair) -> str:
    """What a bench may not leave on the host that sends."""
    return hosts.on(
        "lab2",
        "{ pgrep -f vsrtune.bench.[t]raffic; ip netns exec sink nft list tables | grep vsrtune;"
        " ip netns exec gen sh -c 'cat /proc/net/pktgen/kpktgend_*' | grep -E '(Running|Stopped): .*@';"
        " } || true",
    )


def test_a_killed_run_goes_on_with_what_is_missing(hosts: Pair) -> None:
    before = settings(hosts)
    pid = hosts.on("lab1", f"nohup {KIT} >/root/kit.log 2>&1 </dev/null & echo $!").strip()
    loads = 0
    end = time.monotonic() + BEGIN
    while True:
        rounds = in_rounds(result(hosts))
        loads = len({json.dumps(trial["load"]) for trial in rounds})
        # One round, and something of the next.
        if loads and len(rounds) > (len(ONLY) + 1) * loads and len(rounds) > 8:
            break
        assert hosts.on("lab1", f"kill -0 {pid} && echo there || cat /root/kit.log") == "there\n"
        assert time.monotonic() < end
        time.sleep(2)
    hosts.on("lab1", f"kill -9 {pid}")
    killed = result(hosts)
    assert killed["unfinished"]
    hosts.on("lab1", "vsrtune bench clean")
    assert leftovers(hosts) == ""
    assert settings(hosts) == before

    print(hosts.on("lab1", f"{KIT} 2>&1"))
    whole = result(hosts)
    assert (whole["unfinished"], whole["method"]) == ("", "paper")
    assert whole["started"] == killed["started"]
    size = (len(ONLY) + 1) * loads
    made, kept = in_rounds(whole), in_rounds(killed)
    assert len(made) == 2 * size
    # The whole round is that of the killed run, the begun one was made anew.
    assert made[:size] == kept[:size]
    assert made[size] != kept[size]
    names = {"untuned", *ONLY}
    assert {trial["configuration"] for trial in made} == names
    for at in range(0, 2 * size, size):
        pairs = {(t["configuration"], json.dumps(t["load"])) for t in made[at : at + size]}
        assert len(pairs) == size
    assert leftovers(hosts) == ""
    assert settings(hosts) == before


def test_the_result_holds_what_was_seen_on_both_hosts(hosts: Pair) -> None:
    found = result(hosts)
    assert found["environment"]["untuned"]["label"] == "pktgen on a second machine"
    threads = {
        name: {
            str(thread["class"])
            for thread in block["guests"]["vr1"]["threads"]
            if thread["thread"].startswith(("vcpu", "vhost"))
        }
        for name, block in found["environment"].items()
    }
    assert threads["untuned"] == {"other"}
    assert {one.split()[0] for one in threads["vcpu = vhost"]} == {"fifo:10"}
    assert any("deadline" in one for one in threads["vcpu 65 %"])
    made = in_rounds(found)
    assert sum(trial["forwarded"] for trial in made) > 1000
    # Both ends are on one host, so on one clock.
    assert any((trial["latency"] or {}).get("jitter") for trial in made)
    assert all(trial["reordered"] <= trial["sampled"] for trial in made)
    assert sum(trial["sampled"] for trial in made) > 1000


def test_the_report_stands_beside_the_paper(hosts: Pair) -> None:
    told = hosts.on("lab1", f"vsrtune bench report {RESULT}")
    print(told)
    if kept := os.environ.get("PAIR_KEPT"):
        (Path(kept) / "kit.json").write_text(hosts.on("lab1", f"cat {RESULT}"))
        (Path(kept) / "kit.txt").write_text(told)
    assert "Beside the paper" in told
    (row,) = (line for line in told.splitlines() if "queue 5 / queue 50" in line)
    assert "0.53 (95% 0.51..0.58, 9 pairs)" in row and "not measured" in row
    assert "reordered %" in told and "jitter" in told
    refused = hosts.on("lab1", f"{KIT} 2>&1 || true")
    assert "holds another one, complete" in refused
