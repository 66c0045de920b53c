"""Chromium without a window, driven by its DevTools protocol on two pipes: no driver, no
library, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0


def program() -> str | None:
    """Where Chromium is; None when it is not installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@dataclass
class Tab:
    """One page. ``requests`` are all URLs it has asked for, ``complaints`` what stood in its
    console: messages, exceptions, refused resources."""

    browser: _Browser
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def go(self, url: str) -> None:
        """Load a page and all that belongs to it."""
        self.call("Page.navigate", url=url)
        self.browser.until("Page.loadEventFired")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        return self.browser.call(method, params, self.session)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return answer["result"].get("value")

    def size(self, width: int, height: int) -> None:
        """Show it as on a screen of this size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, file: Path) -> None:
        """What is seen, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(answer["data"]))

    def heard(self, event: dict[str, Any]) -> None:
        """Take note of an event of the protocol."""
        method, params = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            entry = params["entry"]
            self.complaints.append(f"{entry['level']}: {entry['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{params['type']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")


class _Browser:
    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._rest = b""
        self._events: list[str] = []
        self.tab: Tab | None = None

    def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                result: dict[str, Any] = heard["result"]
                return result

    def until(self, event: str) -> None:
        while event not in self._events:
            self._next()
        self._events.clear()

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._back, 1 << 16) if ready else b""
            if not part:
                raise RuntimeError("Chromium has ended" if ready else "Chromium does not answer")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message["method"])
            if self.tab is not None and message.get("sessionId") == self.tab.session:
                self.tab.heard(message)
        return message


@contextmanager
def tab(place: Path) -> Iterator[Tab]:
    """A page in a browser of its own, which keeps its files in ``place``."""
    found = program()
    if found is None:
        raise RuntimeError("Chromium is not installed; `make browser` installs it")
    ours, theirs = os.pipe(), os.pipe()

    def three_and_four() -> None:
        # Copies far above first: either pipe may have 3 or 4 for itself.
        read, write = os.dup(ours[0]), os.dup(theirs[1])
        read, write = os.dup2(read, 60), os.dup2(write, 61)
        os.dup2(read, 3)
        os.dup2(write, 4)

    child = subprocess.Popen(
        [found, *FLAGS, f"--user-data-dir={place / 'profile'}", "about:blank"],
        env={**os.environ, "HOME": str(place), "XDG_CONFIG_HOME": str(place)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(place / "chromium.log").open("wb"),
        preexec_fn=three_and_four,
        close_fds=False,
        start_new_session=True,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        browser = _Browser(ours[1], theirs[0])
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        browser.tab = Tab(browser, attached["sessionId"])
        for domain in ("Page", "Network", "Log", "Runtime"):
            browser.tab.call(f"{domain}.enable")
        yield browser.tab
    finally:
        os.close(ours[1])
        os.close(theirs[0])
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
