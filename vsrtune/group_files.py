"""Group files on disk, and which group a word on the command line means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vsrtune.core.errors import PolicyError, VsrtuneError
from vsrtune.group.parser import Group, parse
from vsrtune.observe.config_files import SUFFIXES, files_in, read_text
from vsrtune.policy.model import PolicyErrors


def load(word: str, directory: Path) -> Group:
    """The group of a file, or the one of that name in the directory. Raises PolicyErrors
    for what is wrong in the file, VsrtuneError when there is none."""
    if _is_file(word):
        path = Path(word)
        return parse(read_text(path), str(path))
    for path in files_in([directory]):
        # One bad file must not hide the group that is asked for in another.
        if path.stem == word:
            group = parse(read_text(path), str(path))
            if group.name == word:
                return group
            raise VsrtuneError(
                f"the group in it is called {group.name}", where=group.at("group", "name"),
                hint=f"call the file {group.name}.yaml",
            )  # fmt: skip
    raise VsrtuneError(
        f"there is no file {directory / word}.yaml",
        where=word,
        hint="name a file, or write the group there (docs/groups.md)",
    )


def check(path: Path) -> Sequence[PolicyError]:
    """Every error of one file, empty when good."""
    try:
        parse(read_text(path), str(path))
    except PolicyErrors as caught:
        return caught.errors
    return ()


def name(word: str) -> str:
    """The name of the group that a file or a name means. Raises PolicyErrors."""
    if _is_file(word):
        path = Path(word)
        return parse(read_text(path), str(path)).name
    return word


def _is_file(word: str) -> bool:
    return "/" in word or word.endswith(SUFFIXES)
