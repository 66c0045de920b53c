"""Writes the pictures in docs/images: the status page, and commands on a terminal of 80 columns, of a
host recorded in the lab, in Chromium.

`make.py record FILE`, in a lab with traffic, records five minutes of what the bars and plots of the
page and the loads of top are made of. TRAFFIC is such a file; without it, the pictures show a host
whose traffic nobody recorded.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

REPO = Path(__file__).resolve().parents[2]
sys.path += [str(REPO), str(REPO / "tests/browser"), str(REPO / "tests/unit/support")]

if TYPE_CHECKING:
    from chromium import Tab

    from vsrtune.model.daemon_state import DaemonState

IMAGES = REPO / "docs/images"
HOST = REPO / "tests/hosts/trixie-veth-multiqueue.json"
TRAFFIC = Path(__file__).with_name("traffic.json")
# The policy of `plan` and `top`: a whole one.
POLICY = "guest: vr1\n"
COLUMNS, LINES = 80, 60
# Behind what is reversed, rich needs colours to change places.
COLOURS = "#e4e9ed on #14181c"
# More than this would weigh on every clone.
MOST = 150_000
# Seconds between two samples, and how many.
SPACING, SAMPLES = 10, 31
TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #14181c; color: #e4e9ed; }}
pre {{ display: inline-block; margin: 0; padding: 12px 16px; font: 14px/1.35 "DejaVu Sans Mono"; }}
</style><pre>{code}</pre>"""


def record(file: Path) -> None:
    """Record this host, and samples of its traffic: every text that a sample of top reads."""
    from vsrtune.host.filesystem import LiveRoot
    from vsrtune.observe import samples
    from vsrtune.observe.observer import live_observer

    class Logged(LiveRoot):
        texts: dict[str, str]

        def read(self, path: str) -> str:
            text = self.texts[path] = super().read(path)
            return text

    snapshot, found = live_observer().observe(), []
    for number in range(SAMPLES):
        root = Logged()
        root.texts = {}
        taken = samples.take(root, snapshot)
        texts = {
            p: t for p, t in root.texts.items() if not p.startswith("/sys/") or "/statist" in p
        }
        if number < SAMPLES - 2:  # top needs the last two, the page these alone
            texts = {path: texts[path] for path in ("/proc/stat", "/proc/net/dev")}
        found.append({"at_ns": taken.at_ns, "texts": texts})
        time.sleep(SPACING if number < SAMPLES - 1 else 0)
    with tempfile.TemporaryDirectory() as place:
        host = Path(place) / "host.json"
        subprocess.run([sys.executable, "-m", "vsrtune", "record", str(host)], check=True)
        recorded = json.loads(host.read_text("utf-8"))
    del recorded["snapshot"]
    file.write_text(json.dumps({"host": recorded, "samples": found}, indent=1) + "\n", "utf-8")


