#!/usr/bin/python3
"""The lab's end of the matrix: makes the runs of /mnt/share/todo.json, one after another.

Each result is put into /mnt/share/raw as soon as it is there, so an interrupted matrix
goes on with the next run. Exits 0 when all is done, 75 when the time was up before,
1 when a run failed (the others were made all the same).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

SHARE = Path("/mnt/share")
# Where the package nslab is.
HERE = Path(__file__).resolve().parent
SPECS = Path("/run/results")
GROUPS = Path("/etc/vsrtune/groups")
TIME_UP = 75
# Many routes lie below this one, and so do the destinations of many flows.
PREFIX = "10.128.0.0/9"
NATIVE_PEER = "10.20.250.2"
COVERED = 1 << 20
# An emulated guest takes a millisecond or more for a route; it tells after so many.
CHUNK = 1024
FILL_SECONDS = 200


def say(text: str) -> None:
    print(f"results: {text}", flush=True)


def command(*words: str, **more: Any) -> str:
    """Standard output; a failure raises with what the command said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}: {done.stdout}{done.stderr}".strip())
    return done.stdout


def read_yaml(path: str) -> dict[str, Any]:
    from ruamel.yaml import YAML

    found: dict[str, Any] = YAML(typ="safe").load(Path(path).read_text())
    return found


# -- guests -------------------------------------------------------------------------------


def prefixes(count: int, peer: str) -> list[str]:
    """Input of `ip -batch`: so many prefixes, a power of two, that together cover the
    first COVERED addresses of PREFIX."""
    if not count:
        return []
    size = COVERED // count
    length = 33 - size.bit_length()
    lines = []
    for number in range(count):
        base = (10 << 24) + (128 << 16) + number * size
        address = ".".join(str(base >> shift & 255) for shift in (24, 16, 8, 0))
        lines.append(f"route add {address}/{length} via {peer}\n")
    return lines


def rule_lines(count: int) -> list[str]:
    """Input of `ip -batch`: so many routing rules that no frame of ours matches, each of which
    every frame is compared with."""
    return [
        f"rule add from 100.64.{number >> 8}.{number & 255} lookup main\n"
        for number in range(count)
    ]


