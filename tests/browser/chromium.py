"""Debian's Chromium without a window, driven by Selenium and Debian's chromium-driver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PROGRAMS = ("chromium", "chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--hide-scrollbars",
)  # fmt: skip
PATIENCE = 60


def missing() -> str:
    """What `make browser` would install; "" when all is there."""
    wanted = [name for name in PROGRAMS if shutil.which(name) is None]
    try:
        import selenium  # noqa: F401  Debian's, perhaps not installed
    except ImportError:
        wanted.append("selenium")
    return ", ".join(wanted)


class Tab:
    """One page."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def go(self, url: str) -> None:
        """Load a page and all that belongs to it."""
        self._driver.get(url)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self._driver.execute_script(f"return {expression}")

    def size(self, width: int, height: int) -> None:
        """Show it as on a screen of this size, in CSS pixels."""
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self._tell("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, file: Path) -> None:
        """What is seen, as PNG."""
        self._driver.get_screenshot_as_file(str(file))

    def requests(self) -> list[str]:
        """All URLs that it has asked for since the last call."""
        events = [json.loads(e["message"])["message"] for e in self._driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def complaints(self) -> list[str]:
        """Its console since the last call: messages, exceptions, refused resources."""
        return [f"{e['level']}: {e['message']}" for e in self._driver.get_log("browser")]

    def _tell(self, command: str, **parameters: Any) -> None:
        self._driver.execute_cdp_cmd(command, parameters)


@contextmanager
def tab(place: Path) -> Iterator[Tab]:
    """A page in a browser of its own, which keeps its files in ``place``."""
    if wanted := missing():
        raise RuntimeError(f"not installed: {wanted}; `make browser` installs it")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    browser, driver_program = (shutil.which(name) for name in PROGRAMS)
    options = webdriver.ChromeOptions()
    options.binary_location = str(browser)
    for flag in (*FLAGS, f"--user-data-dir={place / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    service = Service(str(driver_program), env={"HOME": str(place), "PATH": "/usr/bin:/bin"})
    driver = webdriver.Chrome(service=service, options=options)
    try:
        driver.set_page_load_timeout(PATIENCE)
        page = Tab(driver)
        # It has opened a page of its own, which asks for much.
        page.go("about:blank")
        page.requests()
        page.complaints()
        yield page
    finally:
        driver.quit()
