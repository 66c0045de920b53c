"""The Ansible role on two KVM hosts whose routers are one router to their neighbours.

Runs outside, in `lab pair`, which gives LAB_PAIR_DIR and LAB_DEB. The tests build on each other,
in their order; ../test_pair.py runs them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[3]
ANSIBLE = REPO / "docs/ansible"
HOSTS = ("lab1", "lab2")
HELPERS = "/mnt/tests/lab/pair"
ROUND_ROBIN = "2"
FLOWS, EACH, WINDOW = 40, 20, 8

# One for both hosts: their NICs' interrupts go to CPU 0, their routers stay off it.
POLICY: dict[str, Any] = {
    "guest": "vr*",
    "cpus": {"irq": "0", "vcpu": "auto", "vhost": "auto", "emulator": "auto"},
    "irq": {"set": True},
    "scheduler": {role: {"class": "rr", "priority": 10} for role in ("vcpu", "vhost", "softirq")},
}


@dataclass(frozen=True)
class Outcome:
    """What a run of the playbook came to: its status, and of each host how much changed."""

    status: int
    changed: dict[str, int]
    said: str


class Pair:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.ssh = ("ssh", "-F", str(place / "ssh_config"))

    def on(self, host: str, *words: str) -> str:
        done = subprocess.run(
            [*self.ssh, host, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{host}: {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, host: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.on(host, f"python3 -B {HELPERS}/threads.py"))
        return found

    def play(self, *words: str, policy: dict[str, Any] | None = None, **variables: Any) -> Outcome:
        """The playbook that is shipped, with one policy for both hosts."""
        inventory = {
            "router_hosts": {
                "hosts": {host: {"members": [f"vr{n}"]} for n, host in enumerate(HOSTS, 1)},
                "vars": {
                    "ansible_ssh_common_args": f"-F {self.place / 'ssh_config'}",
                    "ansible_python_interpreter": "/usr/bin/python3",
                    # It is root that is logged in, and the lab has no sudo.
                    "ansible_become": False,
                    "vsrtune_deb": os.environ["LAB_DEB"],
                    "vsrtune_policies": {"routers": POLICY if policy is None else policy},
                    **variables,
                },
            }
        }
        (self.place / "inventory.json").write_text(json.dumps(inventory))
        environment = {
            **os.environ,
            "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
            "ANSIBLE_HOME": str(self.place / "ansible"),
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        program = Path(sys.executable).parent / "ansible-playbook"
        command = [program, "-i", self.place / "inventory.json", *words, ANSIBLE / "site.yml"]
        began = time.monotonic()
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        recap = re.findall(r"^(lab\d) .*changed=(\d+)", said, re.MULTILINE)
        outcome = Outcome(done.returncode, {host: int(n) for host, n in recap}, said)
        print(f"\n  playbook: {time.monotonic() - began:.0f} s, changed {outcome.changed}")
        return outcome


@pytest.fixture(scope="module")
def pair() -> Pair:
    if "LAB_PAIR_DIR" not in os.environ:
        pytest.skip("not in a pair of labs: run with `tests/lab/lab pair --`")
    return Pair(Path(os.environ["LAB_PAIR_DIR"]))


def cpus(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def assert_tuned(pair: Pair, priority: int) -> dict[str, dict[str, Any]]:
    """Of each host: its routers' threads are round-robin and off CPU 0, its interrupts on it."""
    states = {host: pair.state(host) for host in HOSTS}
    for number, (host, state) in enumerate(states.items(), 1):
        assert list(state["guests"]) == [f"vr{number}"]
        threads = state["guests"][f"vr{number}"]
        assert len(threads) == 3, threads
        for thread in threads:
            assert (thread["policy"], thread["priority"]) == (ROUND_ROBIN, str(priority)), (
                host,
                thread,
            )
            assert 0 not in cpus(thread["cpus"]), (host, thread)
        assert state["interrupts"]
        assert set(state["interrupts"].values()) == {"0"}, (host, state["interrupts"])
    return states


