"""Real router software under overload: whether FRR's sessions last, and the router still answers.

The rules stand before any measurement. A session is kept in a trial when the peer saw it up on every
tick, from the first under load until all was back, and counted no loss of it. A trial that began before all
sessions were up and all routes there decides nothing of sessions. Between trials all have been up for
BGP's hold time, so that what falls late falls in the trial that doomed it. A session is kept at a load when it is
in every round. Three rounds are too few for an interval: more, or less, means in each of them.

On the kernel module a full ring has places for control frames alone. There the router's interfaces are
plugged in anew, and sessions begin anew, before each change between the module and macvtap; trials wait
for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from experiments.data import Data
from experiments.figures import peers
from experiments.judge import Judge, Place, kept, made, rounds, top
from experiments.plan import Boot, Claim, Figure, Run, Verdict, policy, shipped, untuned
from experiments.text import offered, percent, ranged, table
from vsrtune.bench.traffic.probe import rank

TIMES = (1.0, 2.0, 4.0)
RATES = (1000, 2000, 4000)
ROUNDS, SECONDS = 3, 15.0
RUN = "sessions"
# Seconds between two looks at the sessions.
TICK = 0.5
_UP, _DOWN = "#0072B2", "#D55E00"
_PEAK = "peak"
NAMES = {"bgp": "BGP", "ospf": "OSPF", "bfd": "BFD"}
OTHERS = (peers.UNTUNED, peers.LIBVIRT, peers.TUNED)
MODULE = "vsrtune, napi_macvtap"
CONFIGURATIONS = (*OTHERS, peers.OURS, MODULE)
# What one trial's record says.
Control = Mapping[str, Any]


def watched(data: Data, load: float, *configurations: str) -> list[tuple[Control, ...]]:
    """What the peers saw in these configurations at a load, by round. Raises as ``rounds``."""
    places = [Place(RUN, name, load) for name in configurations]
    every = [tuple(data.control(RUN, t) for t in each) for each in rounds(data, *places)]
    began = "all sessions were up before the load"
    return kept(
        every, lambda each: len(_began(each)) == len(each), places, began, made(data, places)
    )


def lasted(one: Control, session: str) -> bool:
    """Whether the session was kept."""
    return "0" not in one[session] and not one["drops"].get(session)


def up(one: Control, session: str) -> float:
    """The share of the load's time in which the session was up."""
    return one[session][: one["loaded"]].count("1") / one["loaded"]


def answered(one: Control, what: str) -> float:
    """The share of the requests that were answered."""
    return sum(took is not None for took in one[what]) / max(len(one[what]), 1)


def _load(data: Data, times: float) -> float:
    return data.scaled(RUN, TIMES, times)


def _keeps(session: str, times: float, configurations: Sequence[str]) -> Judge:
    """Whether each of these keeps a session at a load."""

    def judge(data: Data) -> Verdict:
        load = _load(data, times)
        found = {name: [o for (o,) in watched(data, load, name)] for name in configurations}
        good = {name: sum(lasted(o, session) for o in each) for name, each in found.items()}
        text = ", ".join(f"{name}: in {good[name]} of {len(found[name])}" for name in found)
        whole = all(good[name] == len(found[name]) for name in found)
        return Verdict("agrees" if whole else "differs", f"{text} rounds at {offered(load)}")

    return judge


def _more(
    what: str,
    value: Callable[[Control], float],
    others: Sequence[str],
    ours: str = peers.OURS,
) -> Judge:
    """Whether a tuned router has more of something than each other, in every round, at the highest
    load; less in every round is the opposite."""

    def judge(data: Data) -> Verdict:
        answers, texts = [], []
        for other in others:
            pairs = [(value(a), value(b)) for a, b in watched(data, top(data, RUN), ours, other)]
            mine, theirs = ([100 * v for v in side] for side in zip(*pairs, strict=True))
            answers.append(
                "agrees" if all(a > b for a, b in pairs)
                else "differs" if all(a < b for a, b in pairs)
                else "open"
            )  # fmt: skip
            texts.append(f"{what} {ranged(mine)} %, {other} {ranged(theirs)} %")
        answer = "agrees" if set(answers) == {"agrees"} else "open"
        return Verdict("differs" if "differs" in answers else answer, "; ".join(texts))

    return judge


