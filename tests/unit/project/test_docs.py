"""docs/: what is generated is current, every command can be run as written, links lead somewhere,
and what monitoring names exists."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from prometheus_tools import program
from ruamel.yaml import YAML

from vsrtune.cli.main import cli, run
from vsrtune.observe.observer import ROUND, SELDOM
from vsrtune.policy.parser import parse
from vsrtune.policy.schema import SCHEMA
from vsrtune.views.metric_families import FAMILIES

REPO = Path(__file__).resolve().parents[3]
DOCS = REPO / "docs"
PAGES = sorted(
    p
    for p in (
        *REPO.glob("*.md"),
        *DOCS.rglob("*.md"),
        REPO / "tests/lab/README.md",
        REPO / "kmod/README.md",
    )
    if "results" not in p.parts and p.name != "CHANGELOG.md"
)
# Behind everything else: the lab's tests have the names of some of these.
sys.path += [str(REPO / "docs"), str(REPO / "tests/lab/inside")]

from doccommands import Command, commands  # noqa: E402
from generate import man, roff  # noqa: E402
from generate.files import contents  # noqa: E402

GENERATED = sorted(contents())


def name(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("path", GENERATED)
def test_what_is_generated_is_current(path: str) -> None:
    written = (DOCS / path).read_text("utf-8")
    assert written == contents()[path], "run `make docs` and commit what it writes"


def test_the_reference_names_every_key_and_metric() -> None:
    text = contents()["policy-reference.md"]
    page = contents()["man/vsrtune-policy.5"]

    def below(schema: dict[str, Any], above: str = "") -> list[str]:
        found = []
        for key, part in schema.get("properties", {}).items():
            found += [above + key, *below(part, f"{above}{key}.")]
        return found

    for key in below(SCHEMA):
        assert f"## `{key}`" in text
        assert f"\\fB{roff.escape(key)}\\fR" in page
    metrics = contents()["metrics.md"]
    assert all(f"| `{family.name}` |" in metrics for family in FAMILIES)


# -- commands


def written() -> list[tuple[Path, Command]]:
    return [(page, c) for page in PAGES for c in commands(page.read_text("utf-8"))]


def check(command: Command) -> str:
    """What is wrong with a command line, "" for nothing: it is read as click reads it, and
    never run. Names of files and guests need not exist."""
    group: click.Command = cli
    words = list(command.words)
    context = click.Context(cli, info_name="vsrtune")
    while isinstance(group, click.Group):
        if not words or words[0] in ("--help", "-h", "--version"):
            return "" if not command.block or words else "the subcommand is missing"
        found = group.get_command(context, words[0])
        if found is None:
            return f"there is no command {words[0]}"
        group, context = found, click.Context(found, parent=context, info_name=words.pop(0))
    if not words and not command.block:
        return ""  # it is spoken of, not shown
    try:
        group.make_context(context.info_name, words, parent=context.parent)
    except click.MissingParameter as error:
        return "" if not command.block else error.format_message()
    except click.BadParameter as error:
        return "" if "does not exist" in error.format_message() else error.format_message()
    except click.UsageError as error:
        return error.format_message()
    except click.exceptions.Exit:
        return ""
    return ""


def test_every_command_of_the_documents_is_one(tmp_path: Path) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        wrong = [
            f"{name(page)}:{c.line}: vsrtune {' '.join(c.words)}: {problem}"
            for page, c in written()
            if (problem := check(c))
        ]
    finally:
        os.chdir(before)
    assert wrong == []
    assert len(written()) > 60


def test_every_command_is_in_the_documents() -> None:
    shown = {c.words[: len(w)] for _, c in written() for w, _ in man.commands()}
    assert [w for w, _ in man.commands() if w not in shown] == []


def shown_of_recordings() -> list[tuple[Path, list[str], str]]:
    """The commands on recorded hosts that documents show with their output."""
    return [
        (page, words.split(), output)
        for page in PAGES
        for block in re.findall(
            r"^```\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        for words, output in re.findall(
            r"^# vsrtune (.* --root tests/hosts/.*)\n((?:(?!# ).*\n)*)", block, re.MULTILINE
        )
    ]


@pytest.mark.parametrize(("page", "words", "output"), shown_of_recordings())
def test_what_a_document_shows_of_a_recorded_host_is_what_it_prints(
    page: Path,
    words: list[str],
    output: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line of three dots stands for any lines, three dots at the end of one for its rest."""
    monkeypatch.chdir(REPO)
    run(words)
    printed = capsys.readouterr()
    parts = (re.escape(line).replace(r"\.\.\.", ".*") for line in output.splitlines())
    wanted = "".join("(?:.*\n)*" if part == ".*" else part + "\n" for part in parts)
    assert re.fullmatch(wanted, printed.out + printed.err), name(page)


