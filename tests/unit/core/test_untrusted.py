"""JSON and XML of others, within limits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from vsrtune.core import untrusted
from vsrtune.core.errors import JournalError, VsrtuneError
from vsrtune.core.untrusted import MAX_DEPTH, MAX_XML_DEPTH, json_value, xml_element
from vsrtune.execute.journal import read_entries
from vsrtune.execute.jsonl_log import LARGEST
from vsrtune.execute.ledger import read_pending
from vsrtune.host.qemu_cmdline import parse, split_options


def test_json_as_deep_as_allowed_and_deeper() -> None:
    assert json_value("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="deeper"):
        json_value("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="deeper"):
        json_value(b'{"a":' * 100_000)


def test_a_text_without_end_is_read_once() -> None:
    """Not once for each of its quotes, which took minutes."""
    for text in ("[" * (MAX_DEPTH + 1) + '"' + '\\"' * 500_000, "[" * 100 + '"\\'):
        with pytest.raises(ValueError, match="deeper"):
            json_value(text)
        with pytest.raises(ValueError, match="Extra data"):
            json_value("{}" * MAX_DEPTH + '"' + text)


def test_brackets_in_text_and_beside_one_another_do_not_count() -> None:
    wide = [{"a": "[" * 100 + '"' + "{" * 100}] * 1000
    assert json_value(json.dumps(wide)) == wide


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, -1e999]", "{", "", "9" * 5000])
def test_json_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        json_value(text)


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MAX_SIZE", 10)
    for read in (json_value, xml_element):
        with pytest.raises(ValueError, match="larger"):
            read(" " * 11)


def test_xml_as_deep_as_allowed_and_deeper() -> None:
    nested = "<a>" * MAX_XML_DEPTH + "</a>" * MAX_XML_DEPTH
    assert xml_element(nested).tag == "a"
    with pytest.raises(ValueError, match="deeper"):
        xml_element(f"<b>{nested}</b>")


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE d [<!ENTITY a "b">]><d>&a;</d>',
        '<!-- <d> --><!DOCTYPE d SYSTEM "file:///etc/passwd"><d/>',
    ],
)
def test_no_entities(text: str) -> None:
    with pytest.raises(ValueError, match="document type"):
        xml_element(text)


@pytest.mark.parametrize("text", ["", "<a", "<a></b>", "\ud800<a/>", "<a>\0</a>"])
def test_xml_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        xml_element(text)


def test_a_command_line_that_means_harm_is_soon_read() -> None:
    """Anybody may start a program of QEMU's name; it must not hide the guests."""
    begin = time.monotonic()
    hostile = [
        "qemu-system-x86_64", "-name", '{"guest":' * 100_000, "-netdev", f"tap,fd={'9' * 5000}",
        "-netdev", "tap,fds=" + ":".join(["9" * 11, "7"]),
    ]  # fmt: skip
    found = parse(hostile)
    kept = split_options(json.dumps({"a" * 50_000: dict.fromkeys(map(str, range(1000)), 0)}))
    assert sum(map(len, kept)) < 1_000_000, "one long name is not kept for each option below it"
    assert [n.fds for n in found.netdevs] == [(), (7,)]
    assert time.monotonic() - begin < 5


def test_a_file_that_is_too_large_to_be_ours(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(JournalError, match="larger than"):
        read_entries(path, "b")
    with pytest.raises(VsrtuneError, match="larger than"):
        read_pending(path)
