"""What else an operator could use: libvirt's pins, TuneD's profile, and vsrtune; what is forwarded,
and how late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from experiments import judge
from experiments.data import Data
from experiments.judge import Judge, causes, more, p99, stable
from experiments.plan import (
    BASE,
    BOOKWORM,
    PAIRS,
    Boot,
    Claim,
    Figure,
    Run,
    libvirt_pins,
    policy,
    shipped,
    untuned,
)
from experiments.text import offered
from vsrtune.bench.report import plots

FACTORS = (0.5, 0.8, 1.0, 2.0, 4.0)
RUN = "overload"
PEAK = "untuned"
UNTUNED, LIBVIRT, TUNED, OURS = "untuned", "libvirt pins", "TuneD virtual-host", "vsrtune"
# The lab's own command: starts TuneD, and takes back what TuneD itself leaves.
_TUNED_APPLY = ["/run/lab/bin/lab-tuned", "start", "virtual-host"]
_TUNED_REVERT = ["/run/lab/bin/lab-tuned", "stop"]


def configurations(ours: str = "") -> tuple[dict[str, Any], ...]:
    """Each with its settings; ``ours`` is the policy, by default the one that is shipped."""
    return (
        untuned(UNTUNED),
        libvirt_pins(LIBVIRT, "1"),
        {"name": TUNED, "tuning": "command", "apply": _TUNED_APPLY, "revert": _TUNED_REVERT},
        policy(OURS, ours or shipped("router")),
    )


def load_of(data: Data, factor: float) -> float:
    """The load of so many times the untuned peak."""
    return data.scaled(RUN, FACTORS, factor)


def sooner(factor: float, most: float) -> Judge:
    """P99 of our delay is at most so much of the untuned router's, at a load."""
    return judge.sooner(RUN, OURS, UNTUNED, partial(load_of, factor=factor), most)


def _plots(figure: str, data: Data) -> Mapping[str, Any]:
    names = [str(c["name"]) for c in configurations()]
    load = load_of(data, FACTORS[-1])
    columns = [[t.pps for t in data.trials(RUN, name, load)] for name in names]
    title = f"{FACTORS[-1]:g} times the untuned peak: {offered(load)}"
    return {
        f"{figure}-{FACTORS[-1]:g}x": plots.scatter(names, columns, title, "forwarded pps"),
        f"{figure}-delay": delays(data, RUN, names, FACTORS),
    }


def delays(data: Data, run: str, names: Sequence[str], factors: Sequence[float]) -> plots.Figure:
    """Rate and delay at once: a line for each configuration, a dot for each load."""
    note = "a dot is a load, in times of the untuned peak; median of the trials; probes that came"
    figure, axes = plots.figure_of("Rate and delay", "P99 of one-way delay, ms", note)
    for number, name in enumerate(names):
        dots = []
        for factor in factors:
            trials = data.trials(run, name, data.scaled(run, factors, factor))
            late = [1000 * seconds for t in trials if (seconds := p99(t)) is not None]
            if late:
                dots.append((median(t.pps for t in trials), median(late), f"{factor:g}x"))
        x, y, words = zip(*dots, strict=True) if dots else ((), (), ())
        colour = plots.COLOURS[number]
        axes.plot(x, y, "o-", color=colour, label=name, markersize=5)
        for at, up, word in zip(x, y, words, strict=True):
            axes.annotate(
                word, (at, up), (4, 4), textcoords="offset points", fontsize=7, color=colour
            )
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("forwarded, frames per second")
    axes.legend(**plots.LEGEND)
    return figure


def _runs(boot: Boot, figure: str, ours: str, pairs: int, seconds: float) -> tuple[Run, ...]:
    return (
        Run(
            PEAK, boot, (untuned(UNTUNED),),
            rates=(4000, 8000, 12000, 16000, 24000, 32000), pairs=5, seed=21,
        ),
        Run(
            RUN, boot, configurations(ours), scaled=(f"{figure}/{PEAK}", FACTORS), latency=True,
            seed=22, seconds=seconds, pairs=pairs,
        ),
    )  # fmt: skip


def _figure(
    figure: str,
    boot: Boot,
    title: str,
    beside: str = "",
    ours: str = "",
    pairs: int = PAIRS,
    seconds: float = 5.5,
) -> Figure:
    return Figure(
        id=figure,
        title=title,
        paper="",
        ours="Untuned; libvirt's vcpupin and emulatorpin to CPU 1; TuneD's profile virtual-host; "
        "vsrtune with the policy it ships for hosts like this. Offered: times of what the untuned "
        "router forwards at its best in the same lab. Probes beside the load give the delay."
        + beside,
        runs=_runs(boot, figure, ours, pairs, seconds),
        claims=(
            Claim(
                "vsrtune forwards at least 3 times as much as the untuned router in overload.",
                more(RUN, OURS, UNTUNED, 3.0),
                causes(RUN, UNTUNED, OURS),
            ),
            Claim(
                "At least 3 times as much as with libvirt's pins.",
                more(RUN, OURS, LIBVIRT, 3.0),
                causes(RUN, LIBVIRT),
            ),
            Claim(
                "More than with TuneD's profile.",
                more(RUN, OURS, TUNED),
                causes(RUN, TUNED),
            ),
            Claim(
                "At four times the untuned peak it is within 5 % of its own peak.",
                stable(RUN, OURS),
            ),
            *(
                Claim(
                    f"At {factor:g} times the untuned peak, P99 of the delay is at most 0.1 of the "
                    "untuned router's.",
                    sooner(factor, 0.1),
                )
                for factor in FACTORS
            ),
        ),
        plots=partial(_plots, figure),
    )


FIGURE = _figure("peers", BASE, "The peers, kernel 6.12 (Debian 13)")
BOOKWORM_FIGURE = _figure("peers-6.1", BOOKWORM, "The peers, kernel 6.1 (Debian 12)")
# Fewer and shorter trials: an emulated NIC costs the generator's CPU an exit for each write.
NIC_FIGURE = _figure(
    "peers-e1000e",
    Boot("e1000e", nic="e1000e"),
    "The peers on e1000e, kernel 6.12 (Debian 13)",
    " Here p0 and p1 are e1000e with MSI-X, so frames come by interrupts, which the kernel places, and not "
    "from the generator's own CPU. Untuned they come on both CPUs; the policy keeps them on CPU 0 "
    "(cpus: {irq: 0}, irq: {set: true}).",
    'guest: "vr*"\ncpus: {irq: 0}\nirq: {set: true}\n',
    pairs=7,
    seconds=3.5,
)
FIGURES = (FIGURE, BOOKWORM_FIGURE, NIC_FIGURE)
