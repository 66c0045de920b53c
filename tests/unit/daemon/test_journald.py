"""systemd.py: structured fields reach journald, plain lines reach stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vsrtune.daemon import systemd

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def restore_handlers():  # type: ignore[no-untyped-def]
    before = systemd.LOGGER.handlers[:], systemd.LOGGER.propagate, systemd.LOGGER.level
    yield
    systemd.LOGGER.handlers[:], systemd.LOGGER.propagate, level = before
    systemd.LOGGER.setLevel(level)


def test_outside_systemd_lines_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    systemd.setup()
    systemd.LOGGER.info("hello", extra=systemd.fields(guest="vr1"))
    systemd.LOGGER.debug("hidden")
    assert capsys.readouterr().err == "vsrtune: INFO: hello\n"


FORGED = "vr1\nvsrtune: ERROR: vr2: forged\r\x1b[2J\u2028\u202e\udcff"


def lines_of(emit: str) -> list[str]:
    """What a process writes to standard error that is not the journal's stream."""
    code = f"from vsrtune.daemon import systemd as log; log.setup(); name = {FORGED!r}\n{emit}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=REPO, check=True, timeout=60
    )
    assert done.stderr.endswith(b"\n")
    return done.stderr.decode().removesuffix("\n").split("\n")


def test_a_name_forges_no_line_without_systemd() -> None:
    (line,) = lines_of("log.LOGGER.warning('%s: gone', name, extra=log.fields(guest=name))")
    assert line.startswith(r"vsrtune: WARNING: vr1\nvsrtune: ERROR: vr2: forged\r\x1b[2J\u2028")
    assert line.endswith(r"\udcff: gone")
    assert line.isprintable()


def test_nor_does_an_error_with_a_traceback() -> None:
    first, *others = lines_of(
        "try: raise ValueError(name)\nexcept ValueError: log.LOGGER.exception('%s', name)"
    )
    assert first.startswith("vsrtune: ERROR: vr1")
    assert len(others) > 3
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def entry_of(log: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The fields that journald takes of the one entry that ``log`` makes: it drops those whose
    name is not in capitals. What is sent must be UTF-8."""
    entries: list[dict[str, str]] = []

    def sendv(*fields: str) -> None:
        pairs = (field.encode().decode().partition("=") for field in fields)
        entries.append({name: value for name, _, value in pairs if name.isupper()})

    stream = os.fstat(sys.stderr.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{stream.st_dev}:{stream.st_ino}")
    monkeypatch.setattr("systemd.journal.sendv", sendv)
    systemd.setup()
    log()
    (entry,) = entries
    return entry


def test_fields_become_journal_fields(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = entry_of(
        lambda: systemd.LOGGER.warning(
            "%s changed", "vr 1.ü", extra=systemd.fields(guest="vr 1.ü", error=None)
        ),
        monkeypatch,
    )
    assert entry["MESSAGE"] == "vr 1.ü changed"
    assert entry["VSRTUNE_GUEST"] == "vr 1.ü"
    assert (entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("4", "vsrtune")
    assert "VSRTUNE_ERROR" not in entry
    assert capfd.readouterr().err == ""


def test_without_the_binding_systemd_reads_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = os.fstat(sys.stderr.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{stream.st_dev}:{stream.st_ino}")
    monkeypatch.setitem(sys.modules, "systemd.journal", None)
    systemd.setup()
    systemd.LOGGER.warning("changed")
    assert capfd.readouterr().err == "vsrtune: WARNING: changed\n"


def test_nor_in_the_journal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        try:
            raise ValueError(FORGED)
        except ValueError:
            systemd.LOGGER.exception("%s", FORGED, extra=systemd.fields(guest=FORGED))

    entry = entry_of(fail, monkeypatch)
    first, *others = entry["MESSAGE"].split("\n")
    assert first.isprintable()
    assert entry["VSRTUNE_GUEST"] == first
    assert len(others) > 3
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert capfd.readouterr().err == ""
