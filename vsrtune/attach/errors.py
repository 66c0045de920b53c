# SPDX-License-Identifier: GPL-2.0-or-later
"""The errors of a switch of attachments, as an operator reads them."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from vsrtune.attach.plan.steps import Card
from vsrtune.attach.signals import Interrupted
from vsrtune.core.errors import VsrtuneError, WriteError
from vsrtune.core.exit_codes import ExitCode


class SwitchError(VsrtuneError):
    """A switch that failed. ``put_back`` tells whether the guests have their interfaces back,
    ``started`` are the guests that had to be started for that, ``asked`` are interfaces that
    guests may still release. ``interrupted`` tells whether a signal asked the command to end as
    well."""

    def __init__(
        self,
        error: VsrtuneError,
        left: list[VsrtuneError],
        started: tuple[str, ...] = (),
        asked: Collection[Card] = (),
        *,
        interrupted: bool = False,
    ) -> None:
        hint = error.hint
        what = f"{error.what}; everything is as it was before"
        if started:
            what += f", but {' '.join(started)} was ended by libvirt and has been started anew"
            hint = "the log of libvirtd says why it could not take the guest over when it came back"
        if left:
            more = "; ".join(dict.fromkeys(str(e) for e in left))
            what = f"{error.what}; not everything could be put back: {more}"
            hint = "`vsrtune attach --recover` tries again"
        if asked:
            guests = " ".join(dict.fromkeys(card.guest for card in asked))
            macs = " ".join(card.mac for card in asked)
            what += "; " if left else ", but "
            what += f"{guests} may still release {macs}, at the next reset at the latest"
            hint = (
                f"shut {guests} down and start it: a reboot does not withdraw the request; "
                "see: virsh domiflist; the daemon, or `vsrtune attach --recover`, plugs in again "
                "what it releases"
            )
        super().__init__(what, where=error.where, hint=hint, lasting=error.lasting)
        self.put_back = not left
        self.interrupted = interrupted
        self.exit_code = Interrupted.exit_code if interrupted else ExitCode.FAILED


_HINTS = {
    errno.EOPNOTSUPP: "the module napi_macvlan is not loaded: `vsrtune doctor` says why",
    errno.EBUSY: "macvtap, macvlan or a bridge still holds the lower device: ip -d link",
    errno.ENETDOWN: "the device below is down: ip -d link tells which; ip link set DEVICE up",
    errno.EPERM: "run as root",
}


@contextmanager
def translated() -> Iterator[None]:
    """Turn the OSError of a link request into an error for people."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        raise WriteError(
            f"the kernel refused: {error.strerror or os.strerror(code)}",
            where="network device",
            hint=_HINTS.get(code, "see: dmesg"),
        ) from error
