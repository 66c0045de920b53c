"""journald.py: structured fields reach journald, plain lines reach stderr."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vsrtune.daemon import journald

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def restore_handlers():  # type: ignore[no-untyped-def]
    before = journald.LOGGER.handlers[:], journald.LOGGER.propagate, journald.LOGGER.level
    yield
    journald.LOGGER.handlers[:], journald.LOGGER.propagate, level = before
    journald.LOGGER.setLevel(level)


def test_fields_become_journal_fields() -> None:
    sent: list[tuple[str, dict[str, str]]] = []
    handler = journald.JournalHandler(lambda message, **fields: sent.append((message, fields)))
    record = logging.LogRecord("test", logging.WARNING, "f", 1, "%s changed", ("vr 1.ü",), None)
    record.vsrtune = journald.fields(guest="vr 1.ü", error=None)["vsrtune"]
    handler.emit(record)
    ((message, fields),) = sent
    assert message == "vr 1.ü changed"
    assert fields["VSRTUNE_GUEST"] == "vr 1.ü"
    assert fields["PRIORITY"] == "4"
    assert "VSRTUNE_ERROR" not in fields


@pytest.mark.parametrize(
    ("level", "number"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3)],
)
def test_levels_map_to_syslog_priorities(level: int, number: int) -> None:
    assert journald.priority(level) == number


def test_outside_systemd_lines_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    journald.setup()
    journald.LOGGER.info("hello", extra=journald.fields(guest="vr1"))
    journald.LOGGER.debug("hidden")
    assert capsys.readouterr().err == "vsrtune: INFO: hello\n"


FORGED = "vr1\nvsrtune: ERROR: vr2: forged\r\x1b[2J\u2028\u202e\udcff"


def lines_of(emit: str) -> list[str]:
    """What a process without systemd's library writes to standard error, which the journal
    takes by lines."""
    code = (
        "import sys; sys.modules['systemd'] = None\n"
        "import os; status = os.fstat(2)\n"
        "os.environ['JOURNAL_STREAM'] = f'{status.st_dev}:{status.st_ino}'\n"
        f"from vsrtune.daemon import journald as log; log.setup(); name = {FORGED!r}\n{emit}"
    )
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


def test_nor_in_the_journal() -> None:
    sent: list[tuple[str, dict[str, str]]] = []
    handler = journald.JournalHandler(lambda message, **fields: sent.append((message, fields)))
    record = logging.LogRecord("test", logging.INFO, "f", 1, "%s", (FORGED,), None)
    record.vsrtune = journald.fields(guest=FORGED)["vsrtune"]
    handler.emit(record)
    ((message, fields),) = sent
    assert message.isprintable()
    assert fields["VSRTUNE_GUEST"] == message
