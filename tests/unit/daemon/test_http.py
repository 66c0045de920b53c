"""http.py: paths, methods and headers of the daemon's HTTP server; the metrics are as they were."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
import recorded_state
import shell_samples as samples
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_tools import free_port
from shell_samples import Clock

from vsrtune.core.codec import encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon import http
from vsrtune.daemon.http import Metrics, html, policy
from vsrtune.model.daemon_state import DaemonState, GuestState
from vsrtune.views.metric_subjects import Scrape
from vsrtune.views.page_data import status_page

STRICT = {
    "Content-Security-Policy": policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def state(name: str = "vr1") -> DaemonState:
    guest = samples.guest(name)
    return DaemonState(
        snapshot=samples.snapshot(guest), guests=(GuestState(guest.ref, guest.source, tuned=True),)
    )


def metrics_of(what: DaemonState) -> Metrics:
    metrics = Metrics()
    metrics.update(what)
    return metrics


def ask(
    app: http.App, path: str, method: str = "GET", **more: str
) -> tuple[str, dict[str, str], bytes]:
    environ: dict[str, Any] = {
        "PATH_INFO": path,
        "REQUEST_METHOD": method,
        "QUERY_STRING": "",
        "SCRIPT_NAME": "",
    }
    setup_testing_defaults(environ)
    environ |= more
    found: list[Any] = []

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        found[:] = [status, dict(headers)]
        return lambda data: None

    answer = validator(app)(environ, start)  # type: ignore[arg-type]
    body = b"".join(answer)
    answer.close()  # type: ignore[attr-defined]
    return found[0], found[1], body


def ours(exposition: bytes) -> list[bytes]:
    """The lines of a scrape without those of the process, which change from scrape to scrape."""
    return [line for line in exposition.splitlines() if b"process_" not in line]


def test_the_page_and_the_same_as_data() -> None:
    with recorded_state.passes("trixie-napi") as (_, passes):
        passes.run()
        seen = passes.state
    app = http.app(metrics_of(seen))
    status, headers, body = ask(app, "/")
    assert (status, headers["Content-Type"]) == ("200 OK", "text/html; charset=utf-8")
    assert body.decode() == html(status_page(seen))
    status, headers, body = ask(app, "/status.json")
    assert (status, headers["Content-Type"]) == ("200 OK", "application/json")
    assert json.loads(body) == encode(status_page(seen))


@pytest.mark.parametrize("path", ["/", "/status.json", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_every_answer_of_ours_has_the_strict_headers(path: str, method: str) -> None:
    _, headers, body = ask(http.app(metrics_of(state())), path, method)
    assert STRICT.items() <= headers.items()
    assert (body == b"") == (method == "HEAD")
    if method != "HEAD":
        assert headers["Content-Length"] == str(len(body))


def test_head_tells_the_length_of_get() -> None:
    app = http.app(metrics_of(state()))
    assert ask(app, "/", "HEAD")[1] == ask(app, "/")[1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/status.json", "/nothing"])
def test_nothing_is_set_here(method: str, path: str) -> None:
    status, headers, _ = ask(http.app(metrics_of(state())), path, method)
    assert status.startswith("405 ")
    assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/x", "/metrics/", "//", "/index.html", "/../etc/passwd", "/ü"])
def test_elsewhere_is_nothing_but_a_hint(path: str) -> None:
    status, headers, body = ask(http.app(metrics_of(state())), path.encode().decode("latin-1"))
    assert status.startswith("404 ")
    assert headers["Content-Type"].startswith("text/plain")
    for known in ("/,", "/status.json", "/metrics"):
        assert known in body.decode()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"HTTP_ACCEPT": "application/openmetrics-text; version=1.0.0"},
        {"QUERY_STRING": "name[]=vsrtune_policies"},
        {"HTTP_HOST": "localhost:9178"},
    ],
)
def test_metrics_are_what_prometheus_client_makes(more: dict[str, str]) -> None:
    metrics = metrics_of(state("vr 1.\u00fc"))
    status, headers, body = ask(http.app(metrics), "/metrics", **more)
    assert (status, headers["Content-Type"]) == ("200 OK", CONTENT_TYPE_LATEST)
    assert ours(body) == ours(generate_latest(metrics.registry())) != []


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("127.0.0.1:9178", True),
        ("localhost:9178", True),
        ("LOCALHOST", True),
        ("[::1]:9178", True),
        ("10.0.0.1", True),
        ("evil.example:9178", False),
        ("127.0.0.1.evil.example", False),
        ("[evil]", False),
    ],
)
def test_another_site_whose_name_points_here_is_told_nothing(host: str, answered: bool) -> None:
    metrics = metrics_of(state())
    for path in ("/", "/status.json", "/metrics"):
        status, _, body = ask(http.app(metrics), path, HTTP_HOST=host)
        assert status.startswith("200 " if answered else "421 ")
        assert (b"vr1" in body) == answered
        assert ask(http.app(metrics, "192.0.2.1"), path, HTTP_HOST=host)[0] == "200 OK"


def test_a_state_is_rendered_once_and_a_new_one_is_seen() -> None:
    metrics = metrics_of(state("first"))
    pages = http.Pages()
    first = [pages.of(metrics.state, path) for path in ("/", "/status.json")]
    again = [pages.of(metrics.state, path) for path in ("/", "/status.json")]
    assert all(a is b for a, b in zip(first, again, strict=True))
    metrics.update(state("second"))
    for path in ("/status.json", "/"):
        assert b"second" in pages.of(metrics.state, path).body


def test_a_pass_does_not_wait_for_a_page() -> None:
    """Whoever renders, holds no lock that publishing a state takes."""
    metrics = metrics_of(state("first"))
    pages = http.Pages()
    with pages._lock:
        waiting = threading.Thread(target=pages.of, args=(metrics.state, "/"))
        waiting.start()
        metrics.update(state("second"))
        assert metrics.state.guests[0].ref == "second"
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()


def counted(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> list[DaemonState]:
    """The states that are rendered for scrapes from now on."""
    rendered: list[DaemonState] = []
    real = http.collect

    def collect(scrape: Scrape) -> list[Any]:
        if scrape.state is metrics.state:
            rendered.append(scrape.state)
        return real(scrape)

    monkeypatch.setattr(http, "collect", collect)
    return rendered


def test_whoever_scrapes_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often, and whatever is asked for: each rendering holds up passes and the guard."""
    metrics = metrics_of(state("first"))
    app = http.app(metrics)
    rendered = counted(metrics, monkeypatch)
    clock = Clock()
    monkeypatch.setattr(http.time, "monotonic", clock)
    real = http.generate_latest

    def slow(registry: Any) -> bytes:
        clock.now += 0.4
        return real(registry)

    monkeypatch.setattr(http, "generate_latest", slow)
    first = ask(app, "/metrics")
    metrics.update(state("second"))
    for number in range(100):
        query = {"QUERY_STRING": f"name[]=none_{number}"}
        assert ask(app, "/metrics", **query, HTTP_ACCEPT=f"text/x{number}") == first
    assert len(rendered) == 1
    clock.now += 4.1
    assert b"second" in ask(app, "/metrics")[2]
    assert len(rendered) == 2


