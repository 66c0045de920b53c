# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune attach``: moves guests between macvtap and NAPI-macvlan, and back."""

from __future__ import annotations

from pathlib import Path

import click

from vsrtune.attach.plan.model import Switch, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.survey import survey
from vsrtune.attach.sweep import Swept
from vsrtune.cli import attachments
from vsrtune.cli.options import (
    ATTACH_LEDGER,
    StatePlaces,
    check_written,
    dry_run_option,
    guest_names,
    options,
    places_options,
)
from vsrtune.cli.render import say
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.jsonl_log import holder
from vsrtune.model.guest import Attachment


@click.command()
@click.argument("guests", nargs=-1, shell_complete=guest_names)
@options(
    click.option(
        "--to",
        type=click.Choice(["napi-macvlan", "macvtap"]),
        help="What the interfaces shall stand on.",
    ),
    click.option(
        "--interface",
        default="",
        metavar="X",
        help="Only this one: its MAC, its host device, or the device below it.",
    ),
    click.option("--live", is_flag=True, help="The running guest."),
    click.option("--config", is_flag=True, help="The persistent definition."),
    click.option(
        "--all-of-lower", is_flag=True, help="Also every other guest on the same lower devices."
    ),
    dry_run_option,
    click.option(
        "--recover", is_flag=True, help="Take back a switch that was interrupted, and no more."
    ),
    click.option(
        "--devices",
        is_flag=True,
        help="Make all devices of the ledger, bring up those that definitions name, and no more: "
        "for the start of the host.",
    ),
)
@places_options
def attach(
    guests: tuple[str, ...],
    to: str | None,
    interface: str,
    live: bool,
    config: bool,
    all_of_lower: bool,
    dry_run: bool,
    recover: bool,
    devices: bool,
    places: StatePlaces,
) -> int:
    """Move GUESTS between macvtap and NAPI-macvlan.

    Interfaces are unplugged from the guest and plugged in again: same MAC, same PCI
    address, same queues, another device below. Without --live and --config both are
    changed, as far as the guest has them (virsh's --persistent). A lower device serves
    one kind only, so all guests on it move together. A switch that fails, or is
    interrupted, is taken back.

    \b
    Exit codes: 0 done or nothing to do, 1 refused or failed, 4 the host could not be read,
    or the ledger named with --recover does not exist.
    """
    if sum((recover, devices, to is not None)) != 1:
        raise click.UsageError("one of --to, --recover and --devices is needed")
    if to is not None and not guests:
        raise click.UsageError("name a guest")
    if to is None and (dry_run or guests or interface or live or config or all_of_lower):
        raise click.UsageError("--recover and --devices are for all guests, and take no other word")
    if recover:
        check_written(places.ledger, ATTACH_LEDGER)
    with attachments.opened(places) as (switcher, host):
        if devices:
            return attachments.outcome(switcher.boot_devices())
        if recover or (switcher.unfinished() and not dry_run):
            code = attachments.recover(switcher)
            if recover or code:
                return code
        elif switcher.unfinished():
            click.echo("A switch was interrupted: the next one, or --recover, takes it back first.")
        elif not dry_run:
            # What is released late is macvtap, which the new devices would keep from coming back.
            attachments.outcome(switcher.sweep())
        read = survey(host, switcher.origins(), places.journal)
        chosen = {guest.name: guest.uuid for guest in map(read.guest, guests)}
        request = SwitchRequest(
            Attachment(str(to)), tuple(sorted(chosen)), interface, live, config, all_of_lower
        )
        switch = plan(request, read)
        attachments.show(switch)
        if dry_run:
            return ExitCode.DONE
        swept = Swept((), ())
        if switch.moves:
            swept = attachments.carry(switcher, switch)
            _after(switch, places.journal)
        for name, uuid in sorted(chosen.items()):
            if request.to is Attachment.NAPI_MACVLAN and switcher.take_over(uuid):
                say(f"{name}: a policy had switched it; it now stays without one, too.")
    # The guests are where they should be; a later sweep retries a device that was not removed.
    attachments.complain(swept.failed)
    return ExitCode.DONE


def _after(switch: Switch, journal: Path) -> None:
    attachments.tell_of_boot(switch)
    if not any(m.live[0] for m in switch.moves):
        return
    if holder(journal):
        click.echo("The daemon tunes the new workers.")
    else:
        click.echo(
            "The new vhost workers are not tuned: no daemon runs; `vsrtune apply` tunes them once."
        )
