# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs a program in a guest, through libvirt and the QEMU guest agent.

What the agent answers proves nothing: whoever is root in the guest may have written it. So answers
are limited in size and time, no more than a program's status, its output and interfaces' names is
taken from them, and callers check those.

- libvirt's virDomainQemuAgentCommand passes a command on and returns the answer, or fails after
  the given seconds (libvirt-qemu.h); before each command it synchronises with the agent, for which
  it waits five seconds (VIR_DOMAIN_QEMU_AGENT_COMMAND_DEFAULT, qemu_agent.c). The call has a
  connection of its own and a thread of its own (``Connection``), so an agent that hangs keeps
  nobody else waiting.
- QEMU's guest-exec starts a program, which the guest looks for in the agent's PATH, with
  base64-encoded standard input; guest-exec-status tells, once it has ended, its status and the
  base64-encoded output (qga/qapi-schema.json, since 2.5). An agent's configuration can block
  commands (block-rpcs, qemu-ga(8)), as some distributions do by default; Debian 12 and 13 do not.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from typing import Any

from vsrtune.core.errors import Lasting, VsrtuneError, WriteError
from vsrtune.core.text import printable
from vsrtune.core.untrusted import json_value
from vsrtune.host.libvirt import Connection, library

# Seconds: for an answer, until a program has ended, and between the first two questions whether it
# has and later ones.
ANSWER, PROGRAM, SOON, LATER = 5, 20.0, 0.05, 0.4
# The rules of 99 routers, listed and encoded, take a third of this.
MOST = 1 << 20
# Of a program's complaint.
LINE = 200


class GuestAgent:
    """The agent of the libvirt guest with that UUID, called ``name`` in messages. Each method
    raises VsrtuneError when the agent does not do what it should."""

    def __init__(self, connection: Connection, uuid: str, name: str) -> None:
        self._connection = connection
        self._uuid = uuid
        self._name = name

    def interfaces(self) -> dict[str, str]:
        """What the guest calls its interfaces, by MAC."""
        found = {}
        for one in self._list(self._ask("guest-network-get-interfaces")):
            mac, name = self._field(one, "hardware-address", ""), self._field(one, "name", "")
            found[mac.lower()] = name
        return found

    def run(self, words: Sequence[str], text: str = "") -> str:
        """The output of a program that ended with status 0. ``text`` is its standard input."""
        program, *rest = words
        given = {"path": program, "arg": rest, "capture-output": True}
        if text:
            given["input-data"] = base64.b64encode(text.encode()).decode()
        pid = self._field(self._ask("guest-exec", **given), "pid", 0)
        end, pause = time.monotonic() + PROGRAM, SOON
        while True:
            status = self._ask("guest-exec-status", pid=pid)
            if self._field(status, "exited", False):
                break
            if time.monotonic() > end:
                raise self._error(f"{program} has not ended in {PROGRAM:g} s")
            time.sleep(pause)
            pause = min(LATER, 2 * pause)
        code = self._field(status, "exitcode", -1)
        if code != 0:
            said = self._decoded(status, "err-data") or self._decoded(status, "out-data")
            raise self._error(f"{program} failed ({code}): {said.strip()[:LINE]}")
        return self._decoded(status, "out-data")

    def _ask(self, command: str, **arguments: Any) -> Any:
        question = json.dumps({"execute": command, "arguments": arguments})
        libvirt = library()

        def ask(connection: Any) -> str:
            import libvirt_qemu

            domain = connection.lookupByUUIDString(self._uuid)
            answer: str = libvirt_qemu.qemuAgentCommand(domain, question, ANSWER, 0)
            return answer

        try:
            return json_value(self._connection.ask(ask), MOST)["return"]
        except libvirt.libvirtError as error:
            raise self._error(str(error)[:LINE]) from error
        except (ValueError, LookupError, TypeError) as error:
            raise self._strange() from error

    def _field(self, found: Any, key: str, default: Any) -> Any:
        """A field that may be missing, of the type of ``default``."""
        value = found.get(key, default) if isinstance(found, dict) else None
        if type(value) is not type(default):
            raise self._strange()
        return value

    def _list(self, found: Any) -> list[Any]:
        if not isinstance(found, list):
            raise self._strange()
        return found

    def _decoded(self, status: Any, key: str) -> str:
        try:
            return base64.b64decode(self._field(status, key, "")).decode("utf-8", "replace")
        except ValueError as error:
            raise self._strange() from error

    def _strange(self) -> VsrtuneError:
        return self._error("it does not answer as a guest agent does")

    def _error(self, what: str) -> VsrtuneError:
        return WriteError(
            f"the guest agent: {printable(what)}", where=self._name, lasting=Lasting.TRANSIENT
        )
