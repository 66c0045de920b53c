# SPDX-License-Identifier: GPL-2.0-or-later
"""The router tester: makes a load, and accounts for its frames."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from vsrtune.bench.children import ANSWER_SECONDS, AgentProcess
from vsrtune.bench.cleanup import cleaners
from vsrtune.bench.cleanup.cleaners import BenchLedger
from vsrtune.bench.measure import counters
from vsrtune.bench.measure.counters import Counts, account
from vsrtune.bench.spec.model import Latency, Load, Place, Spec, Trial
from vsrtune.bench.spec.streams import Stream, counted, streams
from vsrtune.bench.traffic.pktgen import Sent
from vsrtune.bench.traffic.probe import latency
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import LiveRoot, boot_id
from vsrtune.model.snapshot import Snapshot

# Frames still queued after the last one was sent get this long to arrive.
DRAIN_SECONDS = 3.0
# Longer than a thread with a budget of class deadline stands still (a period of 200 ms).
DRAIN_STEP = 0.25
PROBES_LEAST = 50.0
PROBES_MOST = 200.0
PROBES_SHARE = 0.02
PROBES_ALL = 20000
READY_PROBES = 5
# Probes for each of several guests, each of a flow of its own: with four guests, the hash of
# all flows leaves out a working one once in ten million times.
MEMBER_PROBES = 16


class Tester(Closing):
    """Generator, sink and counters of one spec. Use as a context manager.

    Entering it starts an agent for each end (on this host or over ssh), checks that
    the named devices may be used, and puts the sink's counters in place; leaving it
    removes everything. ``observe`` is called for the host's threads and devices
    before every trial, because a configuration may have replaced them.
    Raises VsrtuneError for a device that must not be used.
    """

    def __init__(self, spec: Spec, ledger: BenchLedger, observe: Callable[[], Snapshot]) -> None:
        self._spec = spec
        self._ledger = ledger
        self._observe = observe
        self._root = LiveRoot()
        # One for each namespace, because a namespace has one packet generator.
        self._agents: dict[Place, AgentProcess] = {}
        # Their answers to `open`: the boot id, and the devices with their settings.
        self._opened: dict[Place, dict[str, Any]] = {}
        self._entries: dict[Place, int] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop and remove everything, or leave it to the cleaner if an agent failed to."""
        for place, agent in self._agents.items():
            agent.close()
            if place in self._entries and agent.process.returncode == 0:
                self._ledger.done(self._entries[place])
        self._agents = {}
        self._entries = {}

    def devices(self) -> dict[str, dict[str, str]]:
        """The driver and settings of the two devices."""
        ends = (self._spec.left, self._spec.right)
        return {str(end): self._opened[end.place]["devices"][end.device] for end in ends}

    def ready(self, router: str, seconds: float = 1.0) -> bool:
        """Whether probe frames pass through the router, in both directions when it has
        both legs; waits up to ``seconds`` for them. With several guests, whether all flows
        pass and each guest that is plugged in takes some: flows of a guest that does not read
        yet may go to the others."""
        [found] = [r for r in self._spec.routers if r.name == router]
        several = len(found.members)
        flows = MEMBER_PROBES * several or 1
        count, enough = (flows, flows) if several else (READY_PROBES, 1)
        before = counters.queues(found, self._observe()) if several else {}
        end = time.monotonic() + seconds
        ways = [(found.forth, self._spec.left, self._spec.right)]
        if found.back is not None:
            ways.append((found.back, self._spec.right, self._spec.left))
        for leg, source, target in ways:
            run = random.getrandbits(32)
            self._agents[source.place].call(
                "probe", device=source.device, legs=[asdict(leg)], run=run,
                count=count, rate=100.0, flows=flows, timeout=count / 100.0 + ANSWER_SECONDS,
            )  # fmt: skip
            wait = max(0.1, end - time.monotonic())
            came = self._agents[target.place].call(
                "probed", device=target.device, run=run, count=enough, wait=wait,
                timeout=wait + ANSWER_SECONDS,
            )  # fmt: skip
            if len(came) < enough:
                return False
        after = counters.queues(found, self._observe()) if several else {}
        return counters.all_took(before, after, len(ways))

    def trial(self, load: Load, configuration_name: str) -> Trial:
        """Warm up, send the load, wait until no frame is under way, and account for it.

        Raises VsrtuneError when the generator or a counter failed.
        """
        for agent in self._agents.values():
            agent.call("bind")
        snapshot = self._observe()
        guests = [g for r in self._spec.routers for g in counters.guests_of(r, snapshot)]
        where = counters.places(self._root, snapshot, self._spec.routers)
        if self._spec.warmup > 0:
            warm = Load(load.pps, self._spec.warmup, size=load.size)
            self._send(streams(self._spec, warm), self._spec.warmup, None)
        before = self._settled(where)
        self._order(begin=True)
        known = counters.roles(snapshot, guests)
        used = counters.read_usage(self._root, known)
        began = time.monotonic()
        probes = self._probes(load) if load.latency else None
        (sent, times) = self._send(streams(self._spec, load), load.seconds, probes)
        spent = time.monotonic() - began
        took = max((stream.seconds for stream in sent), default=0.0)
        effort = counters.effort(used, counters.read_usage(self._root, known), spent - took)
        after = self._settled(where)
        (sampled, late) = self._order(begin=False)
        latency = self._latency(probes, times) if probes is not None else None
        flows = self._spec.traffic.flows
        trial = account(configuration_name, load, flows, sent, before, after, effort, latency)
        return replace(trial, sampled=sampled, reordered=late)

    def _order(self, begin: bool) -> tuple[int, int]:
        """Frames looked at since, and those of them that came out of order, if that is asked."""
        agents = self._agents.values() if self._spec.method.reordering else ()
        found = [two for agent in agents for two in agent.call("order", begin=begin)]
        return sum(count for count, _ in found), sum(late for _, late in found)

    def _start(self) -> None:
        left, right = self._spec.left, self._spec.right
        ends = (left, right)
        devices = {
            end.place: sorted({e.device for e in ends if e.place == end.place}) for end in ends
        }
        for (host, namespace), names in devices.items():
            agent = self._agents[host, namespace] = AgentProcess(host)
            if host is None:
                entry = cleaners.note_agent(self._ledger, agent.pid, namespace, names)
                self._entries[host, namespace] = entry
        for place, agent in self._agents.items():
            self._opened[place] = agent.call("open", namespace=place[1], names=devices[place])
        each = counted(self._spec)
        wanted: dict[Place, dict[str, list[dict[str, Any]]]] = {place: {} for place in devices}
        for end, here in ((left, each["back"]), (right, each["forth"])):
            wanted[end.place].setdefault(end.device, []).extend(asdict(one) for one in here)
        for place, agent in self._agents.items():
            agent.call("sink", counted=wanted[place])

    def _send(
        self, every: Sequence[Stream], seconds: float, probes: dict[str, Any] | None
    ) -> tuple[list[Sent], dict[int, int]]:
        """Run the generators of all places in parallel."""
        begun = []
        ends = (self._spec.right.place, self._spec.left.place)
        for place, agent in self._agents.items():
            here = [asdict(s) for s in every if ends[s.key.endswith("/forth")] == place]
            own = probes if place == self._spec.left.place else None
            if here or own:
                agent.begin("run", streams=here, seconds=seconds, probes=own)
                begun.append(agent)
        sent: list[Sent] = []
        times: dict[int, int] = {}
        failed: VsrtuneError | None = None
        for agent in begun:
            try:
                answer = agent.finish(seconds + ANSWER_SECONDS)
                sent += [Sent(**stream) for stream in answer["sent"]]
                times.update((number, stamp) for number, stamp in answer["probes"])
            except VsrtuneError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return sent, times

    def _counts(self, where: counters.Places) -> Counts:
        lost = Counter(counters.read_losses(self._root, where))
        frames = Counter[tuple[str, int | None]]()
        boots = {boot_id(self._root)}
        for place, agent in self._agents.items():
            answer = agent.call("counters")
            lost["refused"] += answer["refused"]
            # Count the backlogs of every kernel once, however many namespaces take part.
            if self._opened[place]["boot"] not in boots:
                boots.add(self._opened[place]["boot"])
                lost["backlog"] += answer["backlog"]
            for key, flow, count in answer["counted"]:
                frames[key, flow] += count
        return Counts(frames, lost)

    def _settled(self, where: counters.Places) -> Counts:
        """The counters once no frame is under way, or after DRAIN_SECONDS."""
        end = time.monotonic() + DRAIN_SECONDS
        last = self._counts(where)
        while time.monotonic() < end:
            time.sleep(DRAIN_STEP)
            now = self._counts(where)
            if now == last:
                return now
            last = now
        return last

    def _probes(self, load: Load) -> dict[str, Any]:
        (left, right) = (self._spec.left, self._spec.right)
        if self._opened[left.place]["boot"] != self._opened[right.place]["boot"]:
            what = "one-way latency needs both ends on one machine, for one clock"
            raise VsrtuneError(what, hint="leave out `latency`")
        legs = [asdict(r.forth) for r in self._spec.routers if load.pps.get(r.name, 0.0) > 0]
        rate = min(PROBES_MOST, max(PROBES_LEAST, PROBES_SHARE * load.total))
        rate = min(rate, PROBES_ALL / max(load.seconds, 1.0))
        # Those that were not forwarded before belong to no run.
        return {
            "device": left.device,
            "legs": legs,
            "run": random.getrandbits(32),
            "rate": rate,
            "count": max(1, int(rate * load.seconds)),
        }

    def _latency(self, probes: dict[str, Any], sent: dict[int, int]) -> Latency | None:
        right = self._spec.right
        came = self._agents[right.place].call(
            "probed", device=right.device, run=probes["run"], count=0, wait=0.0
        )
        return latency(sent, dict(came))
