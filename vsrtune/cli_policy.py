"""``vsrtune policy``: check files, print the schema."""

from __future__ import annotations

from pathlib import Path

import click

from vsrtune.cli_common import policies_option


@click.group()
def policy() -> None:
    """Check policy files; print their schema."""


@policy.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@policies_option
def check(files: tuple[Path, ...], policy_dirs: tuple[Path, ...]) -> int:
    """Check policy FILES and name every error with its file and line.

    Without FILES, checks the policy directories as the daemon would read them. Looks
    at the files alone, not at the host; `vsrtune plan` does both.

    \b
    Exit codes: 0 all files are good, 2 at least one is not.
    """
    from vsrtune.cli import complain
    from vsrtune.errors import PolicyError
    from vsrtune.policy import parse

    if not files:
        from vsrtune.policy_files import load_dirs

        for good in load_dirs(policy_dirs):
            click.echo(f"{good.path}: good")
        return 0
    bad = 0
    for path in files:
        try:
            parse(path.read_text(encoding="utf-8"), str(path))
        except PolicyError as error:
            complain(error)
            bad += 1
        except UnicodeDecodeError as error:
            complain(PolicyError(f"not UTF-8 text: {error.reason}", where=str(path)))
            bad += 1
        else:
            click.echo(f"{path}: good")
    return 2 if bad else 0


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors and CI."""
    import json

    from vsrtune import policy_schema

    click.echo(json.dumps(policy_schema.schema(), indent=2, ensure_ascii=False))