def assert_flows_arrive(pair: Pair) -> None:
    """Every datagram of every flow, there and back, each flow through one router, and the
    routers of both hosts have their share."""
    words = ("nsenter", "--net=/run/netns/sink", "python3", "-B", f"{HELPERS}/echo.py")
    with subprocess.Popen([*pair.ssh, "lab2", *words], stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == "ready\n"
        words = ("nsenter", "--net=/run/netns/gen", "python3", "-B", f"{HELPERS}/flows.py")
        back = json.loads(pair.on("lab1", *words, str(FLOWS), str(EACH), str(WINDOW)))
        there = json.loads(echo.stdout.read())
    assert {port: flow["came"] for port, flow in there.items()} == dict.fromkeys(back, EACH)
    assert back == dict.fromkeys(back, EACH)
    assert len(back) == FLOWS
    used = [mac for flow in there.values() for mac in flow["routers"]]
    assert len(used) == FLOWS, "a flow took several routers"
    shares = sorted((mac, used.count(mac)) for mac in set(used))
    print(f"\n  {FLOWS} flows of {EACH} datagrams, there and back: {shares}")
    assert len(shares) == len(HOSTS)
    assert min(count for _, count in shares) >= FLOWS // 5


def both(changed: int) -> dict[str, int]:
    return dict.fromkeys(HOSTS, changed)


def test_check_mode_shows_and_changes_nothing(pair: Pair) -> None:
    done = pair.play("--check", "--diff")
    assert done.status == 0, done.said
    # The package's file and the policy.
    assert done.changed == both(2), done.said
    assert "+guest: vr*" in done.said
    for host in HOSTS:
        pair.on(host, "! test -e /usr/bin/vsrtune && ! test -e /etc/vsrtune")


def test_flows_arrive_through_the_routers_of_both_hosts(pair: Pair) -> None:
    assert_flows_arrive(pair)


def test_one_policy_tunes_both_hosts(pair: Pair) -> None:
    done = pair.play()
    assert done.status == 0, done.said
    # The file, the package, the policy, the service.
    assert done.changed == both(4), done.said
    assert_tuned(pair, 10)
    assert_flows_arrive(pair)


def test_a_second_run_changes_nothing(pair: Pair) -> None:
    done = pair.play()
    assert (done.status, done.changed) == (0, both(0)), done.said


def test_a_changed_policy_reaches_both_daemons_without_a_restart(pair: Pair) -> None:
    before = {host: pair.state(host)["daemon"] for host in HOSTS}
    policy = copy.deepcopy(POLICY)
    for role in policy["scheduler"].values():
        role["priority"] = 20
    asked = pair.play("--check", "--diff", policy=policy)
    assert asked.status == 0, asked.said
    assert "+    priority: 20" in asked.said
    done = pair.play(policy=policy)
    assert done.status == 0, done.said
    # The policy and the reload.
    assert done.changed == both(2), done.said
    states = assert_tuned(pair, 20)
    assert {host: state["daemon"] for host, state in states.items()} == before


def test_a_wrong_policy_replaces_nothing_on_either_host(pair: Pair) -> None:
    done = pair.play(policy={**POLICY, "schedular": {}})
    assert done.status == 2
    assert done.changed == both(0)
    assert done.said.count("schedular: unknown key") >= len(HOSTS), done.said
    assert_tuned(pair, 20)


def test_groups_are_created_once(pair: Pair) -> None:
    groups = {
        "edge": {"kind": "pvr", "members": "{{ members }}", "lower": {"in": "p0", "out": "p1"}}
    }
    wanted: dict[str, Any] = {"vsrtune_groups": groups, "vsrtune_groups_create": True}
    done = pair.play(**wanted)
    assert done.status == 0, done.said
    # The policy, which is the first one again, the reload, the group's file, the group, its unit.
    assert done.changed == both(5), done.said
    for host in HOSTS:
        places = json.loads(pair.on(host, "vsrtune group status --json"))
        assert [place["state"] for place in places] == ["plugged", "plugged"]
    done = pair.play(**wanted)
    assert (done.status, done.changed) == (0, both(0)), done.said
    assert_tuned(pair, 10)
    assert_flows_arrive(pair)


def test_without_a_policy_both_hosts_are_as_they_were(pair: Pair) -> None:
    done = pair.play(vsrtune_policies={}, vsrtune_remove_unknown=True, vsrtune_groups={})
    assert done.status == 0, done.said
    # The policy and the group's file are one task.
    assert done.changed == both(2), done.said
    for host in HOSTS:
        for threads in pair.state(host)["guests"].values():
            assert {thread["policy"] for thread in threads} == {"0"}