def test_a_scrape_tells_of_this_process_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SCRAPE_SHARE", 0)
    metrics = metrics_of(state())
    app = http.app(metrics)
    ask(app, "/metrics")
    metrics.refused_connection()
    told = b"vsrtune_http_refused_connections_total 1.0"
    assert told in ask(app, "/metrics")[2].splitlines()


# -- the server


def test_serves_over_http_and_says_when_the_address_is_taken() -> None:
    metrics = metrics_of(state("vr 1.\u00fc"))
    port = free_port()
    http.serve(metrics, "127.0.0.1", port)
    base = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:
        assert ours(answer.read()) == ours(generate_latest(metrics.registry()))
    with urllib.request.urlopen(f"{base}/", timeout=10) as answer:
        assert "vr 1.\u00fc" in answer.read().decode()
        assert answer.headers["Cache-Control"] == "no-store"
    request = urllib.request.Request(f"{base}/", method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.read() == b""
        assert int(answer.headers["Content-Length"]) > 1000
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(f"{base}/favicon.ico", timeout=10)
    missing.value.close()
    assert missing.value.code == 404
    with pytest.raises(VsrtuneError) as caught:
        http.serve(Metrics(), "127.0.0.1", port)
    assert str(port) in caught.value.where
    assert "--metrics" in caught.value.hint


def test_serves_on_ipv6() -> None:
    try:
        port = free_port(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    http.serve(metrics_of(state()), "::1", port)
    with urllib.request.urlopen(f"http://[::1]:{port}/", timeout=10) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77", "127.0.0.1"])
def test_an_address_may_come_after_the_daemon(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At a boot; nor is its name asked for, which takes as long as the network is not there. A
    wrong one, which never comes, is told."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "gethostbyaddr", asked.append)
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    http.serve(Metrics(), host, free_port())
    assert asked == []
    told = [f"{host} is no address of this host yet; metrics are served once it is"]
    assert caplog.messages == ([] if host == "127.0.0.1" else told)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "127..0.0.1", "a" * 64])
def test_an_address_that_is_none(host: str) -> None:
    with pytest.raises(VsrtuneError, match="cannot serve"):
        http.serve(Metrics(), host, 9178)


def test_whoever_says_nothing_is_sent_away_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http, "PATIENCE", 0.2)
    port = free_port()
    http.serve(metrics_of(state()), "127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
            assert answer.status == 200
        silent.settimeout(10)
        assert silent.recv(1) == b""
    assert "Traceback" not in capfd.readouterr().err


# Opens so many connections, tells their number, and sends a byte of a request on every second
# one each second, as long as there is anything to read from its standard input.
CROWD = """
import resource, select, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
found = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count)]
print(len(found), flush=True)
while not select.select([sys.stdin], [], [], 1)[0]:
    for one in found[::2]:
        try:
            one.send(b"G")
        except OSError:
            pass
"""


@pytest.fixture
def crowd() -> Iterator[Callable[[int, int], None]]:
    """Opens connections to a port, in a process of its own."""
    begun: list[subprocess.Popen[str]] = []

    def come(port: int, count: int) -> None:
        words = [sys.executable, "-c", CROWD, str(port), str(count)]
        begun.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert begun[-1].stdout is not None
        assert begun[-1].stdout.readline() == f"{count}\n"

    yield come
    for process in begun:
        process.kill()
        process.communicate()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def page_within(port: int, seconds: float) -> float:
    """How long it took until there was a page, whoever is closed tries again."""
    begun = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                answer.read()
            return time.monotonic() - begun
        except OSError:
            assert time.monotonic() - begun < seconds
            time.sleep(0.05)


def test_a_crowd_takes_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
    crowd: Callable[[int, int], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """1,200 connections that say nothing, or a byte a second: each second one would be alive for
    ever by what it has said last."""
    monkeypatch.setattr(http, "PATIENCE", 3.0)
    port, metrics = free_port(), metrics_of(state())
    http.serve(metrics, "127.0.0.1", port)
    before, threads = descriptors(), threading.active_count()
    most = [0, 0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            most[:] = max(most[0], descriptors()), max(most[1], threading.active_count())

    started = threading.Thread(target=watch)
    started.start()
    try:
        begin = time.monotonic()
        crowd(port, 1200)
        # Each turn of so many is let in, and sent away when patience ends.
        turns = 2 + int((time.monotonic() - begin) / http.PATIENCE)
        took = page_within(port, 3 + 2)
        print(f"a page after {took:.1f} s, {most[0] - before} descriptors more")
        # Those that went on sending are gone too.
        end = time.monotonic() + 5
        while descriptors() > before + len(("the crowd's input", "and output")):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        over.set()
        started.join(10)
    # And the crowd's pipes, this test's own connection, one that is being refused, and a list.
    assert most[0] <= before + http.CONNECTIONS + 6
    assert most[1] <= threads + 1 + http.CONNECTIONS
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        told = re.search(
            rb"^vsrtune_http_refused_connections_total (\S+)$", answer.read(), re.MULTILINE
        )
    assert told is not None
    assert float(told[1]) >= 1200 - turns * http.CONNECTIONS
    assert "Traceback" not in capfd.readouterr().err


def test_who_reads_slowly_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is the whole request's, its answer included."""
    monkeypatch.setattr(http, "PATIENCE", 0.5)
    monkeypatch.setattr(http.Pages, "of", lambda *_: http._said("200 OK", "x" * (32 << 20)))
    port = free_port()
    http.serve(metrics_of(state()), "127.0.0.1", port)
    before = descriptors()
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET / HTTP/1.0\r\n\r\n")
        begun = time.monotonic()
        while descriptors() > before + 1 or time.monotonic() < begun + 0.4:
            slow.recv(1)
            assert time.monotonic() < begun + 5
            time.sleep(0.05)


def test_the_unit_leaves_passes_most_descriptors() -> None:
    """Python's select takes none of 1024 and beyond."""
    unit = Path(__file__).parents[3] / "units" / "vsrtune.service"
    told = re.search(r"^LimitNOFILE=(\d+)$", unit.read_text(), re.MULTILINE)
    assert told is not None
    assert 8 * http.CONNECTIONS < int(told[1]) <= 1024
