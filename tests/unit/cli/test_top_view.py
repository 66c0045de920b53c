"""Frames on terminals of many sizes."""

from __future__ import annotations

import io
from dataclasses import replace

import golden
import pytest
import top_scene
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from top_samples import GOLDEN, busy

from vsrtune.cli import top_view
from vsrtune.views.top_frame import Frame, make_frame


def screen(frame: Frame, width: int, height: int) -> list[str]:
    """The lines of the terminal, without colours and what is blank at their ends."""
    console = Console(
        file=io.StringIO(), width=width, height=height, color_system=None, _environ={}
    )
    console.print(top_view.view(frame, width, height), height=height)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (110, 30), (170, 24)])
def test_the_recorded_host(width: int, height: int) -> None:
    shown = "\n".join(screen(top_scene.frame(), width, height)) + "\n"
    golden.matches(GOLDEN / f"{width}x{height}.txt", shown)


@pytest.mark.parametrize("width", [20, 40, 80, 120, 149, 150, 300])
@pytest.mark.parametrize("height", [1, 2, 5, 10, 24, 60, 200])
def test_no_size_is_too_small_or_too_large(width: int, height: int) -> None:
    lines = screen(top_scene.frame(), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "Layout(" not in "\n".join(lines)


@pytest.mark.parametrize("width", [80, 160])
def test_of_many_guests_the_busiest_are_shown_and_the_others_counted(width: int) -> None:
    frame = make_frame(*busy(300))
    lines = screen(frame, width, 24)
    guests = [line.split()[0] for line in lines if " vcpu 0 " in line and line.startswith("vr")]
    assert guests == list(frame.guests[: len(guests)])
    assert len(guests) >= 3
    said = next(line for line in lines if "more threads do not fit here" in line)
    shown = sum(line.startswith("vr") for line in lines)
    assert said.lstrip().startswith(f"{600 - shown} more threads")
    assert f"{300 - len(guests)} of 300 guests are not shown" in said


def test_of_many_cpus_those_that_serve_interrupts_and_the_busiest() -> None:
    frame = make_frame(*busy(3))
    (first, second, *_) = frame.cpus
    cpus = [replace(second, cpu=n, busy=n / 100) for n in range(64)]
    cpus[50] = replace(first, cpu=50)
    lines = screen(replace(frame, cpus=tuple(cpus)), 80, 20)
    heads = lines.index(next(line for line in lines if line.startswith("CPU for")))
    end = next(n for n, line in enumerate(lines) if "more CPUs do not fit here" in line)
    numbers = [line.split()[0] for line in lines[heads + 1 : end]]
    assert numbers == sorted(numbers, key=int)
    assert {"50", "63"} <= set(numbers)
    assert lines[end].startswith(f"{64 - len(numbers)} more")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=6), st.integers(-2, 100))
def test_lines_are_shared_out_and_never_more_than_there_are(
    parts: list[tuple[int, int]], room: int
) -> None:
    given_out = top_view.share_out(parts, room)
    assert sum(given_out) <= max(room, 0)
    assert all(0 <= n <= wanted for n, (_, wanted) in zip(given_out, parts, strict=True))
    if sum(wanted for _, wanted in parts) <= room:
        assert given_out == [wanted for _, wanted in parts]


def test_names_do_not_move_the_cursor() -> None:
    frame = top_scene.frame()
    rows = (replace(frame.threads[0], guest="vr\x1b[2J[bold]"), *frame.threads[1:])
    frame = replace(frame, threads=rows)
    # Wide enough for the whole name.
    assert any("vr\\x1b[2J[bold]" in line for line in screen(frame, 120, 30))
