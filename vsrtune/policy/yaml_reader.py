# SPDX-License-Identifier: GPL-2.0-or-later
"""YAML text of a policy or bench specification to plain data, with the line of every key.

The module reads the event stream of the YAML parser, so that scalars have one meaning whatever the
library version, and it words every error itself, with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vsrtune.core.errors import PolicyError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_SHOWN = 40

KeyPath = tuple[str, ...]

_TAB_INDENT = re.compile(r"^ *\t[ \t]*\S", re.MULTILINE)
_INT = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_PLAIN_KEY = re.compile(r"[\w-]+")


def shown(value: Any) -> str:
    """A value as an error message shows it: short, on one line, in YAML's words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            text = value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 3] + "..."
            return repr(text)
        case _:
            return str(value)


def dotted(path: KeyPath) -> str:
    """A key path as messages show it: ``cpus.vcpu.0``, unusual keys in quotes."""
    return ".".join(k if _PLAIN_KEY.fullmatch(k) else shown(k) for k in path)


@dataclass(slots=True)
class Document:
    """Plain data (dict with text keys, list, int, float, bool, str, None), the
    1-based line of every key path, and the errors found while reading."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    errors: list[PolicyError] = field(default_factory=list)


def read(text: str, path: str, kind: str = "policy") -> Document:
    """Read one YAML document. Errors stand in the result and are never raised; ``data`` is None
    when the text could not be read to its end. ``kind`` is the word for such a file in messages."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    document = Document()
    fail = _Failures(path, document.errors)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        fail(1, f"the file is larger than {MAX_BYTES // 1024} KiB", f"a {kind} is a few lines")
        return document
    tab = _TAB_INDENT.search(text)
    if tab is not None:
        line = text.count("\n", 0, tab.start()) + 1
        fail(line, "the indentation contains a tab", "indent with spaces")
        return document
    try:
        text = text.removeprefix("\ufeff")
        events = YAML(typ="safe", pure=True).parse(text)
        document.data = _Builder(events, document, fail, kind).document()
    except _Stop:
        document.data = None
    except (ValueError, OverflowError):
        # Of chr(), in the library, which tells no line.
        fail(1, "an escape (\\U, \\u, \\x) in the text names no character", "write the character")
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        if any("\t" in told for told in text.split("\n")[line - 1 : line]):
            fail(line, "a tab stands where YAML takes spaces only", "replace it by spaces")
        else:
            fail(
                line,
                "the text cannot be read as YAML from here on",
                "check indentation, quotes, brackets and colons here and on the line before",
            )
    except YAMLError as error:
        position = getattr(error, "position", 0)
        fail(
            text.count("\n", 0, position) + 1,
            "the text holds a control character that YAML does not allow",
            "remove it",
        )
    return document


class _Stop(Exception):
    """Reading cannot go on; the reason is already recorded."""


class _Failures:
    def __init__(self, path: str, errors: list[PolicyError]) -> None:
        self.path = path
        self.errors = errors

    def __call__(self, line: int, what: str, hint: str) -> None:
        self.errors.append(PolicyError(what, where=f"{self.path}:{line}", hint=hint))


class _Builder:
    """Builds data from parser events, depth first. The nesting is bounded, and so is the
    recursion."""

    def __init__(
        self, events: Iterator[Any], document: Document, fail: _Failures, kind: str
    ) -> None:
        self.events = events
        self.lines = document.lines
        self.fail = fail
        self.kind = kind

    def document(self) -> Any:
        data: Any = None
        documents = 0
        for event in self.events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    self.stop(
                        event,
                        "a second YAML document begins here",
                        f"put every {self.kind} into a file of its own",
                    )
            elif kind not in ("StreamStartEvent", "StreamEndEvent", "DocumentEndEvent"):
                data = self.value(event, ())
        return data

    def stop(self, event: Any, what: str, hint: str) -> None:
        self.fail(event.start_mark.line + 1, what, hint)
        raise _Stop

    def value(self, event: Any, path: KeyPath) -> Any:
        kind = type(event).__name__
        if kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            self.stop(event, "anchors and aliases are not accepted", "write the value out")
        if getattr(event, "tag", None) is not None:
            self.stop(event, "YAML tags are not accepted", "write the plain value")
        if len(path) > MAX_DEPTH:
            self.stop(event, f"the nesting is deeper than {MAX_DEPTH} levels", "flatten it")
        if kind == "MappingStartEvent":
            return self.mapping(path)
        if kind == "SequenceStartEvent":
            return self.sequence(path)
        return _scalar(event)

    def mapping(self, path: KeyPath) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for event in self.events:
            kind = type(event).__name__
            if kind == "MappingEndEvent":
                break
            if kind != "ScalarEvent":
                self.stop(event, "a key must be plain text", "write it as name: value")
            key = str(event.value)
            here = (*path, key)
            line = event.start_mark.line + 1
            if key in out:
                self.fail(
                    line,
                    f"{dotted(here)} stands here a second time, first on line {self.lines[here]}",
                    "keep one of the two",
                )
                self.value(next(self.events), here)
                continue
            self.lines[here] = line
            out[key] = self.value(next(self.events), here)
        return out

    def sequence(self, path: KeyPath) -> list[Any]:
        out: list[Any] = []
        for event in self.events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            here = (*path, str(len(out)))
            self.lines[here] = event.start_mark.line + 1
            out.append(self.value(event, here))
        return out


def _scalar(event: Any) -> Any:
    """Resolve a scalar by the YAML 1.2 core schema; ``yes`` and ``on`` are text,
    and a number longer than 18 digits stays text."""
    text = str(event.value)
    if event.style not in (None, ""):
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
