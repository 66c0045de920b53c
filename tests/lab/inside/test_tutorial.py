"""docs/tutorial.md on a host like its own: its commands run in order, and say what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import labhelp
from test_docs import PACKAGES, pages

COMMAND = re.compile(r"(?:# )?((?:vsrtune|systemctl) .*)")
# It wants an operator's traffic (test_try.py).
LEFT_OUT = "vsrtune try"
POLICY = labhelp.POLICIES / "vr1.yaml"
# What differs from host to host, and from run to run: where threads ran last, their times, the
# numbers of processes, and when it was.
DIFFERS = (
    (r"^(\s*\d+\s+(?:vcpu \d+|vhost \S+|emulator)(?:\s+\S+){3}\s+)\d+(\s+\S+\s+\S+\s+)\S+", r"\1-\2-"),
    (r"^\w{3} \d+ [\d:]+ \S+ vsrtune\[\d+\]: ", ""),
    (r"since .*", "since"),
    (r"\b\d{3,}\b", "N"),
    (r"ksoftirqd/1 scheduling +\d+", "ksoftirqd/1 scheduling N"),
    (r"\s+", " "),
)  # fmt: skip


def bare(line: str) -> str:
    for pattern, instead in DIFFERS:
        line = re.sub(pattern, instead, line)
    return line.strip()


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of each fenced block."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield block.splitlines()


def missing(shown: list[str], said: str) -> list[str]:
    """Lines that a document shows and nobody has said, in this order; dots stand for anything."""
    lines, at, out = [bare(line) for line in said.splitlines()], 0, []
    for line in shown:
        pattern = ".*".join(re.escape(part.strip()) for part in bare(line).split("..."))
        found = next((n for n in range(at, len(lines)) if re.fullmatch(pattern, lines[n])), None)
        if found is None:
            out.append(line)
        else:
            at = found + (line != "...")
    return out


def test_it_is_as_the_tutorial_says(restored: None) -> None:
    (package,) = PACKAGES.glob("vsrtune_*.deb")
    (text,) = (text for name, text in pages(package).items() if "tutorial.md" in name)
    wrong: list[str] = []
    ran = 0

    def compare(shown: list[str], said: str) -> None:
        wrong.extend(f"{line}\nis not in:\n{said}" for line in missing(shown, said))

    for block in blocks(text):
        if block[0].startswith(("make ", "apt ", "mkdir ")):
            continue  # the lab has done this, or is no other distribution
        said, shown = "", list[str]()
        for line in block:
            command = COMMAND.fullmatch(line)
            if command is None:
                shown.append(line)
            elif not command[1].startswith(LEFT_OUT):
                compare(shown, said)
                done = labhelp.sh("sh", "-c", command[1], check=False)
                said, shown = done.stdout + done.stderr, []
                assert done.returncode in (0, 3), f"{command[1]}: exit {done.returncode}\n{said}"
                ran += 1
        # A block without a command shows the policy.
        compare(shown, said or POLICY.read_text())
    assert ran >= 10
    assert wrong == [], "\n".join(wrong)
