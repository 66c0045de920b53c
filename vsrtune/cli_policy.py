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
    from vsrtune import policy_files
    from vsrtune.cli import complain

    paths = files or policy_files.files_in(policy_dirs)
    errors = policy_files.check(paths)
    for error in errors:
        complain(error)
    bad = {error.where.rpartition(":")[0] for error in errors}
    for path in paths:
        if str(path) not in bad:
            click.echo(f"{path}: good")
    return 2 if errors else 0


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors and CI."""
    import json

    from vsrtune import policy_schema

    click.echo(json.dumps(policy_schema.schema(), indent=2, ensure_ascii=False))
