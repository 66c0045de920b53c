"""Text to the few man(7) macros that our pages need."""

from __future__ import annotations

import re

_CODE = re.compile(r"`([^`]+)`")


def escape(text: str) -> str:
    """Text that groff shows as it is: backslashes, hyphens that are typed, leading dots."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in text.split("\n"))


def inline(text: str) -> str:
    """Escaped text, with `code` in bold."""
    return _CODE.sub(lambda m: f"\\fB{m[1]}\\fR", escape(text))


def title(name: str, section: int, version: str) -> str:
    """The head of a page. There is no date: a page is that of its version."""
    return f'.TH {name.upper()} {section} "" "vsrtune {version}" ""\n'


def section(name: str) -> str:
    return f'.SH "{name}"\n'


def subsection(name: str) -> str:
    return f'.SS "{escape(name)}"\n'


def paragraph(text: str) -> str:
    return f".PP\n{inline(text)}\n"


def item(tag: str, text: str) -> str:
    """A tagged paragraph; the tag in bold."""
    return f".TP\n\\fB{escape(tag)}\\fR\n{inline(text)}\n"


def example(text: str) -> str:
    """Lines that are not filled."""
    return f".PP\n.in +4n\n.nf\n{escape(text)}\n.fi\n.in\n"


def text_blocks(help_text: str) -> str:
    """A docstring as click shows it: paragraphs; one that begins with \\b keeps its lines."""
    out = []
    for block in re.split(r"\n\s*\n", help_text.strip()):
        if block.lstrip().startswith("\b"):
            out.append(example(block.replace("\b", "").strip("\n")))
        else:
            out.append(paragraph(" ".join(block.split())))
    return "".join(out)