def _claims() -> tuple[Claim, ...]:
    most = f"{TIMES[-1]:g} times"
    return (
        Claim(
            "At the untuned peak, each keeps BGP and OSPF.",
            _both([_keeps(name, TIMES[0], CONFIGURATIONS) for name in ("bgp", "ospf")]),
        ),
        *(
            Claim(f"At {times:g} times it, {ours} keeps {NAMES[name]}.", _keeps(name, times, [ours]))
            for times in TIMES[1:]
            for ours in (peers.OURS, MODULE)
            for name in NAMES
        ),
        Claim(
            f"At {most} it, BGP is up for more of the time than with each other.",
            _more("vsrtune", partial(up, session="bgp"), OTHERS),
        ),
        Claim(
            f"At {most} it, BGP is up for more of the time on the module than on macvtap.",
            _more(MODULE, partial(up, session="bgp"), [peers.OURS], MODULE),
        ),
        Claim(
            f"At {most} it, more requests of SNMP are answered than with each other.",
            _more("vsrtune", partial(answered, what="snmp"), OTHERS),
        ),
    )  # fmt: skip


def _both(judges: Sequence[Judge]) -> Judge:
    def judge(data: Data) -> Verdict:
        found = [one(data) for one in judges]
        answer = "agrees" if all(v.answer == "agrees" for v in found) else "differs"
        return Verdict(answer, "; ".join(v.text for v in found))

    return judge


def told(data: Data, name: str, load: float) -> str:
    """Of a configuration at a load: how often BGP was kept, and how long it was up."""
    if name not in _made(data):
        return "not measured"
    seen = _began(_seen(data, name, load))
    return f"{_kept(seen, 'bgp')}, {percent(up(o, 'bgp') for o in seen)} %"


def _made(data: Data) -> list[str]:
    """The configurations of a run."""
    return [str(c.name) for c in data.outcome(RUN).configurations]


def _seen(data: Data, name: str, load: float) -> list[Control]:
    """What the peers saw of a configuration at a load, by round."""
    return [data.control(RUN, trial) for trial in data.trials(RUN, name, load)]


def _began(seen: Sequence[Control]) -> list[Control]:
    """Those that decide something of sessions."""
    return [one for one in seen if one["before"]]


def _kept(seen: Sequence[Control], session: str) -> str:
    return f"{sum(lasted(o, session) for o in seen)} of {len(seen)}"


def summary(data: Data) -> list[str]:
    """The table of README.md, of the untuned router and both of ours."""
    names = (peers.UNTUNED, peers.OURS, MODULE)
    heads = ["offered"]
    for name in names:
        heads += [f"{name}: forwarded", "BGP kept", "OSPF kept"]
    rows = []
    for times in TIMES:
        load = _load(data, times)
        row = [f"{times:g}x, {load:,.0f} pps"]
        for name in names:
            seen = _seen(data, name, load)
            kept = [_kept(_began(seen), session) for session in ("bgp", "ospf")]
            row += [f"{data.at(RUN, name, load).pps:,.0f}", *kept]
        rows.append(row)
    return table(heads, rows)


def _tables(data: Data) -> list[str]:
    heads = [
        "load",
        "configuration",
        "forwarded",
        *(f"{n} kept" for n in NAMES.values()),
        "BGP up %",
    ]
    heads += ["all back after, s", "SNMP ms, P50", "lost %", "SSH ms, P50", "lost %"]
    rows = []
    for times in TIMES:
        load = _load(data, times)
        for name in _made(data):
            trials = data.trials(RUN, name, load)
            seen = _seen(data, name, load)
            cells = [ranged([t.pps for t in trials])]
            began = _began(seen)
            cells += [_kept(began, s) for s in NAMES]
            cells += [percent(up(o, "bgp") for o in began), _back(began)]
            cells += [*_delays(seen, "snmp"), *_delays(seen, "ssh")]
            rows.append([f"{times:g}x, {load:,.0f}", name, *cells])
    head = (
        f"Median (lowest..highest) of {len(seen)} rounds. {data.routes(RUN):,} routes. A trial that began before all "
        "sessions were up is in no column of sessions. The delays are of all requests of the rounds; one "
        "without an answer counts as slower than any."
    )
    trials = data.outcome(RUN).trials
    tired = sum(not data.control(RUN, trial).get("rested") for trial in trials)
    if tired:
        head += (
            f" After {tired} of {len(trials)} trials not all sessions were up for a hold time: one that the "
            "trial doomed may count as lost in the next."
        )
    return [head, "", *table(heads, rows)]