class Pictures:
    """The recorded host, its samples if there are any, and a tab to show it in. Temporary files go
    to ``place``."""

    def __init__(self, place: Path, tab: Tab) -> None:
        from advanced_root import AdvancedRoot

        from vsrtune.core.codec import encode
        from vsrtune.observe.recording import replay

        self.place, self.tab = place, tab
        recorded: dict[str, Any] = {"samples": []}
        host = HOST
        if TRAFFIC.exists():
            recorded, host = json.loads(TRAFFIC.read_text("utf-8")), place / "host.json"
            host.write_text(json.dumps(recorded["host"]), "utf-8")
            recorded["host"]["snapshot"] = encode(replay(host))
            host.write_text(json.dumps(recorded["host"]), "utf-8")
        self.root = AdvancedRoot(host)
        self.samples: list[dict[str, Any]] = recorded["samples"]
        (place / "policies").mkdir()
        (place / "policies" / "vr1.yaml").write_text(POLICY, "utf-8")

    def page(self) -> None:
        """The status page by day and by night."""
        import served

        with served.page(str(self.root.path.with_suffix("")), recent=self._recent) as url:
            for scheme, height in (("light", 1000), ("dark", 640)):
                self.tab.scheme(scheme)
                self.tab.size(1040, height)
                self.tab.go(url)
                self._take("status-page" if scheme == "light" else "status-page-dark")

    def _recent(self, state: DaemonState) -> DaemonState:
        from vsrtune.daemon.load_tracker import RecentKeeper

        now = 0.0
        keeper = RecentKeeper(self.root, lambda: now)
        for at in self._passing():
            now = at / 1e9
            state = keeper.update(state)
        return state

    def command(self, *words: str, host: Path | None = None) -> None:
        """What a command prints on the terminal, of this host or another recorded one."""
        root = str(host or self.root.path)
        options = ["--root", root, "--policies", str(self.place / "policies")]
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (LINES, COLUMNS))
        command = [sys.executable, "-B", "-m", "vsrtune", *words, *options]
        env = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "PYTHONPATH": str(REPO)}
        with subprocess.Popen(command, stdout=slave, stdin=slave, env=env, cwd=self.place):
            os.close(slave)
            told = b""
            try:
                while more := os.read(master, 1 << 16):
                    told += more
            except OSError:
                pass  # EIO: the last process that had the terminal has ended
        os.close(master)
        from rich.text import Text

        text = told.decode().replace("\r\n", "\n").rstrip()
        self._terminal(words[0], Text.from_ansi(f"# vsrtune {' '.join(words)}\n{text}"))

    def top(self) -> None:
        """The last frame of top."""
        from vsrtune.cli.top_view import view
        from vsrtune.observe import samples
        from vsrtune.observe.observer import Observer
        from vsrtune.views.top_frame import make_frame

        snapshot = Observer(self.root, self.root.recording.virt()).observe()
        # Nobody recorded the journal of this host: what vsrtune has set counts as found.
        found = (replace(guest, carried=()) for guest in snapshot.guests)
        snapshot = replace(snapshot, guests=tuple(found))
        taken = [samples.take(self.root, snapshot, partial(int, at)) for at in self._passing()]
        self._terminal("top", view(make_frame(*taken[-2:]), COLUMNS, 24), 24)

    def _passing(self) -> Any:
        """Let the samples become the root's files, one after the other. Gives their times, ns."""
        still = [{"at_ns": at, "texts": {}} for at in (0, 2 * 10**9)]
        for sample in self.samples or still:
            for path, text in sample["texts"].items():
                self.root.set(path, text)
            yield sample["at_ns"]

    def _terminal(self, name: str, shown: Any, height: int | None = None) -> None:
        from rich.console import Console
        from rich.terminal_theme import MONOKAI

        with (self.place / "out").open("w") as out:
            console = Console(
                file=out, record=True, width=COLUMNS, height=height, force_terminal=True,
                color_system="truecolor", style=COLOURS, _environ={},
            )  # fmt: skip
            console.print(shown, height=height)
        code = console.export_html(theme=MONOKAI, code_format="{code}", inline_styles=True)
        page = self.place / f"{name}.html"
        page.write_text(TERMINAL.format(code=code.rstrip()), "utf-8")
        self.tab.size(1000, 1200)
        self.tab.go(page.as_uri())
        box = self.tab.ask(
            "(b => [b.width, b.height])(document.querySelector('pre').getBoundingClientRect())"
        )
        self.tab.size(*(int(n) + 1 for n in box))
        self._take(name)

    def _take(self, name: str) -> None:
        picture = IMAGES / f"{name}.png"
        self.tab.picture(picture)
        size = picture.stat().st_size
        if size > MOST:
            raise SystemExit(f"{picture.name} has {size} bytes, more than {MOST}")
        print(f"{picture.relative_to(REPO)}: {size} bytes")


def main() -> None:
    """Raises RuntimeError when Chromium is not installed, SystemExit when a picture is too large."""
    if sys.argv[1:2] == ["record"]:
        record(Path(sys.argv[2]))
        return
    import chromium

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        chromium.tab(Path(name)) as tab,
    ):
        pictures = Pictures(Path(name), tab)
        pictures.page()
        pictures.command("show", "--guest", "vr1")
        # The other host is tuned already.
        pictures.command("plan", host=HOST)
        pictures.top()


if __name__ == "__main__":
    main()
