"""Which guests a patrol looks at: what comes, goes or grows without an event, and all others
in their turn."""

from __future__ import annotations

from vsrtune.host.filesystem import HostRoot
from vsrtune.known_guests import Known
from vsrtune.look_pass import thread_links
from vsrtune.process_table import ProcessTable
from vsrtune.trust import Judge

# Hosts with no more guests are looked at as a whole.
FEW = 16
# A host with more is looked at as a whole once in so many patrols, and each of its guests
# once in between.
ROUND = 6


class Rounds:
    """Remembers where the last patrol ended."""

    def __init__(self) -> None:
        self._left = ROUND
        self._next = -1

    def done(self, _known: Known) -> None:
        """Everything was looked at."""
        self._left = ROUND

    def due(
        self, known: Known, root: HostRoot, table: ProcessTable, judge: Judge
    ) -> frozenset[int] | None:
        """pids of the QEMUs to look at; None when it is time for everything. New ones,
        those that are gone, and those with another number of threads or of kernel threads
        that work for them are always among them."""
        self._left -= 1
        if len(known.held) <= FEW or self._left <= 0:
            return None
        try:
            processes = table.scan(root, judge)
        except OSError:
            return None
        there = {p.pid: p.start_time for p in processes.qemus}
        found = set(there) ^ set(known.held)
        for pid, held in known.held.items():
            if pid in found:
                continue
            if there[pid] != held.process.start_time:
                return None
            if thread_links(root, pid) != held.threads:
                found.add(pid)
        if processes.workers != known.processes.workers:
            found |= _owners(known, processes.workers)
        if processes.napi != known.processes.napi:
            return None
        found.update(self._turn(known))
        return frozenset(found)

    def _turn(self, known: Known) -> list[int]:
        """The next guests in pid order, a share of all."""
        share = -(-len(known.held) // (ROUND - 1))
        after = [pid for pid in known.held if pid > self._next]
        turn = (after or list(known.held))[:share]
        self._next = turn[-1] if turn else -1
        return turn


def _owners(known: Known, workers: dict[int, tuple[int, ...]]) -> set[int]:
    """pids of the QEMUs whose vhost kernel threads are others now."""
    before = known.processes.workers
    owners = {o for o in before.keys() | workers.keys() if before.get(o) != workers.get(o)}
    return {
        pid
        for pid, held in known.held.items()
        if held.guest is not None and any(t.key.tid in owners for t in held.guest.threads)
    }
