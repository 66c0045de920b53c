"""The status page as HTML: one document with its style sheet in it, and no script."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from vsrtune.views.page_model import (
    DEGRADED,
    NO_POLICY,
    PENDING,
    REFUSED,
    TUNED,
    CpuView,
    GuestView,
    InterfaceView,
    PlanView,
    StatusPage,
    ThreadView,
)

# Seconds after which a browser asks again: the default interval of passes.
REFRESH = 10

_NOTHING = "\N{EN DASH}"
_TONES = {TUNED: "good", DEGRADED: "bad", PENDING: "warn", REFUSED: "bad", NO_POLICY: "soft"}


def policy() -> str:
    """The Content-Security-Policy of the page: it allows the page's style sheet by its hash,
    an empty icon, and nothing else."""
    digest = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def html(page: StatusPage) -> str:
    """The whole document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="refresh", content=str(REFRESH)),
        element("link", rel="icon", href="data:,"),
        element("title", f"vsrtune: {_summary(page)}"),
        element("style", Markup(STYLE)),
    )
    body = element("body", _top(page), element("main", *_sections(page)))
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _summary(page: StatusPage) -> str:
    totals = page.totals
    return f"{totals.tuned} of {totals.guests} guests tuned, {totals.drift} drift"


def _top(page: StatusPage) -> Markup:
    totals = page.totals
    counts = [
        (TUNED, totals.tuned),
        (DEGRADED, totals.degraded),
        (PENDING, totals.pending),
        (REFUSED, totals.refused),
        (NO_POLICY, totals.no_policy),
    ]
    items = [f"{totals.guests} guests", *(_count(n, name) for name, n in counts if n)]
    items.append(_count(totals.drift, "drift", "warn" if totals.drift else "good"))
    items.append(f"{page.policies} policies")
    rows = [
        element("h1", "vsrtune"),
        element("ul", *(element("li", item) for item in items), class_="counts"),
    ]
    if not page.reload_success:
        text = "The policy files are wrong: older policies stay in force. The journal says why."
        rows.append(element("p", text, class_="bad", role="alert"))
    if page.failure:
        text = f"The last pass failed, what is told here is older: {page.failure}"
        rows.append(element("p", text, class_="bad", role="alert"))
    if page.last_pass:
        when = datetime.fromtimestamp(page.last_pass, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        told = f"Seen at {when} on Linux {page.kernel}. vsrtune {page.vsrtune}. "
    else:
        told = f"No pass has ended yet. vsrtune {page.vsrtune}. "
    same = element("a", "The same as data", href="status.json", class_="mark")
    metrics = element("a", "Prometheus metrics", href="metrics", class_="mark")
    rows.append(element("p", told, same, ". ", metrics, ".", class_="soft"))
    return element("header", *rows)


def _count(number: int, name: str, tone: str = "") -> Markup:
    return element("span", f"{number} {name}", class_=tone or _TONES[name])


def _sections(page: StatusPage) -> list[Markup]:
    return [
        _section("host", "Host", _host(page)),
        _section("guests", "Guests", _guests(page)),
        _section("drift", "Drift", _drift(page)),
        _section("plan", "Plan", _plan(page.plan)),
        _section("problems", "Problems", _problems(page)) if page.problems else Markup(),
    ]


def _section(name: str, title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content, id=name)


def _left_out(number: int, what: str, where: str = "") -> Markup:
    if not number:
        return Markup()
    text = f"{_more(number, what)} not listed here{where}."
    return element("p", text, class_="soft")


def _more(number: int, what: str) -> str:
    return f"{number:,} more {what}{'' if number == 1 else 's'}"


# -- the host


def _host(page: StatusPage) -> Markup:
    nodes = len({cpu.node for cpu in page.cpus}) > 1
    cards = element("ul", *(_cpu(cpu, nodes) for cpu in page.cpus), class_="cpus")
    return join([cards, _left_out(page.cpus_left_out, "CPU")])


def _cpu(cpu: CpuView, nodes: bool) -> Markup:
    tags: list[str] = [element("strong", f"CPU {cpu.cpu}")]
    if not cpu.online:
        tags.append(element("span", "offline", class_="tag bad"))
    if cpu.interrupts or cpu.reserved:
        of = ", ".join(cpu.interrupts)
        text = f"interrupts: {of}" if of else "interrupt CPU by policy"
        tags.append(element("span", text, class_="tag mark"))
    if cpu.isolated:
        tags.append(element("span", "isolated", class_="tag soft"))
    if nodes:
        tags.append(element("span", f"node {cpu.node}", class_="soft"))
    rows = [
        element(
            "li",
            element("bdi", on.guest),
            f" {on.thread} ",
            element("span", on.sched + ("" if on.pinned else ", not pinned"), class_="soft"),
        )
        for on in cpu.threads
    ]
    if cpu.left_out:
        rows.append(element("li", f"and {_more(cpu.left_out, 'thread')}", class_="soft"))
    if not rows:
        rows.append(element("li", "no guest thread", class_="soft"))
    return element("li", *(x for tag in tags for x in (tag, " ")), element("ul", *rows))


# -- guests


def _guests(page: StatusPage) -> Markup:
    if not page.guests:
        return element("p", "No guest is running on this host.", class_="soft")
    where = "; `vsrtune show NAME` shows any, and those that need somebody come first"
    left = _left_out(page.guests_left_out, "guest", where)
    return join([*map(_guest, page.guests), left])


def _guest(guest: GuestView) -> Markup:
    counts = [
        f"{number} {name}"
        for name, number in (
            ("drift", guest.drift),
            ("held", guest.held),
            ("pending", guest.pending),
        )
        if number
    ]
    told = ", ".join([f"policy {guest.policy}" if guest.policy else "no policy", *counts])
    title = element(
        "h3",
        element("bdi", guest.name),
        " ",
        element("span", guest.state, class_=f"tag {_TONES[guest.state]}"),
        " ",
        element("small", told, class_="soft"),
    )
    heads = ("thread", "class", "CPUs", "last CPU", "load", "budget used", "tid")
    threads = table("", heads, map(_thread, guest.threads))
    columns = ("interface", "kind", "lower", "queues", "queue length", "ring drops")
    interfaces = table("", columns, map(_interface, guest.interfaces))
    problems = [element("p", text, class_="warn") for text in guest.problems]
    return element(
        "article",
        title,
        *problems,
        threads,
        _left_out(guest.threads_left_out, "thread"),
        interfaces,
        _left_out(guest.interfaces_left_out, "interface"),
    )


def _thread(thread: ThreadView) -> tuple[str, ...]:
    return (
        thread.thread,
        thread.sched + (" (deadline pending)" if thread.pending else ""),
        thread.cpus,
        str(thread.last_cpu),
        _percent(thread.load),
        _percent(thread.used),
        str(thread.tid),
    )


def _interface(interface: InterfaceView) -> tuple[str, ...]:
    return (
        interface.device,
        interface.kind,
        interface.lower or _NOTHING,
        str(interface.queues),
        str(interface.queue_length),
        str(interface.ring_drops),
    )


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{100 * share:.0f} %"


# -- plan and drift


def _plan(plan: PlanView) -> Markup:
    parts: list[Markup] = []
    if not plan.changes and not plan.refusals:
        parts.append(element("p", "Nothing to change.", class_="good"))
    heads = ("guest", "setting", "now", "then", "because", "why it is not made")
    rows = [(c.guest, c.setting, c.now, c.then, c.because, c.why) for c in plan.changes]
    parts.append(table("Changes that are not made yet", heads, rows))
    parts.append(_left_out(plan.changes_left_out, "change"))
    refused = [(r.guest, r.policy, r.because, r.instead) for r in plan.refusals]
    parts.append(table("Refused", ("guest", "policy", "because", "instead"), refused))
    parts.append(_left_out(plan.refusals_left_out, "refusal"))
    parts.append(table("Warnings", ("warning",), [(w,) for w in plan.warnings]))
    parts.append(_left_out(plan.warnings_left_out, "warning"))
    skipped = [
        (s.guest, s.setting, ("held: " if s.held else "pending: " if s.pending else "") + s.because)
        for s in plan.skipped
    ]
    parts.append(table("Left as it is", ("guest", "setting", "because"), skipped))
    parts.append(_left_out(plan.skipped_left_out, "setting"))
    return join(parts)


def _drift(page: StatusPage) -> Markup:
    if not page.drift:
        return element("p", "Nobody has changed what was set.", class_="good")
    heads = ("guest", "setting", "was set to", "found", "changed by", "policy key", "rule", "left")
    rows = [
        (d.guest, d.setting, d.was_set_to, d.found, d.by or "unknown", d.key, d.rule,
         d.left or "is put back")
        for d in page.drift
    ]  # fmt: skip
    return join(
        [
            table("Settings that somebody has changed", heads, rows),
            _left_out(page.drift_left_out, "setting"),
        ]
    )


def _problems(page: StatusPage) -> Markup:
    rows = [(p.where, p.what) for p in page.problems]
    told = table("What could not be read", ("where", "what"), rows)
    return join([told, _left_out(page.problems_left_out, "problem")])


# Elements without an end tag.
_VOID = ("meta", "link")


class Markup(str):
    """HTML that is inserted as it is."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str) -> Markup:
    """One element. Children other than Markup are text. An attribute's name may end in an
    underscore (``class_``), and has ``_`` for ``-``; an attribute without a value is omitted."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Siblings, one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table with a head; empty Markup without rows."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    if not body:
        return Markup()
    head = element("tr", *(element("th", text, scope="col") for text in heads))
    return element(
        "div",
        element(
            "table",
            element("caption", caption) if caption else Markup(),
            element("thead", head),
            element("tbody", *body),
        ),
        class_="wide",
    )


STYLE = """
:root { color-scheme: light dark; --bg: #fff; --text: #1c2227; --soft: #5b6670; --line: #d5dbe0;
  --card: #f5f7f9; --good: #17692f; --warn: #8a5300; --bad: #b3261e; --mark: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181c; --text: #e4e9ed; --soft: #9aa6b1; --line: #343c44; --card: #1d2329;
    --good: #6fd08c; --warn: #f0b35a; --bad: #ff8a80; --mark: #7fbcff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.25rem 3rem; max-width: 90rem; background: var(--bg);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0; }
.soft, caption { color: var(--soft); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.mark { color: var(--mark); }
.tag { border: 1px solid currentColor; border-radius: .7em; padding: 0 .5em; font-size: .85em;
  font-weight: 600; white-space: nowrap; }
.counts { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: .5rem 0;
  list-style: none; }
.cpus { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .7rem;
  padding: 0; margin: 0; list-style: none; }
.cpus > li { border: 1px solid var(--line); border-radius: .4rem; background: var(--card);
  padding: .5rem .7rem; min-width: 0; }
.cpus ul { list-style: none; margin: .3rem 0 0; padding: 0; font-size: .92em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92em; margin: .3rem 0 .8rem; }
caption { text-align: left; padding: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { min-width: 3.5em; max-width: 40rem; overflow-wrap: break-word; }
h3 small { font-weight: normal; }
"""
