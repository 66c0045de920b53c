"""Foreign names in what an operator reads."""

from __future__ import annotations

import pytest

from vsrtune.cli import complain
from vsrtune.errors import VsrtuneError
from vsrtune.printable import printable, printable_lines
from vsrtune.render import plain
from vsrtune.report import Table

NAME = "vr\x1b]0;owned\x07\u202e\udcff"
SHOWN = r"vr\x1b]0;owned\x07\u202e\udcff"


def test_what_would_not_be_shown_as_it_is_is_written_out() -> None:
    assert printable(NAME) == SHOWN
    assert printable("vr 1.ü") == "vr 1.ü"
    assert printable("a\nb") == r"a\nb"
    assert printable_lines(f"a\n{NAME}") == f"a\n{SHOWN}"


def test_tables() -> None:
    text = plain(Table("guests of " + NAME, ("guest",), ((NAME,),)))
    assert text == f"guests of {SHOWN}\n  guest\n  {SHOWN}\n"


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    complain(VsrtuneError("no such guest", where=NAME, hint=f"see\n{NAME}"))
    assert capsys.readouterr().err == (
        f"vsrtune: error: {SHOWN}: no such guest\nvsrtune: hint: see\n{SHOWN}\n"
    )