# -- messages

# What a code span begins with that is typed, or written into a file, and no message.
_TYPED = (
    "apt", "chmod", "ethtool", "journalctl", "modprobe", "systemctl", "virsh", "vsrtune",
)  # fmt: skip


def messages(page: Path) -> list[str]:
    """The messages that a page quotes: code spans of three words or more. Three dots in them
    stand for what differs from case to case."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [
        span
        for span in spans
        if len(span.split()) >= 3 and span.split()[0] not in _TYPED and "{" not in span
    ]


def literals() -> set[str]:
    """Every text in the code, those between the fields of f-strings as well."""
    trees = (ast.parse(p.read_text("utf-8")) for p in (REPO / "vsrtune").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.mark.parametrize("page", ["faq.md", "troubleshooting.md"])
def test_messages_in_documents_are_those_of_the_code(page: str) -> None:
    known = "\n".join(literals())
    found = messages(DOCS / page)
    assert len(found) >= 5
    wrong = [m for m in found if not all(part.strip() in known for part in m.split("..."))]
    assert wrong == []


# -- links, policies, manual pages


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """What a link may name behind #, as GitHub makes it from the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return set(map(anchor_of, headings))


def section(page: Path, anchor: str) -> str:
    """What stands below the heading that a link names, "" without one."""
    parts = re.split(r"^#+ +", page.read_text("utf-8"), flags=re.MULTILINE)
    return next((part for part in parts if anchor_of(part.partition("\n")[0]) == anchor), "")


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_name_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text("utf-8"))
    wrong = [
        f"{target}#{anchor}"
        for target, anchor in links
        if "://" not in target and anchor not in anchors(page.parent / target if target else page)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("document", "kernels"), [("README.md", ("6.12", "6.1")), ("docs/tutorial.md", ("6.12",))]
)
def test_a_document_tells_the_ratios_of_the_pages(document: str, kernels: tuple[str, ...]) -> None:
    """Two pages measured the same; a document quotes neither alone."""
    text = (REPO / document).read_text()
    harm = (DOCS / "results/no-harm.md").read_text()
    found = (DOCS / "results/README.md").read_text()
    for kernel in map(re.escape, kernels):
        row = re.search(rf"^\| {kernel} \| 2 \| 1 \| idle \|.*", harm, re.MULTILINE)
        beside = re.search(rf"^\| kernel {kernel} .*? \| 4x, .*", found, re.MULTILINE)
        assert row and beside
        again = re.search(r"([\d.]+ \()95% (\S+),", beside[0])
        assert again
        for ratio in (row[0].split("|")[7].partition(")")[0].strip(), again[1] + again[2]):
            assert f"**{ratio})**" in text


def test_every_document_is_in_the_map() -> None:
    """README.md leads to every page of docs/, the guides by way of their own README."""
    maps = {REPO / "README.md": DOCS, DOCS / "guides/README.md": DOCS / "guides"}
    for readme, folder in maps.items():
        linked = re.findall(r"\]\(([^)#\s]+)", readme.read_text("utf-8"))
        reached = {(readme.parent / target).resolve() for target in linked if "://" not in target}
        missing = {p.resolve() for p in folder.glob("*.md")} - reached - {readme}
        assert sorted(map(name, missing)) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_policies_in_documents_are_valid(page: Path) -> None:
    """Every YAML block that names a guest is a policy."""
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        if re.match(r"(#.*\n)*guest:", block):
            parse(block, name(page))


