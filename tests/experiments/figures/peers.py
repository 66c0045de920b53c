"""What else an operator could use: libvirt's pins, TuneD's profile, and vsrtune."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.data import Data
from experiments.judge import Place, above, causes, compared, more, stable
from experiments.plan import (  # fmt: skip
    BASE,
    BOOKWORM,
    NATIVE,
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

FACTORS = (2.0, 4.0)
RUN = "overload"
PEAK = "untuned"
OWN = "own-peak"
UNTUNED, LIBVIRT, TUNED, OURS = "untuned", "libvirt pins", "TuneD virtual-host", "vsrtune"
# The lab's own command: starts TuneD, and takes back what TuneD itself leaves.
_TUNED_APPLY = ["/run/lab/bin/lab-tuned", "start", "virtual-host"]
_TUNED_REVERT = ["/run/lab/bin/lab-tuned", "stop"]


def configurations() -> tuple[dict[str, Any], ...]:
    return (
        untuned(UNTUNED),
        libvirt_pins(LIBVIRT, "1"),
        {"name": TUNED, "tuning": "command", "apply": _TUNED_APPLY, "revert": _TUNED_REVERT},
        policy(OURS, shipped("router")),
    )


def _bound(native: str) -> Any:
    """What a frame costs on the one CPU of the router, against what it costs natively."""

    def why(data: Data) -> str:
        peak = data.peak(OWN)
        vcpu, vhost = (peak.cpu_per_million(role) for role in ("vcpu", "vhost"))
        if not vcpu or vhost is None:
            return "No CPU time was seen."
        each = 1e6 / data.peak(native).pps
        return (
            f"At its peak a frame takes {vcpu:.1f} microseconds of the vcpu thread and {vhost:.1f} "
            f"of the vhost workers, on the one CPU that they share; natively it takes "
            f"{each:.1f} of a CPU, generator and sink included. If vhost cost nothing at all, the "
            f"vcpu thread alone would make {each / vcpu:.2f} of native forwarding on that CPU "
            "(where the vcpu's time goes: [the profile](levers.md))."
        )

    return why


def _plots(figure: str, data: Data) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    names = [str(c["name"]) for c in configurations()]
    for factor, load in zip(FACTORS, data.loads(RUN), strict=True):
        columns = {name: [t.pps for t in data.trials(RUN, name, load)] for name in names}
        if data.has(NATIVE):
            columns["native"] = [t.pps for t in data.at(NATIVE, None, load).trials]
        title = f"{factor:g} times the untuned peak: {offered(load)}"
        name = f"{figure}-{factor:g}x"
        found[name] = plots.scatter(list(columns), list(columns.values()), title, "forwarded pps")
    return found


def _runs(boot: Boot, figure: str) -> tuple[Run, ...]:
    peak = f"{figure}/{PEAK}"
    return (
        Run(
            PEAK, boot, (untuned(UNTUNED),),
            rates=(4000, 8000, 12000, 16000, 24000, 32000), pairs=5, seed=21,
        ),
        Run(
            RUN, boot, configurations(), scaled=(peak, FACTORS), pairs=11, seed=22, seconds=2.0
        ),
        Run(
            OWN, boot, (policy(OURS, shipped("router")),),
            scaled=(peak, (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)), pairs=5, seed=23,
        ),
        Run(
            NATIVE, boot, (untuned("native"),), scaled=(peak, (1.0, 2.0, 4.0, 6.0)),
            router=NATIVE, pairs=5, seed=24,
        ),
    )  # fmt: skip


def _figure(figure: str, boot: Boot, title: str) -> Figure:
    return Figure(
        id=figure,
        title=title,
        paper="",
        ours="Untuned; libvirt's vcpupin and emulatorpin to CPU 1; TuneD's profile virtual-host; "
        "vsrtune with the policy it ships for hosts like this. Offered: twice and four times "
        "what the untuned router forwards at its best in the same lab.",
        runs=_runs(boot, figure),
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
                stable(OWN, None),
            ),
            Claim(
                "At least 0.8 of native forwarding.",
                compared(above(0.8), [(Place(OWN), Place(f"{figure}/{NATIVE}"))]),
                _bound(f"{figure}/{NATIVE}"),
            ),
        ),
        plots=partial(_plots, figure),
        native=f"{figure}/{NATIVE}",
    )


FIGURE = _figure("peers", BASE, "The peers, kernel 6.12 (Debian 13)")
BOOKWORM_FIGURE = _figure("peers-6.1", BOOKWORM, "The peers, kernel 6.1 (Debian 12)")
