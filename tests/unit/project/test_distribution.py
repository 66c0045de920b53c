"""What a source distribution and a wheel hold: made as publishers make them, the wheel from the
source distribution."""

from __future__ import annotations

import configparser
import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
