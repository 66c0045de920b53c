# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads policy files from directories and reports the errors of all files together."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from vsrtune.core.errors import PolicyError
from vsrtune.policy.model import Policy, PolicyErrors
from vsrtune.policy.parser import parse
from vsrtune.policy.yaml_reader import MAX_BYTES

SUFFIXES = (".yaml", ".yml")


def read_policy(path: Path) -> Policy:
    """Read one file. Raises PolicyErrors, also when the file cannot be read."""
    return parse(read_text(path), str(path))


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a configuration file, up to ``most`` bytes and one. Raises PolicyErrors when it
    cannot be read."""
    line = 1
    try:
        # Opening a FIFO or device of that name would wait or worse.
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                raw = file.read(most + 1)
            # What is cut in the middle of a character is too large, as parse reports.
            return raw.decode("utf-8", "replace" if len(raw) > most else "strict")
        what, hint = "this is no regular file", "name a file of text"
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or 'unknown reason'}"
        hint = "check its name and its rights"
    except UnicodeDecodeError as error:
        what, hint = "the text is not UTF-8", "save the file as UTF-8"
        line += raw.count(b"\n", 0, error.start)
    raise PolicyErrors([PolicyError(what, where=f"{path}:{line}", hint=hint)])


def files_in(dirs: Sequence[Path]) -> list[Path]:
    """The policy files of the directories: ``*.yaml`` and ``*.yml``, not hidden.

    A file in a later directory replaces one of the same name in an earlier
    directory; a directory that does not exist holds none. Raises PolicyErrors
    for one that cannot be listed.
    """
    found: dict[str, Path] = {}
    for directory in dirs:
        try:
            entries = sorted(directory.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            what = f"the directory cannot be listed: {error.strerror or 'unknown reason'}"
            wrong = PolicyError(what, where=str(directory), hint="check its rights")
            raise PolicyErrors([wrong]) from None
        for entry in entries:
            if entry.suffix in SUFFIXES and not entry.name.startswith("."):
                found[entry.name] = entry
    return [found[name] for name in sorted(found)]


def load_dirs(dirs: Sequence[Path]) -> tuple[Policy, ...]:
    """Read all policies of the directories, as ``files_in`` finds and ``read_all`` reads them.

    Raises PolicyErrors with every error of every file, for files that anybody but root and
    vsrtune's own user could write, and for a user that this host does not know. Whoever writes a
    policy decides which threads of the host become realtime.
    """
    files = files_in(dirs)
    found = unsafe(files)
    if found:
        raise PolicyErrors(found)
    policies, errors = read_all(files)
    policies, strangers = with_users(policies)
    if errors or strangers:
        raise PolicyErrors([*errors, *strangers])
    return tuple(policies)


def with_users(policies: Iterable[Policy]) -> tuple[list[Policy], list[PolicyError]]:
    """The policies with the numbers of their users, and an error for each whose user this host does
    not know."""
    known: list[Policy] = []
    errors: list[PolicyError] = []
    for policy in policies:
        try:
            uid = policy.uid if policy.uid is not None else pwd.getpwnam(str(policy.user)).pw_uid
        except KeyError:
            what = f"user: this host has no user {policy.user}"
            hint = "name the user that its QEMU runs as; see: getent passwd"
            errors.append(PolicyError(what, where=policy.at("user"), hint=hint))
        else:
            known.append(replace(policy, uid=uid))
    return known, errors


def unsafe(files: Iterable[Path]) -> list[PolicyError]:
    """An error for each file, and each directory in which a file lies, that others could write."""
    errors: dict[Path, PolicyError] = {}
    for path in files:
        # Path.resolve raises for a ring of links; stat says that better.
        for place in (path.parent, path, Path(os.path.realpath(path)).parent):
            try:
                found = place.stat()
            except OSError:
                continue  # reading it will say why
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                continue  # and so it will of a device, which all may write
            owner = found.st_uid
            if owner not in (0, os.geteuid()):
                what, hint = f"it belongs to user {owner}", f"chown root: {place}"
            elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                mode = stat.S_IMODE(found.st_mode)
                what, hint = f"others may write it (mode {mode:04o})", f"chmod go-w {place}"
                if mode & stat.S_ISVTX:  # /tmp and its like, which others need
                    hint = "move the policies to a directory of root's own"
            else:
                continue
            what = f"not read, because {what}: a policy must be root's alone to write"
            errors.setdefault(place, PolicyError(what, where=str(place), hint=hint))
    return list(errors.values())


def read_all(paths: Iterable[Path]) -> tuple[list[Policy], list[PolicyError]]:
    """The policies of the files that are good, and every error of the others. Two files with the
    same ``guest`` and user are an error that names both."""
    policies: list[Policy] = []
    errors: list[PolicyError] = []
    first: dict[tuple[str, str | int], Policy] = {}
    for path in paths:
        try:
            policy = read_policy(path)
        except PolicyErrors as error:
            errors += error.errors
            continue
        user = policy.user if policy.uid is None else policy.uid
        other = first.setdefault((policy.guest, user or 0), policy)
        if other is not policy:
            errors.append(
                PolicyError(
                    f"guest: {policy.guest!r} is the guest of {other.at('guest')} too",
                    where=policy.at("guest"),
                    hint="keep one policy per guest",
                )
            )
        policies.append(policy)
    return policies, errors
