"""The cases of tests/plans, one file each: a host, policies for it, and what is expected.

``base`` names a host of plan_bases.py or a recorded one, ``with`` gives arguments for it, and
``patch`` says what differs. A patch has the shape of the snapshot's JSON and holds only what it
changes. It names an element of a list by the element's name, device, path, number or CPU, or by
a CPU list; a thread by its role, with the vcpu or the device and queue after it where one is
meant (``vcpu 0``, ``vhost macvtap10/0``); and all elements by ``*``. ``null`` takes an element
away, and ``+`` adds the elements that follow.

``policies`` are texts by file name. ``given`` may hold what was written before (``ours``) and
``reassert``. ``plan`` is the expected text and stands last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from textwrap import indent
from typing import Any

from golden import cases
from plan_bases import BASES
from ruamel.yaml import YAML

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import Target, Value, decode_target, decode_value
from vsrtune.observe.config_files import read_policy
from vsrtune.policy.model import Policy

PLANS = Path(__file__).resolve().parents[2] / "plans"
CASES = cases(PLANS)
# What tells the elements of a list apart, by the kind of the element.
_NAMES = ("name", "target", "path", "number", "cpu", "pid")


@dataclass(frozen=True)
class Case:
    """What a file of tests/plans says of a situation."""

    snapshot: Snapshot
    policies: Mapping[str, str]
    given: Mapping[str, Any]

    @property
    def ours(self) -> dict[Target, Value]:
        """What was written before."""
        found: dict[Target, Value] = {}
        for entry in self.given.get("ours", []):
            target = decode_target(entry["target"])
            found[target] = decode_value(target, entry["value"], "$.value")
        return found

    def load(self, directory: Path) -> tuple[Policy, ...]:
        """The policies, read from files in a directory."""
        for name, text in self.policies.items():
            (directory / name).write_text(text, encoding="utf-8")
        return tuple(read_policy(directory / name) for name in sorted(self.policies))


def read(file: Path) -> Case:
    """A case. Raises AssertionError when its patch names what the base does not have."""
    data = YAML(typ="safe", pure=True).load(file)
    base = BASES[data["base"]](**data.get("with", {}))
    found = patched(encode(base), data.get("patch", {}))
    found["host"]["cpusets"].sort(key=itemgetter("path"))  # as a snapshot has them
    return Case(decode(Snapshot, found), data["policies"], data.get("given", {}))


def patched(value: Any, patch: Any) -> Any:
    """The value with what the patch changes."""
    if not isinstance(patch, dict):
        return patch
    if isinstance(value, dict):
        assert patch.keys() <= value.keys(), f"{patch.keys() - value.keys()} is not in the base"
        return value | {key: patched(value[key], change) for key, change in patch.items()}
    elements = list(value)
    for name, change in patch.items():
        if name == "+":
            elements += change
            continue
        chosen = [element for element in elements if _named(element, str(name))]
        assert chosen, f"the base has no {name}"
        elements = [
            patched(element, change) if element in chosen else element
            for element in elements
            if change is not None or element not in chosen
        ]
    return elements


def _named(element: Mapping[str, Any], name: str) -> bool:
    """Whether ``name`` in a patch means this element of a list."""
    if name == "*":
        return True
    if "role" in element:
        queue = "" if element["queue"] is None else f"/{element['queue']}"
        part = f"{element['interface']}{queue}" if element["index"] is None else element["index"]
        return name in (element["role"], f"{element['role']} {part}")
    if "siblings" in element:
        return element["id"] in CpuSet.parse(name)
    return name in {str(element[key]) for key in _NAMES if key in element}


def expecting(text: str, plan: str) -> str:
    """The text of a case with this plan in the place of its own."""
    head = text.partition("\nplan:")[0].rstrip("\n")
    return f"{head}\nplan: |\n{indent(plan, '  ')}"
