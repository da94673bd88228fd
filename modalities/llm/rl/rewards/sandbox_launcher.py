"""Runs one program under limits. `sandbox.run` starts this file as a process of its own; it needs the standard library
alone, and imports nothing of ours.

    python -I -S -B sandbox_launcher.py FOLDER STATUS

FOLDER holds `job.json`; the descriptor STATUS is told what is not enforced, and how the program ended, one JSON object
a line. Standard input and output are the program's.

Three processes: this one, which leaves for namespaces of its own; the first process in them, with whose end the kernel
ends all others there; and the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, RDONLY, NOSUID = 442, -100, 0x8000, 1, 2  # the number is the same everywhere
PR_SET_NO_NEW_PRIVS = 38
MIB = 1 << 20

libc: Any = ctypes.CDLL(None, use_errno=True)


class Attributes(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def leave() -> bool:
    """Move to new namespaces: of the network, processes, mounts and System V objects. False: not allowed."""
    kinds = NEWNS | NEWIPC | NEWPID | NEWNET
    try:
        if os.getuid() == 0:
            checked(libc.unshare(kinds))
            return True
        user, group = os.getuid(), os.getgid()
        checked(libc.unshare(kinds | NEWUSER))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except (OSError, AttributeError):
        return False
    return True


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    checked(libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode()))


def close_files(folder: str, needed: list[str], size: int) -> None:
    """All files become read-only, those of homes and of other programs' temporary folders disappear, and `folder` is an
    empty file system of `size` MiB. What the program needs of Python stays."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    attributes = Attributes(RDONLY | NOSUID, 0, 0, 0)
    size_of = ctypes.c_size_t(ctypes.sizeof(attributes))
    checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size_of))
    hidden = {os.path.expanduser("~"), "/root", "/run", "/tmp", "/var/tmp", os.path.dirname(folder)}
    for path in [*needed, folder]:
        parents = [path[:at] for at, sign in enumerate(path) if sign == "/" and at]
        hidden |= {parent for parent in parents if not os.stat(parent).st_mode & 0o001}
    for place in sorted(hidden):
        if place != "/" and os.path.isdir(place):
            hide(place, [path for path in needed if path.startswith(place + "/") and os.path.exists(path)])
    os.makedirs(folder, exist_ok=True)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size}m,nr_inodes=4096,mode=0755")


def hide(place: str, kept: list[str]) -> None:
    """Lay an empty folder over `place`, in which only `kept` is seen."""
    opened = [(path, os.open(path, os.O_PATH)) for path in kept]  # type: ignore[attr-defined,unused-ignore]
    mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=256,mode=0755")
    for path, descriptor in opened:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)


def start(job: dict[str, Any], folder: str, is_apart: bool, own_files: bool) -> None:
    """Become the program; never returns."""
    os.chdir(folder)
    user = os.getuid()
    if user == 0 and own_files:
        user = 2_000_000_000 + job["number"] % 100_000_000  # nobody's, so that its processes can be counted
        os.chown(folder, user, user)
    running = 0 if user != os.getuid() or is_apart else threads_of(user)
    for kind, most in (
        (resource.RLIMIT_AS, job["memory"] * MIB),
        (resource.RLIMIT_FSIZE, job["disk"] * MIB),
        (resource.RLIMIT_CPU, int(job["timeout"]) + 2),
        (resource.RLIMIT_NPROC, running + job["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.execve(job["python"], [job["python"], "-I", "-B", "program.py"], job["environment"])


def threads_of(user: int) -> int:
    """How many processes and threads a user has, which a limit would count too."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return found


def supervise(job: dict[str, Any], folder: str, is_apart: bool, own_files: bool, status: int) -> None:
    """Run the program and tell how it ended."""
    if is_apart:
        with contextlib.suppress(OSError):  # the old one shows processes that the program can't touch
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    program = os.fork()
    if program == 0:
        try:
            start(job, folder, is_apart, own_files)
        except BaseException as error:
            tell(status, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(127)
    while True:
        ended, code = os.wait()
        if ended == program:
            break
    tell(status, {"code": os.waitstatus_to_exitcode(code)})


def tell(status: int, what: dict[str, Any]) -> None:
    os.write(status, json.dumps(what).encode() + b"\n")


def main() -> None:
    folder, status = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(status, False)
    with open(os.path.join(folder, "job.json"), encoding="utf-8") as file:
        job = json.load(file)
    is_apart = sys.platform == "linux" and leave()
    own_files = False
    missing = [] if is_apart else ["the network", "processes that leave their session", "files outside of the folder"]
    if is_apart:
        try:
            close_files(folder, job["needed"], job["disk"])
            own_files = True
        except (OSError, AttributeError) as error:
            missing.append(f"files outside of the folder ({error})")
    if os.getuid() == 0 and not own_files:
        missing.append("the number of processes, and reading what only root may read")
    tell(status, {"missing": missing})
    with open(os.path.join(folder, "program.py"), "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["source"])
    if is_apart:
        first = os.fork()
        if first == 0:
            try:
                supervise(job, folder, is_apart, own_files, status)
            finally:
                os._exit(0)
        os.waitpid(first, 0)
    else:
        supervise(job, folder, is_apart, own_files, status)


if __name__ == "__main__":
    main()