def _back(seen: Sequence[Control]) -> str:
    """After how many seconds all was back, where something was lost."""
    lost = [o for o in seen if not all(lasted(o, s) for s in NAMES)]
    if not lost:
        return "-"
    never = sum(o["converged"] is None for o in lost)
    found = ranged([o["converged"] for o in lost if o["converged"] is not None], 1)
    return f"{found}{f', {never} not in time' if never else ''}"


def _delays(seen: Sequence[Control], what: str) -> list[str]:
    took = [t for o in seen for t in o[what]]
    middle = rank(sorted(inf if t is None else t for t in took), 0.5)
    lost = took.count(None) / max(len(took), 1)
    return [f"{middle:,.0f}" if middle not in (None, inf) else "none", f"{100 * lost:.0f}"]


def _plots(figure: str, title: str, data: Data) -> Mapping[str, Any]:
    """A strip for each trial: when the peer saw BGP's session up, and when not."""
    from matplotlib.figure import Figure as Drawing

    names = _made(data)
    drawn = Drawing(figsize=(8.0, 4.6), layout="constrained")
    drawn.suptitle(title, fontsize=11)
    for axes, times in zip(drawn.subplots(1, len(TIMES), sharey=True), TIMES, strict=True):
        load = _load(data, times)
        axes.set_title(f"{times:g}x, {offered(load)}", fontsize=9)
        for row, name in enumerate(names):
            trials = data.trials(RUN, name, load)
            for number, trial in enumerate(trials):
                seen = data.control(RUN, trial)
                for state, colour in (("1", _UP), ("0", _DOWN)):
                    spans = [(TICK * n, TICK) for n, s in enumerate(seen["bgp"]) if s == state]
                    place = row + 0.8 * number / len(trials) - 0.4
                    axes.broken_barh(spans, (place, 0.7 / len(trials)), facecolors=colour)
        axes.axvline(max(t.seconds for t in trials), color="#000000", linewidth=0.9, linestyle=":")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xlabel("seconds", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
    drawn.axes[0].invert_yaxis()
    drawn.supxlabel(
        "a strip is a trial; blue: BGP established; orange: lost; dotted: the load ends",
        fontsize=7.5,
    )
    return {figure: drawn}


def _waits(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with a wait for all sessions at the end of its beginning."""
    words = ["sh", "-ec", '"$@"\n/run/lab/bin/lab-peers wait vr1', "sh"]
    begin = [*words, *configuration.get("apply", ["true"])]
    return {"revert": ["true"], **configuration, "apply": begin}


def _configurations() -> tuple[dict[str, Any], ...]:
    module = policy(MODULE, shipped("router"), attachment="napi-macvtap")
    return tuple(map(_waits, (*peers.configurations(), module)))


def _figure(figure: str, release: str, title: str) -> Figure:
    boot = Boot(f"frr-{release}", release, frr=True)
    peak = f"{figure}/{_PEAK}"
    return Figure(
        id=figure,
        title=title,
        paper="",
        ours="One router of one vcpu on two CPUs: Debian's kernel, FRR and nftables, whose 1,000 rules in "
        "the forward hook every frame is compared with. Its peer, FRR in the generator's namespace, "
        "shares the loaded way into the router: BGP (keepalive 3 s, hold 9 s), OSPF (hello 1 s, dead 4 s) and "
        "BFD (3 times 300 ms), which nothing depends on. The peer announces routes that the router "
        "announces to a peer behind it. SNMP (a request every 0.5 s) and SSH (the banner, every 2 s) "
        "are asked from where the load comes. Untuned, libvirt's pins, TuneD, the shipped policy on macvtap, and on the kernel module, whose full ring has places for control frames. A load is so many times the untuned peak. "
        "A session is kept if the peer saw it up on every tick and counted no loss of it; more means in "
        "each round, because three are too few for an interval.",
        runs=(
            Run(_PEAK, boot, (untuned(peers.UNTUNED),), rates=RATES, pairs=3, seed=61),
            Run(
                RUN, boot, _configurations(), scaled=(peak, TIMES), sessions=True,
                pairs=ROUNDS, seed=62, seconds=SECONDS,
                before=(("lab-peers", "start"),), after=(("lab-peers", "stop"),),
            ),
        ),
        claims=_claims(),
        plots=partial(_plots, figure, f"BGP under overload, {title.rpartition(', ')[2]}"),
        native=None,
        tables=_tables,
    )  # fmt: skip


FIGURE = _figure("frr", "trixie", "A router with FRR, kernel 6.12 (Debian 13)")
BOOKWORM_FIGURE = _figure("frr-6.1", "bookworm", "A router with FRR, kernel 6.1 (Debian 12)")