@pytest.mark.parametrize("page", ["vsrtune.8", "vsrtune-policy.5"])
def test_manual_pages_are_sound(page: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    text = contents()[f"man/{page}"]
    words = ["groff", "-man", "-ww", "-Tutf8", "-z"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- completion


def test_bash_completes_what_the_command_knows(tmp_path: Path) -> None:
    """With the file as it is installed, and bash's own way to ask for completions."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "vsrtune"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m vsrtune "$@"\n')
    program.chmod(0o755)
    host = (REPO / "tests/hosts/trixie-veth-multiqueue.json").read_text()
    (tmp_path / "host.json").write_text(host.replace("vr1", "-$(reboot)"))
    (tmp_path / "edge.yaml").write_text("")
    script = f"""
set -u
source {DOCS}/completion/bash/vsrtune
compopt() {{ echo -n "$2 "; }}
ask() {{
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  "$(complete -p vsrtune | sed 's/.*-F \\([^ ]*\\).*/\\1/')" vsrtune
  echo "${{COMPREPLY[*]}}" | tr '\\n' ' '; echo
}}
ask vsrtune do
ask vsrtune policy in
ask vsrtune doctor --js
ask vsrtune show --guest ""
ask vsrtune show --guest qemu :
ask vsrtune show --guest qemu : p
ask vsrtune show --guest qemu : x
ask vsrtune group create e
ask vsrtune plan --policies ""
"""
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VSRTUNE_GROUPS": str(tmp_path),
        "VSRTUNE_ROOT": str(tmp_path / "host.json"),
    }  # fmt: skip
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout.splitlines() == [
        "doctor ", "init ", "--json ", "qemu:pq1 ", "pq1 ", "pq1 ", " ",
        "default edge ", "dirnames  ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shell", "file"), [("zsh", "zsh/_vsrtune"), ("fish", "fish/vsrtune.fish")]
)
def test_other_shells_read_their_files(shell: str, file: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", str(DOCS / "completion" / file)], check=True)


# -- monitoring

MONITORING = DOCS / "monitoring"
_METRIC = re.compile(r"\bvsrtune_[a-z0-9_]+")


def exposed() -> set[str]:
    """Every name that a scrape can hold."""
    names = set()
    for family in FAMILIES:
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_alerts_and_dashboard_name_metrics_that_exist() -> None:
    for file in ("alerts.yaml", "alerts-test.yaml", "dashboard.json"):
        named = set(_METRIC.findall((MONITORING / file).read_text("utf-8")))
        assert named
        assert named - exposed() == set(), file


def test_panels_of_the_dashboard_ask_for_metrics_of_ours_alone() -> None:
    """A Prometheus without other exporters can answer."""
    panels = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))["panels"]
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert all(_METRIC.search(target["expr"]) for target in panel["targets"])
            assert not any("node_" in target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("file", ["README.md", "alerts.yaml", "dashboard.json"])
def test_rates_look_back_further_than_to_the_last_reading_of_a_counter(file: str) -> None:
    """Those of threads and devices, which are read seldom where there are many guests."""
    counter = r"vsrtune_(?:thread|interface|tap)_\w+_total(?:\{[^}]*\})?\[(.+?)\]"
    assert set(re.findall(counter, (MONITORING / file).read_text("utf-8"))) == {"5m"}
    assert 2 * 10 * ROUND * SELDOM < 5 * 60, "of the default interval, 10 s"


def test_every_alert_is_explained_and_tested() -> None:
    alerts = re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yaml").read_text("utf-8"))
    tested = set(
        re.findall(r"alertname: (\w+)", (MONITORING / "alerts-test.yaml").read_text("utf-8"))
    )
    assert set(alerts) == tested
    rules = YAML(typ="safe").load(MONITORING / "alerts.yaml")["groups"][0]["rules"]
    for rule in rules:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert f"**{rule['alert']}**" in section(REPO / page, anchor), rule["alert"]


@pytest.mark.parametrize(
    "words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts-test.yaml")]
)
def test_prometheus_takes_the_rules(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [program("promtool"), *words], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
