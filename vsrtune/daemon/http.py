# SPDX-License-Identifier: GPL-2.0-or-later
"""The daemon's HTTP server: Prometheus metrics, the status page, and the same as data.

Every answer is made from the last DaemonState published, never from the host, except the
metrics of this process (process_*). A page is made once for each state, at the first request for
it, by one thread at a time, however many ask. No pass waits for the lock that this thread holds.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import socket
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from ipaddress import ip_address
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)

from vsrtune.core.codec import encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon.systemd import LOGGER
from vsrtune.model.daemon_state import DaemonState
from vsrtune.views.metric_families import collect
from vsrtune.views.metric_subjects import Scrape
from vsrtune.views.page_data import PLOT, Data, overrides, plot, status_page, wrong

if TYPE_CHECKING:
    from jinja2 import Template

# Seconds after which a browser asks again: the default interval of passes.
REFRESH = 10
# A connection is closed at the latest this long after it was accepted, seconds.
PATIENCE = 10.0
# An answer to scrapes lasts for so many times what it took to make.
SCRAPE_SHARE = 10
# Connections served at a time. Each takes a thread and a descriptor, which passes need too.
CONNECTIONS = 32
# IP_FREEBIND (linux/in.h) and IPV6_FREEBIND (linux/in6.h).
_FREEBIND: dict[int, tuple[int, int]] = {
    socket.AF_INET: (socket.IPPROTO_IP, 15),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 78),
}


@cache
def _style() -> str:
    return files("vsrtune.views").joinpath("page.css").read_text("utf-8")


@cache
def _template() -> Template:
    # Late: a daemon whose page nobody opens does not need the library.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    source = files("vsrtune.views").joinpath("page.html.j2").read_text("utf-8")
    environment.globals |= {"plot": plot, "overrides": overrides, "size": PLOT}
    return environment.from_string(source)


def policy() -> str:
    """The Content-Security-Policy of the page: it allows the page's style sheet by its hash,
    an empty icon, and nothing else."""
    digest = b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def html(page: Data) -> str:
    """The page as HTML, one document without a script. Autoescape of page.html.j2 makes every
    text in it text, whatever a guest is called."""
    from markupsafe import Markup

    when = ""
    if page["last_pass"]:
        when = datetime.fromtimestamp(page["last_pass"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    # Our own file, so it is not escaped: its hash must be that of the policy.
    style = Markup(_style())  # noqa: S704
    told: dict[str, list[str]] = {}
    for row in wrong(page):
        told.setdefault(row["where"], []).append(row["what"])
    return _template().render(page=page, wrong=told, when=when, style=style, refresh=REFRESH)


App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_TEXT = "text/plain; charset=utf-8"
_HINT = "There is /, the status page, /status.json, the same as data, and /metrics."
# Browsers and proxies must not keep an answer, take it for another type, or show it inside
# another page.
_HEADERS = [
    ("Content-Security-Policy", policy()),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    kind: str
    body: bytes
    more: tuple[tuple[str, str], ...] = ()


def _said(status: str, text: str, *more: tuple[str, str]) -> _Answer:
    return _Answer(status, _TEXT, f"{text}\n".encode(), more)


class Pages:
    """The answers to / and /status.json, for one state at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: DaemonState | None = None
        self._page: Data | None = None
        self._made: dict[str, _Answer] = {}

    def of(self, state: DaemonState, path: str) -> _Answer:
        """The answer to ``path`` for ``state``. Raises KeyError for an unknown path."""
        with self._lock:
            if self._of is not state or self._page is None:
                self._made.clear()
                self._page, self._of = status_page(state), state
            if path not in self._made:
                self._made[path] = _PAGES[path](self._page)
            return self._made[path]


