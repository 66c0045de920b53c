"""What a source distribution and a wheel hold: made as publishers make them, the wheel from the
source distribution."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
import qemu.qmp
from labtool import hosttools

import vsrtune
from vsrtune.attach.ledger import ASKED, GROUP, ORIGIN, STEP, AttachLedger
from vsrtune.cli.daemon import daemon

TREE = Path(__file__).resolve().parents[3]
INPUTS = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    place = tmp_path_factory.mktemp("distribution")
    source = place / "source"
    shutil.copytree(
        TREE / "vsrtune", source / "vsrtune", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in INPUTS:
        shutil.copy(TREE / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(source)],
        capture_output=True, text=True, check=False, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = place.glob("*.whl")
    assert len(list(place.glob("*.tar.gz"))) == 1
    return zipfile.ZipFile(made)


def test_every_module_is_in_it_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    ours = {str(p.relative_to(TREE)) for p in (TREE / "vsrtune").rglob("*.py")} | {
        "vsrtune/py.typed",
        "vsrtune/bench/paper.yaml",
        "vsrtune/bench/report/page.html.j2",
        "vsrtune/views/page.css",
        "vsrtune/views/page.html.j2",
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == ours


def test_every_module_names_its_licence(wheel: zipfile.ZipFile) -> None:
    line = b"# SPDX-License-Identifier: GPL-2.0-or-later\n"
    modules = [name for name in wheel.namelist() if name.endswith(".py")]
    assert [name for name in modules if not wheel.read(name).startswith(line)] == []


def test_setup_cfg_is_where_the_metadata_come_from(wheel: zipfile.ZipFile) -> None:
    config = configparser.ConfigParser()
    config.read(TREE / "setup.cfg")
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == config["metadata"]["name"]
    assert metadata["Version"] == config["metadata"]["version"]
    extras = [
        f'{line}; extra == "{extra}"'
        for extra, lines in config["options.extras_require"].items()
        for line in lines.split()
    ]
    assert sorted(metadata.get_all("Requires-Dist", [])) == sorted(
        config["options"]["install_requires"].split() + extras
    )
    (scripts,) = [n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt")]
    assert "vsrtune = vsrtune.cli.main:main" in wheel.read(scripts).decode()


def test_installed_by_pip_it_works_with_its_files(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """In an environment of its own; the libraries are Debian's."""
    environment, python = tmp_path / "venv", tmp_path / "venv/bin/python"
    words = ["venv", "--system-site-packages", "--without-pip", str(environment)]
    subprocess.run(["/usr/bin/python3", "-m", *words], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index",
         "--no-deps", "--disable-pip-version-check", str(wheel.filename)], check=True,
    )  # fmt: skip
    code = (
        "from vsrtune.bench.report.files import page as _; from vsrtune.daemon import http;"
        "print(http.__file__, http.policy(), http._template())"
    )
    for command, said in (
        ([environment / "bin/vsrtune", "--help"], "vsrtune undo"),
        ([environment / "bin/vsrtune", "policy", "init", "--help"], "--output"),
        ([python, "-I", "-c", code], str(environment)),
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def _required() -> dict[str, str]:
    """The lowest version of each requirement of setup.cfg, by its package in Debian."""
    config = configparser.ConfigParser()
    config.read(TREE / "setup.cfg")
    found = {}
    lines = config["options"]["install_requires"] + config["options.extras_require"]["systemd"]
    for line in lines.split():
        name, lowest = re.fullmatch(r"([\w.-]+?)(?:<[\d.]+,)?>=([\d.]+)", line).groups()  # type: ignore[union-attr]
        short = {"libvirt-python": "libvirt", "systemd-python": "systemd"}.get(name, name)
        found[f"python3-{short.lower()}"] = lowest
    # The package brings it along (debian/vendor); the tests have it from PyPI.
    del found["python3-qemu.qmp"]
    return found


@pytest.mark.parametrize("place", ["tests/setup", "tests/lab/labtool/releases.py"])
def test_every_requirement_is_there_when_vsrtune_is_tested(place: str) -> None:
    assert set(_required()) <= set(re.findall(r"python3-[\w.-]+", (TREE / place).read_text()))


def test_the_package_states_the_same_lowest_versions() -> None:
    """dh_python3 adds the packages that are not named here, without a version."""
    control = (TREE / "debian/control").read_text()
    stated = dict(re.findall(r"(python3-[\w.-]+) \(>= ([\d.]+)\)", control))
    assert stated == _required()


def test_the_package_brings_the_qmp_library_as_published() -> None:
    """All of it that vsrtune imports, from the version that the tests run with."""
    published = Path(qemu.qmp.__file__).parent
    brought = TREE / "debian/vendor/qemu/qmp"
    for path in brought.glob("*.py"):
        assert path.read_bytes() == (published / path.name).read_bytes(), path.name
    code = f"import sys; sys.path[:] = [{str(brought.parents[1])!r}, *sys.path]; import qemu.qmp"
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-S", "-c", f"{code}; print(qemu.qmp.__file__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{brought / '__init__.py'}\n"


def test_what_builds_the_package_is_installed_for_it() -> None:
    control = (TREE / "debian/control").read_text()
    (block,) = re.findall(r"^Build-Depends:\n((?: .*\n)+)", control, re.MULTILINE)
    needed = set(re.findall(r"^ ([a-z0-9-]+)", block, re.MULTILINE)) - {"debhelper-compat"}
    assert set(hosttools.PACKAGE.values()) == needed | {"debhelper", "dpkg-dev"}


# What documents lead to and only the source has.
SOURCE = ("CONTRIBUTING.md", "LICENSE", "docs/results", "kmod", "tests")


def _words(list_of: str) -> list[list[str]]:
    return [line.split() for line in (TREE / "debian" / list_of).read_text().splitlines()]


def _installed() -> dict[str, Path]:
    """The files and directories of the tree that the package has, by their names in it."""
    lines = [*_words("vsrtune.install"), *([*words, "usr/share/doc/vsrtune"] for words in
             _words("vsrtune.docs"))]  # fmt: skip
    found = {}
    for *patterns, place in lines:
        for top in (top for pattern in patterns for top in TREE.glob(pattern)):
            below = top.rglob("*") if top.is_dir() else ()
            for path in (top, *below):
                found[f"{place}/{path.relative_to(top.parent)}"] = path
    for there, name in _words("vsrtune.links"):
        found |= {n.replace(there, name, 1): p for n, p in found.items() if n.startswith(there)}
    return found


def test_links_of_installed_documents_lead_to_files_that_are_installed() -> None:
    names = _installed()
    pages = {name: path for name, path in names.items() if name.endswith(".md")}
    assert len(pages) > 30
    wrong = []
    for name, path in pages.items():
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8")):
            there = os.path.normpath(f"{os.path.dirname(name)}/{target}")
            inside = os.path.relpath((path.parent / target).resolve(), TREE)
            if "://" not in target and there not in names and not inside.startswith(SOURCE):
                wrong.append(f"{name}: {target}")
    assert wrong == []
    # Nothing has another name for being compressed.
    assert "dh_compress -X.md -X.yaml\n" in (TREE / "debian/rules").read_text()


def test_versions_are_the_same_everywhere() -> None:
    config = configparser.ConfigParser()
    config.read(TREE / "setup.cfg")
    version = config["metadata"]["version"]
    assert vsrtune.__version__ == version
    assert (TREE / "debian/changelog").read_text().startswith(f"vsrtune ({version}) ")
    assert (
        re.findall(r"^## ([\d.]+)", (TREE / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    )


def test_the_template_of_the_daemons_environment_names_each_option_with_its_default() -> None:
    """Not those that commands read too: both have to agree on them."""
    lines = re.findall(
        r"^#(VSRTUNE_\w+)=(.*)$", (TREE / "debian/vsrtune.default").read_text(), re.MULTILINE
    )
    names = ("POLICIES", "JOURNAL", "ATTACH_LEDGER", "GROUPS", "CONNECT")
    shared = {f"VSRTUNE_{name}" for name in names}
    options = {
        str(option.envvar): option for option in daemon.params if isinstance(option, click.Option)
        and option.envvar and option.envvar not in shared
    }  # fmt: skip
    shown = {
        name: str(int(bool(option.default))) if option.is_flag else option.default
        for name, option in options.items()
    }
    assert dict(lines) == shown
    assert [line for line in (TREE / "debian/vsrtune.default").read_text().splitlines()
            if line and not line.startswith("#")] == []  # fmt: skip


def test_a_purge_deletes_what_the_guide_says_and_a_removal_nothing(tmp_path: Path) -> None:
    """Beside what dpkg itself deletes: the package's files, and at a purge those of /etc."""
    (tmp_path / "rm").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/deleted\n')
    (tmp_path / "rm").chmod(0o755)
    deleted = {}
    for how in ("remove", "purge"):
        (tmp_path / "deleted").write_text("")
        words = ["/bin/sh", TREE / "debian/vsrtune.postrm", how]
        subprocess.run(words, check=True, env={"PATH": str(tmp_path)}, stderr=subprocess.DEVNULL)
        deleted[how] = set(re.findall(r"/\S+", (tmp_path / "deleted").read_text()))
    guide = (TREE / "docs/guides/upgrade.md").read_text()
    told = set(re.findall(r"^\| `(/[^`]+)`.*\| stays[^|]*\| deleted \|$", guide, re.MULTILINE))
    assert deleted == {"remove": set(), "purge": told - {"/etc/default/vsrtune"}}


@pytest.mark.parametrize("kinds", [(), (ASKED,), (ORIGIN, ASKED), (STEP,), None])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("package", ["vsrtune", "vsrtune-dkms"])
def test_the_package_stays_while_guests_stand_on_its_devices(
    tmp_path: Path, kinds: tuple[str, ...] | None, elsewhere: bool, package: str
) -> None:
    """Also where undo fails: a reboot ends settings, but does not bring such guests back. An
    interface that is asked for is macvtap; None is a ledger of another version."""
    ledger = tmp_path / ("other.jsonl" if elsewhere else "attach.jsonl")
    with AttachLedger.open(ledger) as entries:
        gone = [entries.add(kind, {}) for kind in (ASKED, ORIGIN, STEP, GROUP)]
        for kind in kinds or ():
            entries.add(kind, {"name": "p0", "queues": [1, 2]})
        entries.done(gone[0])
        entries.done(*gone[1:])
    if kinds is None:
        ledger.write_text('{"r":"header","version":2}\n')
    if elsewhere:
        (tmp_path / "vsrtune").write_text(f'#\nVSRTUNE_ATTACH_LEDGER="{ledger}"\n')
    for tool in ("awk", "cat", "sed"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    script = (TREE / f"debian/{package}.prerm").read_text()
    for place in ("/var/lib/vsrtune", "/etc/default", "/run/systemd/system"):
        script = script.replace(place, str(tmp_path))
    words = ["/bin/sh", "-c", script, "prerm", "remove"]
    done = subprocess.run(
        words, check=False, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    stays = kinds not in ((), (ASKED,))
    assert done.returncode == stays
    assert (f"{package}: not removed" in done.stderr) == stays
    assert ("vsrtune attach --to macvtap" in done.stderr) == stays
    assert (f"move {ledger} away" in done.stderr) == stays
    assert ("a reboot does it" in done.stderr) == (package == "vsrtune" and not stays)


def test_needrestart_hands_over(tmp_path: Path) -> None:
    """A restart would unplug routers twice. needrestart looks for this name there."""
    shipped = (TREE / "debian/vsrtune.install").read_text().splitlines()
    (script,) = (
        words[0] for words in map(str.split, shipped) if words[-1] == "etc/needrestart/restart.d"
    )
    assert Path(script).name == "vsrtune.service"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/told\n')
    (tmp_path / "systemctl").chmod(0o755)
    subprocess.run([TREE / script], check=True, env={"PATH": str(tmp_path)})
    told = (tmp_path / "told").read_text()
    assert told.rstrip("\n") in (TREE / "debian/vsrtune.postinst").read_text()
    assert "SIGUSR2" in told
