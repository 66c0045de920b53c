"""Foreign names in what an operator reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vsrtune.cli import main, options
from vsrtune.cli.render import complain
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import printable, printable_lines
from vsrtune.views import layout
from vsrtune.views.tables import Table

NAME = "vr\x1b]0;owned\x07\u202e\udcff"
SHOWN = r"vr\x1b]0;owned\x07\u202e\udcff"


def test_what_would_not_be_shown_as_it_is_is_written_out() -> None:
    assert printable(NAME) == SHOWN
    assert printable("vr 1.ü") == "vr 1.ü"
    assert printable("a\nb") == r"a\nb"
    assert printable_lines(f"a\n{NAME}") == f"a\n  {SHOWN}"


def test_tables() -> None:
    text = "\n".join(layout.lines(Table("guests of " + NAME, ("guest",), ((NAME,),))))
    assert text == f"guests of {SHOWN}\n  guest\n  {SHOWN}"


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    complain(VsrtuneError("no such guest", where=NAME, hint=f"see\n{NAME}"))
    assert capsys.readouterr().err == (
        f"vsrtune: error: {SHOWN}: no such guest\nvsrtune: hint: see\n  {SHOWN}\n"
    )


FORGED = "vr1\nvsrtune: error: vr2: forged\r\x9b"


def test_no_name_makes_an_error_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complain(VsrtuneError(f"{FORGED} is not there", where=FORGED, hint=FORGED))
    monkeypatch.setattr(
        main.cli, "main", lambda *_, **__: (_ for _ in ()).throw(OSError(5, FORGED, FORGED))
    )
    assert main.run([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines if line.startswith("vsrtune")] == [
        ["vsrtune", "error"], ["vsrtune", "hint"], ["vsrtune", "error"],
    ]  # fmt: skip
    assert all(line.isprintable() for line in lines)


def test_a_line_that_is_said_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    options.say(f"left alone: {FORGED}")
    options.say(f"{FORGED}: refused", err=True)
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert text.count("\n") == 1
        assert text.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "path", sorted(Path(main.__file__).parent.rglob("*.py")), ids=lambda p: p.stem
)
def test_what_is_put_together_is_said_so(path: Path) -> None:
    """click.echo prints what is there; a text with anything in it goes through say()."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.echo":
            assert not isinstance(node.args[0], ast.JoinedStr), node.lineno
