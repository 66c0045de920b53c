"""The shipped QMP library is used only where the system has none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vsrtune.host import qmp


def qemu_modules() -> dict[str, ModuleType]:
    return {n: m for n, m in sys.modules.items() if n == "qemu" or n.startswith("qemu.")}


@pytest.fixture
def clean() -> Iterator[None]:
    """No QMP library imported, before and after."""
    before = qemu_modules()
    for name in before:
        del sys.modules[name]
    yield
    for name in qemu_modules():
        del sys.modules[name]
    sys.modules.update(before)


def library(directory: Path, origin: str) -> Path:
    package = directory / "qemu/qmp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"ORIGIN = {origin!r}\n")
    return directory


@pytest.mark.usefixtures("clean")
def test_the_systems_library_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = library(tmp_path / "system", "system")
    monkeypatch.setattr(sys, "path", [str(system)])
    monkeypatch.setattr(qmp, "DIRECTORY", str(library(tmp_path / "vendor", "vendor")))
    assert qmp.qemu_qmp().ORIGIN == "system"
    assert sys.path == [str(system)]


@pytest.mark.usefixtures("clean")
def test_else_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(qmp, "DIRECTORY", str(library(tmp_path / "vendor", "vendor")))
    assert qmp.qemu_qmp().ORIGIN == "vendor"
