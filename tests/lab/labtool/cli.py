"""The command line of the lab."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from . import (
    cache,
    chroot,
    container,
    debugkernel,
    emulator,
    guests,
    hosttools,
    image,
    kmod,
    linked,
    package,
    pair,
    progress,
    session,
)
from .errors import LabError
from .options import NICS, Options
from .releases import RELEASES

_IN_IMAGE = Path(__file__).resolve().parent.parent / "inimage"


def main() -> int:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _dispatch(_parser().parse_args())
    except LabError as error:
        progress.error(str(error), error.hint)
        return 125
    except subprocess.TimeoutExpired as expired:
        progress.error(f"{expired.cmd[0]} did not end within {expired.timeout:.0f} s")
        return 125
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


def _terminated(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.verb == "clean":
        cache.clean()
        return 0
    if arguments.verb == "build":
        for name in [arguments.release] if arguments.release else RELEASES:
            built = _image(name)
            progress.step(f"{name}: {built.place}")
        return 0
    if arguments.verb == "package":
        arguments.output.mkdir(parents=True, exist_ok=True)
        for made in sorted(package.get().parent.glob("*.deb")):
            print(shutil.copy(made, arguments.output))
        return 0
    if arguments.verb == "container":
        arguments.output.mkdir(parents=True, exist_ok=True)
        print(shutil.copy(container.get(package.get()), arguments.output))
        return 0
    if arguments.verb == "kmod":
        return _kmod(arguments)
    if arguments.verb == "pair":
        return _pair(arguments)
    options = _options(arguments)
    hosttools.ensure(hosttools.BOOT)
    disk = _image(options.release)
    deb = package.get() if options.install else None
    if options.kernel:
        disk = debugkernel.get(disk, options.kernel)
    module = kmod.get(disk) if options.kmod and kmod.present() else None
    routing = chroot.output(disk, "frr", _IN_IMAGE / "pack-frr") if options.frr else None
    agent = chroot.output(disk, "agent", _IN_IMAGE / "pack-agent") if options.agent else None
    contained = container.brought(disk, package.get()) if options.container else {}
    brought = session.Brought(deb, module, routing, contained, agent)
    return session.run(options, emulator.get(), disk, brought)


def _kmod(arguments: argparse.Namespace) -> int:
    if not kmod.present():
        raise LabError("this tree has no kernel module: kmod/Kbuild is missing")
    for name in [arguments.release] if arguments.release else RELEASES:
        built = _image(name)
        print(kmod.module(kmod.get(built)), flush=True)
        kmod.check(built)
    return 0


def _pair(arguments: argparse.Namespace) -> int:
    hosttools.ensure(hosttools.BOOT)
    disk = _image(arguments.release)
    emulator.get()
    if kmod.present():
        kmod.get(disk)
    words = [
        "--release", arguments.release, "--cpus", str(arguments.cpus),
        "--guests", str(arguments.guests), "--nic", "e1000e",
    ]  # fmt: skip
    return pair.run(words, disk, package.get(), arguments.timeout, arguments.command)


def _image(name: str) -> image.Image:
    def bake(fresh: image.Image) -> None:
        session.bake(Options(release=name, mode="bake"), emulator.get(), fresh)

    return image.get(RELEASES[name], bake)


def _options(arguments: argparse.Namespace) -> Options:
    command = tuple(getattr(arguments, "command", ()))
    vcpus = arguments.queues if arguments.vcpus is None else arguments.vcpus
    if vcpus < arguments.queues:
        # Linux enables no more queue pairs than it has CPUs.
        raise LabError(f"--queues {arguments.queues} needs at least as many --vcpus")
    if max(arguments.guests, len(arguments.guest_name)) > guests.MAX_GUESTS:
        raise LabError(f"at most {guests.MAX_GUESTS} guests")
    if arguments.kernel and (arguments.guests or arguments.guest_name or arguments.plain_qemu):
        raise LabError(f"--kernel {arguments.kernel} has no KVM", hint="add --guests 0")
    share = arguments.share
    if share is not None and not share.is_dir():
        raise LabError(f"--share: {share} is not a directory")
    return Options(
        release=arguments.release,
        cpus=arguments.cpus,
        guests=max(arguments.guests, len(arguments.guest_name)),
        guest_names=tuple(arguments.guest_name),
        vcpus=vcpus,
        queues=arguments.queues,
        busy=arguments.busy,
        nic=arguments.nic,
        plain_qemu=arguments.plain_qemu,
        apparmor=arguments.apparmor,
        ipv6=arguments.ipv6,
        frr=arguments.frr,
        agent=arguments.agent,
        container=arguments.container,
        install=not arguments.no_install,
        reboots=arguments.reboots,
        kmod=not arguments.no_kmod,
        kernel=arguments.kernel,
        share=None if share is None else share.resolve(),
        timeout=getattr(arguments, "timeout", 0),
        quiet_failure=getattr(arguments, "quiet_failure", False),
        member=getattr(arguments, "member", None),
        command=command,
        mode=arguments.verb,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab", description="Real KVM hosts with virtual routers, emulated. See README.md."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    build = verbs.add_parser("build", help="make the images ahead of time")
    build.add_argument("--release", choices=RELEASES, help="default: all")

    topology = argparse.ArgumentParser(add_help=False)
    add = topology.add_argument
    add("--release", choices=RELEASES, default="bookworm")
    add("--cpus", type=_count, default=3, metavar="N", help="CPUs of the lab host (3)")
    add("--guests", type=_count_or_none, default=1, metavar="N", help="libvirt routers (1)")
    add("--guest-name", action="append", default=[], metavar="NAME", help="instead of vr1, ...")
    add("--vcpus", type=_count, metavar="N", help="of each router (as many as queues)")
    add("--queues", type=_count, default=1, metavar="N", help="of each router NIC (1)")
    add(
        "--busy", type=_count_or_none, default=0, metavar="N", help="spinning processes in each (0)"
    )
    add("--nic", choices=NICS, default="veth", help="lower devices p0 and p1")
    add("--plain-qemu", action="store_true", help="one more router, pq1, without libvirt")
    add("--apparmor", action="store_true", help="AppArmor and audit are on, as Debian has them")
    add("--ipv6", action="store_true", help="the routers forward IPv6, too")
    add("--agent", action="store_true", help="balancers have the QEMU guest agent")
    add("--frr", action="store_true", help="the libvirt routers have FRR, peers and a firewall")
    add("--container", action="store_true", help="the image of vsrtune's container, and crun")
    add("--share", type=Path, metavar="DIR", help="appears as /mnt/share, writable")
    add("--reboots", action="store_true", help="CMD may have the lab rebooted, and runs again")
    add("--no-install", action="store_true", help="do not install the working tree")
    add("--kernel", choices=debugkernel.KINDS, default="", help="with detectors; wants --guests 0")
    add("--no-kmod", action="store_true", help="leave the tree's kernel module out")

    run = verbs.add_parser("run", parents=[topology], help="run a command in a lab")
    run.add_argument(
        "--timeout", type=_count, default=900, metavar="S", help="of the command (900)"
    )
    run.add_argument("--quiet-failure", action="store_true", help="no logs when the command fails")
    run.add_argument("command", nargs="+", metavar="CMD", help="after --, with its arguments")
    # How `lab pair` starts each of its labs.
    run.add_argument("--member", type=_member, help=argparse.SUPPRESS)
    verbs.add_parser("shell", parents=[topology], help="a root shell in a lab")
    two = verbs.add_parser("pair", help="two linked labs, and a command here that reaches both")
    two.add_argument("--release", choices=RELEASES, default="bookworm")
    two.add_argument("--cpus", type=_count, default=3, metavar="N", help="CPUs of each host (3)")
    two.add_argument("--guests", type=_count, default=1, metavar="N", help="routers of each (1)")
    two.add_argument(
        "--timeout", type=_count, default=900, metavar="S", help="of the command (900)"
    )
    two.add_argument("command", nargs="+", metavar="CMD", help="after --, with its arguments")
    deb = verbs.add_parser("package", help="build the .deb of the working tree")
    deb.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="where to (.)")
    image_of = verbs.add_parser("container", help="build the container image of the working tree")
    image_of.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="where to (.)")
    module = verbs.add_parser("kmod", help="build and check the kernel module of the working tree")
    module.add_argument("--release", choices=RELEASES, help="default: all")
    verbs.add_parser("clean", help="remove all cached images and packages")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _member(text: str) -> linked.Member:
    number, port, place = text.split(":", 2)
    return linked.Member(int(number), Path(place), int(port))


def _count_or_none(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


if __name__ == "__main__":
    sys.exit(main())
