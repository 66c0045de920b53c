# SPDX-License-Identifier: GPL-2.0-or-later
"""Decides who is a guest, once for each QEMU process, before its own statements are read.

Root of the host and libvirt are trusted. A process is not: it chooses its name, its command line,
its threads' names and its sockets. So vsrtune reads these only from a process that passes here, by
properties that it cannot choose:

- its users: real, effective and saved (/proc/PID/status),
- its executable: /proc/PID/exe is the very file (device and inode) of a path that only root can
  change, from ``/`` down. When a package upgrade has replaced that file, the process runs an
  unlinked one, which must be root's, and somebody must vouch for the process: libvirt for its own,
  root by running it, or an earlier pass of this daemon, which read it before the upgrade. A
  libvirt in a container has its QEMU there, at a path that this host may not have; that file must
  be root's too,
- its cgroup: nobody but root makes the cgroups of libvirt's domains, Proxmox VE's guests and the
  kubelet's containers.

A process in libvirt's cgroups becomes a guest that policies reach only when libvirt lists the
domain and something that only root can write names the process: the domain's pid file or, where
QEMU's user owns that file's directory (libvirt 11 on Debian 13), the systemd scope whose name has
the domain's id. While libvirt does not answer, nothing new is confirmed.

A QEMU of root in the scope that Proxmox VE has systemd make for a guest, named by its VMID, is that
guest.

A QEMU in a container of the kubelet's is a guest of KubeVirt if the container runtime's file about
that container, which only root can change, says so (host/kubevirt.py). Its user and the path of its
executable are the container's, and do not count; the executable must be root's.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from vsrtune.core.errors import ObserveError
from vsrtune.host import kubevirt
from vsrtune.host.cgroupfs import MOUNT, libvirt_role
from vsrtune.host.filesystem import FileStat, HostRoot
from vsrtune.host.kubevirt import container_of, machine_in
from vsrtune.host.procfs import parse_status_uids

# Where the system's libvirt writes the pid of a domain's QEMU (virPidFileBuildPath).
PID_FILES = "/run/libvirt/qemu"

DELETED = " (deleted)"
_KINDS = {stat.S_ISDIR: "directory", stat.S_ISREG: "regular file", stat.S_ISSOCK: "socket"}
_MISSING = ": there is no such file on this host"

# Where Proxmox VE's QEMUs listen for QMP.
MONITORS = "/run/qemu-server"
# The scope of a guest of Proxmox VE, whose VMIDs begin at 100 (qm(1)).
_PROXMOX = re.compile(r"qemu\.slice/([1-9][0-9]{2,8})\.scope", re.ASCII)

# Cgroups of libvirt's domains beyond those of cgroupfs.libvirt_role: the scope where libvirt makes
# no cgroups of its own in it, and libvirt's own where there is no scope either.
_HOME = re.compile(
    r"machine\.slice/machine-qemu\\x2d[^/]+\.scope(?:/.*)?"
    r"|system\.slice/(?:libvirtd|virtqemud)\.service(?:/.*)?",
    re.ASCII,
)

# A name without a letter or digit of ASCII leaves only the id (virDomainDriverGenerateMachineName).
_SCOPE = re.compile(
    r"(?:[^/]+\.slice/)+machine-qemu\\x2d([0-9]{1,9})(?:\\x2d[^/]*)?\.scope(?:/|$)", re.ASCII
)


class Standing(Enum):
    """The result of a decision on a process."""

    STRANGER = "stranger"  # nothing of it is believed or read
    PLAIN = "plain"  # of a user whom a policy names, and not in libvirt's cgroups
    UNKNOWN = "unknown"  # in libvirt's cgroups; libvirt has not said whose it is
    LISTED = "listed"  # the QEMU of a domain that our libvirt lists, or listed last
    FOREIGN = "foreign"  # another libvirt's


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one process. ``uid`` is its real user; ``why`` says why it is not believed,
    "" unless it is a stranger; ``vmid`` is the guest of Proxmox VE in whose scope it runs,
    ``machine`` the guest of KubeVirt in whose pod it runs (NAMESPACE/NAME), ``scopes`` are the
    ids of the libvirt domains in whose scopes it runs: one, but where cgroup v1 has several
    hierarchies."""

    pid: int
    start_time: int
    uid: int
    standing: Standing
    why: str = ""
    vmid: int | None = None
    machine: str = ""
    scopes: tuple[int, ...] = ()

    @property
    def believed(self) -> bool:
        """Whether its command line may be read."""
        return self.standing is not Standing.STRANGER


