"""docs/ansible: the role is what its documents say, and writes files as this tree's vsrtune
wants them. What it does on hosts is `tests/lab/pair`'s to prove."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

REPO = Path(__file__).resolve().parents[3]
ANSIBLE = REPO / "docs/ansible"
ROLE = ANSIBLE / "roles/vsrtune"
GUIDE = REPO / "docs/guides/ansible.md"
FILES = sorted(ANSIBLE.rglob("*.yml"))
# What a task may say besides its module.
KEYWORDS = {
    "name", "when", "loop", "loop_control", "register", "vars", "notify", "check_mode",
    "changed_when", "failed_when", "until", "retries", "delay",
}  # fmt: skip


def load(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def options() -> dict[str, Any]:
    found: dict[str, Any] = load(ROLE / "meta/argument_specs.yml")["argument_specs"]["main"][
        "options"
    ]
    return found


# -- the text


def test_every_variable_has_its_default_its_type_and_its_line_in_the_guide() -> None:
    defaults = load(ROLE / "defaults/main.yml")
    assert {name: spec["default"] for name, spec in options().items()} == defaults
    rows = dict(re.findall(r"^\| `(vsrtune_\w+)` \| `([^`]*)` \|", GUIDE.read_text(), re.MULTILINE))
    assert {name: json.loads(value) for name, value in rows.items()} == defaults


def test_tasks_use_nothing_but_what_ansible_core_has() -> None:
    tasks = [task for part in ("tasks", "handlers") for path in (ROLE / part).iterdir()
             for task in load(path)]  # fmt: skip
    modules = [key for task in tasks for key in task if key not in KEYWORDS]
    assert len(modules) == len(tasks) > 15
    assert [m for m in modules if not m.startswith("ansible.builtin.")] == []


def test_every_variable_that_the_role_reads_is_an_option_or_its_own() -> None:
    text = "".join(path.read_text() for path in (ROLE / "tasks").iterdir())
    own = set(re.findall(r"register: (vsrtune_\w+)", text))
    own |= {"vsrtune_name", "vsrtune_file", "vsrtune_known", "vsrtune_place"}
    assert set(re.findall(r"\bvsrtune_\w+", text)) - own == set(options())


# -- the role itself, on this machine, with directories of the test in the place of /etc/vsrtune

POLICIES: dict[str, Any] = {
    "routers": {"guest": "vr*", "cpus": {"vcpu": "1-2", "irq": 0}},
    # Text stays as it is.
    "firewall": "guest: fw   # ours\nqueue: {macvtap: 300}\n",
}
GROUPS = {"edge": {"kind": "pvr", "members": ["vr1"], "lower": {"in": "p0"}}}
OLD = "guest: vr9\n"
# It is asked for; this machine has no daemon, and the plays say that it is not to run.
RELOAD = "RUNNING HANDLER [vsrtune : Reload vsrtune]"


@pytest.fixture
def program() -> str:
    beside = Path(sys.executable).parent / "ansible-playbook"
    found = str(beside) if beside.exists() else shutil.which("ansible-playbook")
    if found is None:
        pytest.skip("ansible-playbook is not installed")
    return found


def run(program: str, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ANSIBLE_ROLES_PATH": str(ROLE.parent),
        "ANSIBLE_HOME": str(place / "home"),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DIFF_ALWAYS": "1",
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.run(
        [program, *words], cwd=place, env=environment, capture_output=True, text=True, check=False
    )


def test_playbooks_are_read(program: str, tmp_path: Path) -> None:
    words = ("--syntax-check", "-i", str(ANSIBLE / "inventory.yml"), str(ANSIBLE / "site.yml"))
    done = run(program, tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr


class Plays:
    """Plays of the role, one after another in one run of Ansible, which takes its time to
    start. Each has a host of its own name, by which its outcome is told, and this machine is
    all of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.plays: list[dict[str, Any]] = []
        self.hosts: dict[str, dict[str, str]] = {}
        program = place / "vsrtune"
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -B -m vsrtune "$@"\n'
        )
        program.chmod(0o755)

    def add(
        self, name: str, etc: str, part: str = "files", *, check: bool = False, **wanted: Any
    ) -> None:
        role = {"name": "vsrtune", "tasks_from": part}
        self.hosts[name] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
        }
        self.plays.append({
            "hosts": name, "gather_facts": False, "check_mode": check,
            "tasks": [{
                "block": [{"ansible.builtin.include_role": role}],
                # One play that fails would end the run.
                "rescue": [{"ansible.builtin.debug": {"msg": "failed"}}],
            }],
            "vars": {
                "vsrtune_directory": str(self.place / etc), "vsrtune_install": False,
                "vsrtune_command": str(self.place / "vsrtune"),
                "vsrtune_service_state": "stopped", **wanted,
            },
        })  # fmt: skip

    def run(self, program: str) -> dict[str, tuple[bool, int, str]]:
        """Of each play: whether all of it was done, how many tasks changed something, and what
        was said."""
        (self.place / "play.yml").write_text(json.dumps(self.plays))
        (self.place / "hosts.json").write_text(json.dumps({"all": {"hosts": self.hosts}}))
        done = run(program, self.place, "-i", "hosts.json", "play.yml")
        said = f"\n{done.stdout}".partition("PLAY RECAP")
        found = {}
        for name, part in zip(self.hosts, said[0].split("\nPLAY [")[1:], strict=True):
            recap = re.search(rf"^{name} .*changed=(\d+) .*rescued=(\d+)", said[2], re.MULTILINE)
            assert recap is not None, done.stdout + done.stderr
            found[name] = (recap[2] == "0", int(recap[1]), part)
        return found


