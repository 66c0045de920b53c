# SPDX-License-Identifier: GPL-2.0-or-later
"""JSON and XML that others wrote, read within limits.

QEMU's command line, libvirt's XML, QMP and files on disk come from elsewhere. The readers here
raise ValueError for nesting that a recursive reader cannot follow, numbers that are not finite,
and entities that multiply.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any, NoReturn, Protocol, TypeVar

from vsrtune.core.codec import decode
from vsrtune.core.errors import VsrtuneError

# libvirt accepts no string beyond 4 MiB (VIR_NET_MESSAGE_STRING_MAX); a snapshot of a large host
# is the largest JSON.
MAX_SIZE = 32 << 20
MAX_DEPTH = 64
# libvirt keeps <metadata> of any shape.
MAX_XML_DEPTH = 200

# A string without an end goes on to the end of the text, or each of its quotes would be tried anew.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|([\[{])|([\]}])', re.DOTALL)


def json_value(text: str | bytes, most: int | None = None) -> Any:
    """The value of a JSON text. Raises ValueError for text that is not JSON, is nested deeper than
    MAX_DEPTH, is larger than ``most`` (MAX_SIZE by default), or holds NaN or infinite numbers."""
    most = MAX_SIZE if most is None else most
    if len(text) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


class Kept(Protocol):
    """The content of a file in /run: of one boot, in one version of the format."""

    @property
    def boot_id(self) -> str: ...
    @property
    def version(self) -> int: ...


K = TypeVar("K", bound=Kept)


def kept(empty: K, text: str) -> K:
    """Read the text of such a file; ``empty`` when it is damaged, of another version or of another
    boot."""
    try:
        found = decode(type(empty), json_value(text))
    except (ValueError, VsrtuneError):
        return empty
    usable = (found.boot_id, found.version) == (empty.boot_id, empty.version)
    return found if usable else empty


def _depth(text: str) -> int:
    depth = most = 0
    for match in _BRACKETS.finditer(text):
        if match[1]:
            depth += 1
            most = max(most, depth)
        elif match[2]:
            depth -= 1
    return most


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def xml_element(text: str) -> ET.Element:
    """The root element. Raises ValueError for text that is not XML, has a document type (which
    could define entities), is nested deeper than MAX_XML_DEPTH or larger than MAX_SIZE."""
    if len(text) > MAX_SIZE:
        raise ValueError(f"larger than {MAX_SIZE >> 20} MiB")
    try:
        return ET.fromstring(text, ET.XMLParser(target=_Tree()))
    except (ET.ParseError, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None


class _Tree(ET.TreeBuilder):
    """Refuses document types and nesting that no domain XML has."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def doctype(self, *_: Any) -> NoReturn:
        raise ValueError("a document type is not accepted")

    def start(self, tag: str, attrs: dict[str, str], /) -> ET.Element:
        self._depth += 1
        if self._depth > MAX_XML_DEPTH:
            raise ValueError(f"nested deeper than {MAX_XML_DEPTH} levels")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ET.Element:
        self._depth -= 1
        return super().end(tag)