class Judge:
    """Decides on the processes of one pass, and checks every path once. ``users`` are those
    whose plain QEMUs may be guests; ``earlier`` says whether a process (pid, start time) passed
    before."""

    def __init__(
        self,
        root: HostRoot,
        users: frozenset[int] = frozenset([0]),
        earlier: Callable[[int, int], bool] = lambda pid, start_time: False,
    ) -> None:
        self._root = root
        self._users = users
        self._earlier = earlier
        self._problems: dict[str, str] = {}
        self._machines: dict[kubevirt.Container, tuple[str, str]] = {}

    def decide(self, pid: int, start_time: int, exe: str) -> Decision:
        """The decision on the process whose /proc/PID/exe points to ``exe``, as far as it can
        be made without libvirt. Raises OSError when the process is gone, ValueError for a
        /proc that cannot be read."""
        uids = parse_status_uids(self._root.read(f"/proc/{pid}/task/{pid}/status"))
        cgroup = self._root.read(f"/proc/{pid}/task/{pid}/cgroup")
        machine, why = self._machine(cgroup)
        libvirts = not machine and self.in_libvirts_cgroup(cgroup)
        scopes = (_PROXMOX.fullmatch(path) for path in self._roots_cgroups(cgroup))
        vmid = next((int(m[1]) for m in scopes if m is not None), None)
        if machine:
            # In the container's image, at a path that this host need not have.
            why = _not_roots(exe, self._root.stat(f"/proc/{pid}/exe"))
        elif not why and vmid is not None and uids != (0, 0, 0):
            users = ", ".join(map(str, sorted(set(uids))))
            why = f"it runs in the scope of Proxmox VE's guest {vmid}, and is user {users}'s"
        elif not why and not libvirts:
            why = self._wrong_user(uids)
        if not why and not machine:
            vouched = libvirts or self._earlier(pid, start_time)
            if not vouched and uids == (0, 0, 0) and exe.endswith(DELETED):
                vouched = self._has_hosts_root(pid)
            why = self._wrong_file(pid, exe, vouched, libvirts)
        standing = Standing.UNKNOWN if libvirts else Standing.PLAIN
        standing = Standing.STRANGER if why else standing
        domains = self._scopes(cgroup) if libvirts else ()
        return Decision(pid, start_time, uids[0], standing, why, vmid, machine, domains)

    def _machine(self, cgroup: str) -> tuple[str, str]:
        """The guest of KubeVirt in whose container a process runs that has this /proc/TID/cgroup
        ("": in none), and why that is not known."""
        found = (container_of(path) for path in self._roots_cgroups(cgroup))
        container = next((c for c in found if c is not None), None)
        if container is None:
            return "", ""
        # A pod chooses how many processes it has, and how large its configuration is.
        if container not in self._machines:
            self._machines[container] = self._machine_in(container)
        return self._machines[container]

    def _machine_in(self, container: kubevirt.Container) -> tuple[str, str]:
        problem = self.path_problem(container.config)
        if not problem:
            try:
                return machine_in(container, self._root.read(container.config)), ""
            except (OSError, ValueError) as error:
                problem = f"{container.config}: {error}"
        return "", f"it runs in a pod whose container is not known: {problem}"

    def monitor(self, vmid: int) -> str:
        """The QMP socket of a guest of Proxmox VE. Raises ObserveError when it is not root's."""
        path = f"{MONITORS}/{vmid}.qmp"
        problem = self._path_problem(path, stat.S_ISSOCK)
        if problem:
            raise ObserveError(f"{problem}: not asked")
        return path

    def in_libvirts_cgroup(self, text: str) -> bool:
        """Whether /proc/TID/cgroup shows a cgroup that root's libvirt made."""
        return any(
            libvirt_role(path) is not None or _HOME.fullmatch(path) is not None
            for path in self._roots_cgroups(text)
        )

    def in_scope(self, pid: int, number: int) -> bool:
        """Whether a process runs in the scope of the domain with this id."""
        try:
            return number in self._scopes(self._root.read(f"/proc/{pid}/task/{pid}/cgroup"))
        except OSError:
            return False

    def _scopes(self, text: str) -> tuple[int, ...]:
        """The ids of the domains for which systemd made the scopes in /proc/TID/cgroup
        (virSystemdMakeScopeName: libvirt gives its id and name, only root moves processes
        there)."""
        found = (_SCOPE.match(path) for path in self._roots_cgroups(text))
        return tuple(int(m[1]) for m in found if m is not None)

    def _roots_cgroups(self, text: str) -> Iterator[str]:
        """The cgroups in /proc/TID/cgroup that root made, without the leading slash. Users can
        make cgroups of any name below one that is theirs, with anything in it but a newline."""
        for line in text.rstrip("\n").split("\n"):
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            path = path.removeprefix("/")
            mount = MOUNT if number == "0" else f"{MOUNT}/{controllers}"
            if not self.path_problem(f"{mount}/{path}", directory=True):
                yield path

    @property
    def pid_files(self) -> bool:
        """Whether only root can write pid files."""
        return not self.path_problem(PID_FILES, directory=True)

    def process_of(self, name: str) -> tuple[int | None, str]:
        """The pid in libvirt's pid file of the domain ``name``; otherwise None and the reason."""
        path = f"{PID_FILES}/{name}.pid"
        if "/" in name:
            return None, f"{name!r} cannot be the name of a pid file"
        problem = self.path_problem(path)
        if problem:
            return None, f"its pid file is not to be trusted: {problem}"
        try:
            text = self._root.read(path).strip()
        except OSError as error:
            return None, f"its pid file {path} cannot be read: {error.strerror}"
        if not text.isdecimal() or len(text) > 10:
            return None, f"its pid file {path} holds no pid"
        return int(text), ""

    def path_problem(self, path: str, *, directory: bool = False) -> str:
        """Why somebody other than root could change the file that ``path`` names; "" when nobody
        can. It must be a directory if ``directory``, otherwise a regular file."""
        if path not in self._problems:
            kind = stat.S_ISDIR if directory else stat.S_ISREG
            self._problems[path] = self._path_problem(path, kind)
        return self._problems[path]

    def _path_problem(self, path: str, kind: Callable[[int], bool]) -> str:
        # From the top: nothing below a directory of somebody else's is read. Whoever has a cgroup
        # may have thousands, one in another, so this is no recursion.
        for end in (end for end, letter in enumerate(path) if letter == "/" and path != "/"):
            above = path[:end] or "/"
            if above not in self._problems:
                self._problems[above] = self._own_problem(above, stat.S_ISDIR)
            if problem := self._problems[above]:
                return problem
        return self._own_problem(path, kind)

    def _own_problem(self, path: str, kind: Callable[[int], bool]) -> str:
        """``path_problem`` but for the directories above."""
        try:
            found = self._root.stat(path, follow=False)
        except FileNotFoundError:
            return f"{path}{_MISSING}"
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not kind(found.mode):
            return f"{path} is no {_KINDS[kind]}"
        return _not_roots(path, found)

    def _wrong_user(self, uids: tuple[int, int, int]) -> str:
        if len(set(uids)) > 1:
            return f"it runs as the users {', '.join(map(str, sorted(set(uids))))} at once"
        if uids[0] not in self._users:
            return f"it is user {uids[0]}'s, and no policy for plain QEMU has `user: {uids[0]}`"
        return ""

    def _has_hosts_root(self, pid: int) -> bool:
        """Whether a process has the root directory of this host. Root of a container may give its
        own files any name."""
        theirs, ours = (self._root.stat(f"/proc/{p}/root") for p in (pid, 1))
        return (theirs.dev, theirs.ino) == (ours.dev, ours.ino)

    def _wrong_file(self, pid: int, exe: str, vouched: bool, libvirts: bool) -> str:
        problem = self.path_problem(exe)
        if not problem:
            named, runs = self._root.stat(exe, follow=False), self._root.stat(f"/proc/{pid}/exe")
            if (named.dev, named.ino) == (runs.dev, runs.ino):
                return ""
            problem = f"it runs another file than {exe} is"
        if not exe.endswith(DELETED):
            if libvirts and problem.endswith(_MISSING):
                # libvirt runs in a container, and its QEMU is a file there.
                return _not_roots(exe, self._root.stat(f"/proc/{pid}/exe"))
            return problem
        path = exe.removesuffix(DELETED)
        problem = self.path_problem(path.rpartition("/")[0] or "/", directory=True)
        if not problem:
            problem = _not_roots(f"the file that was {path}", self._root.stat(f"/proc/{pid}/exe"))
        if not problem and not vouched:
            problem = (
                f"{path} was replaced since it started, and nothing of root's vouches for it: "
                "start it again"
            )
        return problem


def _not_roots(path: str, found: FileStat) -> str:
    if found.uid != 0:
        return f"{path} belongs to user {found.uid}"
    if found.mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others than root may write {path} (mode {stat.S_IMODE(found.mode):04o})"
    return ""