def files(etc: Path) -> dict[str, str]:
    return {str(p.relative_to(etc)): p.read_text() for p in etc.rglob("*") if p.is_file()}


def test_files_are_checked_and_written(program: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the role gives files to root, which takes root")
    for etc in ("one", "two"):
        (tmp_path / etc / "policies").mkdir(parents=True)
        (tmp_path / etc / "groups").mkdir()
        (tmp_path / etc / "policies/old.yaml").write_text(OLD)
    (tmp_path / "two/policies/routers.yaml").write_text("guest: vr*\n")
    plays = Plays(tmp_path)
    wanted = {"vsrtune_policies": POLICIES, "vsrtune_groups": GROUPS}
    bad = {**POLICIES, "routers": {"guest": "vr*", "cpus": {"vcpus": "1"}}}
    plays.add("asked", "none", check=True, **wanted)
    plays.add("first", "one", **wanted)
    # A path that is not written as others write it removes nothing that is known.
    odd = f"{tmp_path}//one/"
    plays.add("again", "one", **wanted, vsrtune_remove_unknown=True, vsrtune_directory=odd)
    plays.add("bad", "two", vsrtune_policies=bad, vsrtune_remove_unknown=True)
    plays.add("twice", "one", vsrtune_policies={"other": {"guest": "fw"}})
    found = plays.run(program)

    done, changed, said = found["asked"]
    assert (done, changed) == (True, 2), said
    assert "+  vcpu: 1-2" in said
    assert not (tmp_path / "none").exists()
    done, changed, said = found["first"]
    assert (done, changed) == (True, 2), said
    assert RELOAD in said
    done, changed, said = found["again"]
    assert (done, changed) == (True, 1), said
    assert re.search(r"TASK .*Unknown files are removed\] \*+\n--- before", said), said
    assert RELOAD in said
    written = files(tmp_path / "one")
    assert written.pop("policies/other.yaml")
    assert set(written) == {"policies/routers.yaml", "policies/firewall.yaml", "groups/edge.yaml"}
    assert written["policies/firewall.yaml"] == POLICIES["firewall"]
    assert load(tmp_path / "one/policies/routers.yaml") == POLICIES["routers"]
    assert load(tmp_path / "one/groups/edge.yaml") == {"group": {"name": "edge", **GROUPS["edge"]}}

    done, _, said = found["bad"]
    assert not done
    assert "cpus.vcpus: unknown key" in said
    left = files(tmp_path / "two")
    assert (left["policies/routers.yaml"], left["policies/old.yaml"]) == ("guest: vr*\n", OLD)
    # Each file is good, but they name one guest.
    done, _, said = found["twice"]
    assert not done
    assert "firewall.yaml" in said and "other.yaml" in said


def test_wrong_variables_are_refused(program: str, tmp_path: Path) -> None:
    plays = Plays(tmp_path)
    wrong = {"vsrtune_policies": ["routers"], "vsrtune_service_state": "restarted"}
    plays.add("types", "etc", "main", **wrong)
    plays.add("names", "etc", "main", vsrtune_policies={"../x": {"guest": "a"}})
    found = plays.run(program)
    done, changed, said = found["types"]
    assert (done, changed) == (False, 0)
    assert "vsrtune_policies" in said and "vsrtune_service_state must be one of" in said
    done, changed, said = found["names"]
    assert (done, changed) == (False, 0)
    assert "../x: write letters" in said