def filled_archive(index: int, wanted: dict[str, Any]) -> Path:
    """An initramfs for router ``index`` that also gives it routes and rules: the lab's own
    with iproute2 behind it, since busybox would need a process for each of them."""
    top = SPECS / f"filled{index}"
    ip = Path("/usr/sbin/ip") if Path("/usr/sbin/ip").exists() else Path("/sbin/ip")
    libraries = [
        word
        for line in command("ldd", str(ip)).splitlines()
        for word in line.split()
        if word.startswith("/")
    ]
    for source in [str(ip), *libraries]:
        # Where the loader looks; /lib is a directory of its own in the archive.
        target = top / (source if source != str(ip) else "/iproute/ip").lstrip("/")
        if source.startswith("/usr/lib/"):
            target = top / source.removeprefix("/usr/").lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(source).read_bytes())
        target.chmod(0o755)
    lines = prefixes(wanted["routes"] or 0, f"10.20.{index}.2") + rule_lines(wanted["rules"])
    for start in range(0, len(lines), CHUNK):
        name = f"lines{start + len(lines[start : start + CHUNK]):07}.batch"
        (top / name).write_text("".join(lines[start : start + CHUNK]))
    script = top / "fill-init"
    script.write_text(
        "#!/bin/busybox sh\n"
        "export PATH=/bin\n"
        # The shell opens it as standard input of what it runs in the background.
        "busybox mknod /dev/null c 1 3\n"
        "(\n"
        "\texec >/dev/console 2>&1\n"
        "\tuntil [ -e /proc/net/route ] && ip route | busybox grep -q '^10.128'; do sleep 1; done\n"
        "\tfor batch in /lines*.batch; do\n"
        '\t\t/iproute/ip -batch "$batch" && echo "router: added $batch"\n'
        "\tdone\n"
        "\techo 'router: tables are filled'\n"
        ") &\n"
        "exec /init\n"
    )
    script.chmod(0o755)
    archive = SPECS / f"filled{index}.cpio"
    names = "".join(f"{path.relative_to(top)}\n" for path in sorted(top.rglob("*")))
    packed = subprocess.run(
        ["busybox", "cpio", "-o", "-H", "newc"], cwd=top, input=names.encode(),
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    archive.write_bytes(Path("/run/lab/router.cpio").read_bytes() + packed)
    return archive


def alike(own: list[str], theirs: list[str]) -> list[str]:
    """What another router is told to be, for a router to be it too: on interfaces with the
    other's MACs, and on its own ones."""
    roles = [[word for word in words if word.startswith("nic=")] for words in (own, theirs)]
    also = []
    for mine, other in zip(*roles, strict=True):
        mac = mine.removeprefix("nic=").partition(",")[0]
        also.append(f"nic={mac},{other.partition(',')[2]}")
    return roles[1] + also


def prepare_guest(index: int, name: str, wanted: dict[str, Any]) -> None:
    """Define the lab's router anew as the matrix wants it, and wait until it forwards."""
    usual = {"vcpus": 1, "queues": 1, "routes": None, "rules": 0, "like": None, "busy": 0}
    if wanted == usual:
        return
    say(f"{name}: {wanted}")
    domain = ET.fromstring(command("virsh", "dumpxml", "--inactive", name))
    system = domain.find("os")
    assert system is not None
    words = system.findtext("cmdline", "").split()
    words[words.index("busy=0")] = f"busy={wanted['busy']}"
    filled = bool(wanted["routes"] or wanted["rules"])
    if filled or wanted["routes"] is not None:
        right = next(i for i, word in enumerate(words) if f"10.20.{index}.1/24" in word)
        words[right] += f",{PREFIX}"
        if filled:
            words.append("rdinit=/fill-init")
            archive = filled_archive(index, wanted)
            element = system.find("initrd")
            assert element is not None
            element.text = str(archive)
    if wanted["like"] is not None:
        other = ET.fromstring(command("virsh", "dumpxml", "--inactive", f"vr{wanted['like']}"))
        words = alike(words, other.findtext("os/cmdline", "").split()) + words
    element = system.find("cmdline")
    assert element is not None
    element.text = " ".join(words)
    count = domain.find("vcpu")
    assert count is not None
    count.text = str(wanted["vcpus"])
    for interface in domain.iter("interface"):
        driver = interface.find("driver")
        if driver is not None and wanted["queues"] > 1:
            driver.set("queues", str(wanted["queues"]))
    path = SPECS / f"{index}.xml"
    path.write_text(ET.tostring(domain, encoding="unicode"))
    command("virsh", "-q", "destroy", name)
    command("virsh", "-q", "define", str(path))
    command("lab-guest", "start", name)
    if filled:
        wait_until_filled(index, name)


def wait_until_filled(index: int, name: str) -> None:
    log = Path(f"/var/log/libvirt/qemu/router{index}.log")
    began = time.monotonic()
    while "tables are filled" not in (text := log.read_text(errors="replace")):
        if time.monotonic() - began > FILL_SECONDS:
            last = "\n".join(text.splitlines()[-5:])
            what = f"has not filled its tables within {FILL_SECONDS} s"
            raise RuntimeError(f"{name} {what}:\n{last}")
        time.sleep(1)
    say(f"{name}: tables filled after {time.monotonic() - began:.0f} s")


# -- runs ---------------------------------------------------------------------------------


def routers(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The routers of the run as the lab describes them, maybe with another destination."""
    native = run["router"] == "native"
    base = read_yaml("/run/lab/bench-native.yaml" if native else "/run/lab/bench.yaml")
    # In a pod the first router has another name.
    if run["router"].startswith("kubevirt:"):
        base["routers"][0]["guest"] = run["router"]
    names = list(run["by_router"]) or list(run["together"]) or [run["router"]]
    found = [r for r in base["routers"] if native or r.get("guest") in names]
    if run["guests"]:
        del found[0]["guest"], found[0]["forth"]["mac"]
        found[0]["guests"] = list(run["guests"])
    if not run["traffic"].get("bidirectional"):
        for router in found:
            router.pop("back", None)
    if run["destination"] is not None:
        for router in found:
            router["forth"]["destination"] = run["destination"]
    return found


def rates(run: dict[str, Any]) -> list[int]:
    """As written, or from the highest median rate that another run forwarded."""
    if run["scaled"] is None:
        return list(run["rates"])
    highest = peak(run)
    return [hundreds(highest * factor) for factor in run["scaled"][1]]


def hundreds(rate: float) -> int:
    return max(100, round(rate / 100) * 100)


def peak(run: dict[str, Any]) -> float:
    """The highest median rate forwarded in the run that scales this one, by any of its
    configurations."""
    source, _ = run["scaled"]
    result = json.loads((SHARE / "raw" / f"{source}.json").read_text())
    by_load: dict[tuple[str, float], list[float]] = {}
    for trial in result["trials"]:
        load = (trial["configuration"], sum(trial["load"]["pps"].values()))
        by_load.setdefault(load, []).append(trial["forwarded"] / trial["seconds"])
    highest = max(median(found) for found in by_load.values())
    say(f"{run['key']}: the peak of {source} is {highest:.0f} pps")
    return highest


def method(run: dict[str, Any], repeats: int) -> dict[str, Any]:
    """A sweep, or with loads of their own for several routers a test of fairness."""
    common = {"repeats": repeats, **{key: run[key] for key in ("seconds", "latency", "reordering")}}
    if not run["by_router"]:
        sizes = {"sizes": list(run["sizes"])} if run["sizes"] else {}
        return {"kind": "sweep", "rates": rates(run), **sizes, **common}
    highest = peak(run)
    loads = {name: hundreds(highest * factor) for name, factor in run["by_router"].items()}
    # The one rate stands for routers without a load of their own, of which there are none.
    return {"kind": "fairness", "rates": [hundreds(highest)], "by_router": loads, **common}


def write_specs(run: dict[str, Any]) -> list[str]:
    """One file for each configuration; all but the first only name theirs."""
    place = SPECS / run["key"]
    place.mkdir(parents=True, exist_ok=True)
    base = read_yaml("/run/lab/bench.yaml")
    repeats = run["pairs"] if len(run["configurations"]) == 1 else 1
    paths = []
    for number, wanted in enumerate(run["configurations"]):
        configuration = dict(wanted)
        spec: dict[str, Any] = {"name": configuration.pop("name")}
        text = configuration.pop("policy", None)
        if text is not None:
            policy = place / f"policy{number}.yaml"
            policy.write_text(text)
            configuration["policy"] = str(policy)
        spec["configuration"] = configuration
        if number == 0:
            spec |= {
                "left": base["left"],
                "right": base["right"],
                "routers": routers(run),
                "traffic": run["traffic"] or {"size": 60},
                "method": method(run, repeats),
                "limits": {"pps": 400000, "seconds": 60},
            }
        path = place / f"{number}.yaml"
        path.write_text(json.dumps(spec, indent=1))
        paths.append(str(path))
    return paths


def words_for(run: dict[str, Any], fresh: Path) -> list[str]:
    """The command that makes a run and leaves its result in ``fresh``."""
    if run["bed"] is not None:
        spec = SPECS / f"{run['key']}.json"
        spec.parent.mkdir(parents=True, exist_ok=True)
        spec.write_text(json.dumps(run))
        python = ["env", f"PYTHONPATH={HERE}", sys.executable, "-B"]
        return [*python, "-m", "nslab", str(spec), str(fresh)]
    paths = write_specs(run)
    if run["sessions"]:
        words = [sys.executable, "-B", str(HERE / "sessions.py"), run["router"]]
        return [*words, str(run["pairs"]), str(run["seed"]), str(fresh), *paths]
    words = ["vsrtune", "bench"]
    words += ["run"] if len(paths) == 1 else ["compare", "--pairs", str(run["pairs"])]
    return [*words, "--seed", str(run["seed"]), "--json", str(fresh), *paths]


@contextlib.contextmanager
def grouped(wanted: dict[str, Any]) -> Iterator[None]:
    """The group that a run wants, if it wants one; its balancers have their rules."""
    if not wanted:
        yield
        return
    GROUPS.mkdir(parents=True, exist_ok=True)
    path = GROUPS / f"{wanted['name']}.yaml"
    path.write_text(json.dumps({"group": wanted}))
    sides = list(wanted["lower"])
    with contextlib.ExitStack() as stack:
        for name, served in wanted.get("balancers", {}).items():
            number = name.removeprefix("lb")
            command("lab-balancer", "start", number, *(str(sides.index(s)) for s in served))
            stack.callback(command, "lab-balancer", "stop", number)
            # It answers once its kernel runs, and only then are interfaces plugged in.
            command("lab-balancer", "run", number, input="true")
        command("vsrtune", "group", "create", str(path))
        stack.callback(command, "vsrtune", "group", "delete", wanted["name"])
        for name in wanted.get("balancers", {}):
            rules = command("vsrtune", "group", "rules", wanted["name"], name)
            command("lab-balancer", "load", name.removeprefix("lb"), input=rules)
        yield


def measure(run: dict[str, Any]) -> None:
    """One run; its result lands in the share, whole or not at all."""
    target = SHARE / "raw" / f"{run['key']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    words = words_for(run, fresh)
    log = SHARE / "log" / f"{run['key']}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for before in run["before"]:
        command(*before)
    try:
        with grouped(run["group"]), log.open("w") as output:
            code = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False)
    finally:
        for after in run["after"]:
            command(*after)
    if code.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("vsrtune:")]
        raise RuntimeError("\n".join([f"status {code.returncode}", *(errors or lines[-12:])]))
    fresh.replace(target)


def main() -> int:
    began = time.monotonic()
    todo = json.loads((SHARE / "todo.json").read_text())
    SPECS.mkdir(parents=True, exist_ok=True)
    # The host that is measured must not tune by itself.
    subprocess.run(["systemctl", "stop", "vsrtune"], capture_output=True, check=False)
    for index, wanted in enumerate(todo["guests"], start=1):
        prepare_guest(index, f"vr{index}", wanted)
    if todo["native_routes"] is not None:
        command("ip", "route", "add", PREFIX, "via", NATIVE_PEER, "dev", "p1")
        lines = prefixes(todo["native_routes"], f"{NATIVE_PEER} dev p1")
        command("ip", "-batch", "-", input="".join(lines))
    failed = 0
    for run in todo["runs"]:
        spent = time.monotonic() - began
        if spent + run["expected"] > todo["budget"]:
            say(f"{spent:.0f} of {todo['budget']} s are spent: {run['key']} is left for later")
            return 1 if failed else TIME_UP
        say(f"{run['key']}: about {run['expected']:.0f} s")
        start = time.monotonic()
        try:
            measure(run)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            failed += 1
            say(f"{run['key']}: FAILED: {error}")
        else:
            say(f"{run['key']}: measured in {time.monotonic() - start:.0f} s")
        os.sync()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
