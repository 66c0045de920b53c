"""Where the time of the routers' CPU goes, by perf."""

from __future__ import annotations

from experiments.data import Data
from experiments.plan import BASE, Figure, Run, policy, shipped
from experiments.text import table

_RUN = "profile"
# G: without it, what is met in the guest is left out.
_RECORD = (
    "perf record -q -e cpu-clock:HGuk -F 997 -C 1 -g -o /tmp/perf.data >/dev/null 2>&1 & "
    "echo $! >/run/perf.pid"
)
# Percentages of all samples, one symbol with its callees on a line.
_REPORT = (
    "kill -INT $(cat /run/perf.pid); while [ -e /proc/$(cat /run/perf.pid) ]; do sleep 0.1; done; "
    "mkdir -p /mnt/share/raw/levers-profile; cd /mnt/share/raw/levers-profile; "
    "perf report -i /tmp/perf.data --no-children -g none --sort comm -t '|' --stdio "
    "2>/dev/null >profile.threads.txt; "
    "perf report -i /tmp/perf.data --children -g none --sort comm,sym -t '|' --stdio "
    "2>/dev/null >profile.functions.txt"
)
# The others prepare and watch the measurement.
_ROUTERS = ("CPU ", "vhost-", "ksoftirqd")
# What tells the parts of a thread's work apart, callees included.
_PARTS = {
    "vhost": (
        ("handle_rx", "from the macvtap ring into the guest"),
        ("handle_tx", "from the guest to the macvtap device"),
        ("tap_sendmsg", "of that, through macvtap and the lower device"),
        ("do_softirq", "of that, receiving at the sink, which is on this machine too"),
    ),
    "CPU 0/KVM": (
        ("kvm_arch_vcpu_ioctl_run", "seen outside of the guest: exits and their handling"),
    ),
}


def _shares(text: str) -> list[list[str]]:
    rows = [line.split("|") for line in text.splitlines() if line and not line.startswith("#")]
    return [[cell.strip() for cell in row] for row in rows if len(row) > 1]


def _percent(cell: str) -> float:
    return float(cell.rstrip("%"))


def _tables(data: Data) -> list[str]:
    threads = {
        row[1]: _percent(row[0])
        for row in _shares(data.text(_RUN, "threads"))
        if row[1].startswith(_ROUTERS)
    }
    busy = sum(threads.values())
    functions = _shares(data.text(_RUN, "functions"))
    rows = []
    for name, share in sorted(threads.items(), key=lambda item: -item[1]):
        rows.append((name, f"{100 * share / busy:.0f} %"))
        for role, parts in _PARTS.items():
            if not name.startswith(role):
                continue
            for function, says in parts:
                found = max(
                    (
                        _percent(row[0])
                        for row in functions
                        if row[2] == name and _symbol(row[3]).startswith(function)
                    ),
                    default=0.0,
                )
                rows.append((f"- `{function}`: {says}", f"{100 * found / busy:.0f} %"))
    return table(("thread, part", "share of the router's time on CPU 1"), rows)


def _symbol(cell: str) -> str:
    return cell.removeprefix("[k]").removeprefix("[.]").strip()


FIGURE = Figure(
    id="levers-profile",
    title="Where the time goes",
    paper="",
    ours="Samples of CPU 1, which carries the router, under overload with the shipped policy: "
    "time in the guest is the vcpu thread's, without what is seen outside of the guest.",
    runs=(
        Run(
            _RUN,
            BASE,
            (policy("vsrtune", shipped("router")),),
            rates=(64000,),
            seconds=20,
            pairs=1,
            seed=33,
            before=(("sh", "-c", _RECORD),),
            after=(("sh", "-c", _REPORT),),
        ),
    ),
    claims=(),
    tables=_tables,
    native=None,
    plots=lambda _: {},
)
