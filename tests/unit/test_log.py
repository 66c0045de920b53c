"""log.py: structured fields reach journald, plain lines reach stderr."""

from __future__ import annotations

import logging

import pytest

from vsrtune import log


@pytest.fixture(autouse=True)
def restore_handlers():  # type: ignore[no-untyped-def]
    before = log.LOGGER.handlers[:], log.LOGGER.propagate, log.LOGGER.level
    yield
    log.LOGGER.handlers[:], log.LOGGER.propagate, level = before
    log.LOGGER.setLevel(level)


def test_fields_become_journal_fields() -> None:
    sent: list[tuple[str, dict[str, str]]] = []
    handler = log.JournalHandler(lambda message, **fields: sent.append((message, fields)))
    record = logging.LogRecord("test", logging.WARNING, "f", 1, "%s changed", ("vr 1.ü",), None)
    record.vsrtune = log.fields(guest="vr 1.ü", error=None)["vsrtune"]
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
    assert log.priority(level) == number


def test_outside_systemd_lines_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    log.setup()
    log.LOGGER.info("hello", extra=log.fields(guest="vr1"))
    log.LOGGER.debug("hidden")
    assert capsys.readouterr().err == "vsrtune: INFO: hello\n"