class Scrapes:
    """The answer to /metrics. It is made at most for one part in SCRAPE_SHARE of the time, and in
    one format: passes and the guard wait for every thread that runs Python."""

    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics.registry()
        self._lock = threading.Lock()
        self._until = 0.0
        self._made = b""

    def made(self) -> bytes:
        """The exposition, as old as SCRAPE_SHARE times what it takes to make at most."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._until:
                self._made = generate_latest(self._registry)
                now = time.monotonic()
                self._until = now + SCRAPE_SHARE * (now - begin)
            return self._made


def _html(page: Data) -> _Answer:
    return _Answer("200 OK", "text/html; charset=utf-8", html(page).encode())


def _data(page: Data) -> _Answer:
    text = json.dumps(encode(page), ensure_ascii=False)
    return _Answer("200 OK", "application/json", f"{text}\n".encode())


_PAGES = {"/": _html, "/status.json": _data}


def app(metrics: Metrics, address: str = "127.0.0.1") -> App:
    """The WSGI application that serves what ``metrics`` was last given; ``address`` is the
    IP address it listens on."""
    scrapes = Scrapes(metrics)
    pages = Pages()
    local = ip_address(address.partition("%")[0]).is_loopback

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO") or "/", environ.get("REQUEST_METHOD", "")
        if method not in ("GET", "HEAD"):
            allow = ("Allow", "GET, HEAD")
            found = _said(
                "405 Method Not Allowed", "Only GET and HEAD: nothing is set here.", allow
            )
        elif local and not _names_this_host(environ.get("HTTP_HOST", "")):
            text = "Ask for it by address or as localhost: other names may be another site's."
            found = _said("421 Misdirected Request", text)
        elif path == "/metrics":
            found = _Answer("200 OK", CONTENT_TYPE_LATEST, scrapes.made())
        elif path not in _PAGES:
            found = _said("404 Not Found", f"There is nothing here. {_HINT}")
        else:
            found = pages.of(metrics.state, path)
        length = ("Content-Length", str(len(found.body)))
        start(found.status, [("Content-Type", found.kind), length, *_HEADERS, *found.more])
        return [] if method == "HEAD" else [found.body]

    return answer


def _names_this_host(header: str) -> bool:
    """Whether a Host header is an address, localhost or empty. Otherwise another site could
    point its own name to 127.0.0.1, and its page could read ours."""
    name = header.rpartition("]")[0].removeprefix("[") or header.partition(":")[0]
    if name.lower() == "localhost" or not header:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128
    metrics: Metrics

    def __init__(self, *words: Any) -> None:
        self._lock = threading.Lock()
        # Connections that are served, and when each is closed at the latest (monotonic).
        self._ends: dict[Any, float] = {}
        super().__init__(*words)

    def server_bind(self) -> None:
        """Bind as the base classes do, also to an address that the host gets later in its boot.
        They ask for its name, which a host without network waits for."""
        try:
            TCPServer.server_bind(self)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self.socket.setsockopt(*_FREEBIND[self.address_family], 1)
            TCPServer.server_bind(self)
            where = self.server_address[0]
            LOGGER.warning(
                "%s is no address of this host yet; metrics are served once it is", where
            )
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or close it when CONNECTIONS are open."""
        with self._lock:
            full = len(self._ends) >= CONNECTIONS
            if not full:
                self._ends[request] = time.monotonic() + PATIENCE
        if full:
            self.metrics.refused_connection()
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Called also for a connection whose thread could not be started."""
        with self._lock:
            self._ends.pop(request, None)
            super().close_request(request)

    def service_actions(self) -> None:
        """End connections that are due; called every half second and after each connection.
        A thread that reads or writes then reaches the end of its connection."""
        now = time.monotonic()
        with self._lock:
            for request, end in self._ends.items():
                if end <= now:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore OSError: a client may go away or say nothing."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(metrics: Metrics, host: str, port: int) -> None:
    """Answer requests in threads of their own until the process ends. Raises VsrtuneError
    when it cannot listen on the address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

        class Server(_Server):
            address_family = found[0]

        Server.metrics = metrics

        address = str(found[4][0])
        listening = make_server(address, port, app(metrics, address), Server, _Handler)
    except (OSError, UnicodeError) as error:
        raise VsrtuneError(
            f"cannot serve metrics and status page: {getattr(error, 'strerror', None) or error}",
            where=f"{host}:{port}",
            hint="choose another address with --metrics, or --metrics off",
        ) from None
    threading.Thread(target=listening.serve_forever, name="web", daemon=True).start()


class Metrics:
    """Holds the latest ``state`` for scrapes and pages, in other threads: ``update`` replaces it
    whole."""

    def __init__(self) -> None:
        self.state = DaemonState()
        self._refused = 0

    def update(self, state: DaemonState) -> None:
        """Replace what the next scrape reports."""
        self.state = state

    def collect(self) -> Iterator[Any]:
        """The families of the latest state (prometheus_client's collector interface)."""
        return iter(collect(Scrape(self.state, self._refused)))

    def refused_connection(self) -> None:
        """Count a connection that was closed unanswered. Only the thread that accepts them
        calls it."""
        self._refused += 1

    def registry(self) -> CollectorRegistry:
        """A registry of these and of process_*, which the library reads from /proc/self."""
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        ProcessCollector(registry=registry)
        return registry


def exposition(state: DaemonState) -> str:
    """The text that a scrape of ``state`` gets."""
    metrics = Metrics()
    metrics.update(state)
    return generate_latest(metrics.registry()).decode()
