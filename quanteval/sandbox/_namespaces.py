"""Linux namespaces: no network, no shared memory, a file system that holds Python alone, own process ids.

Everything here may be forbidden (by the container, by AppArmor); the functions say what was allowed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from quanteval.sandbox._isolate import LIBC

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_READ_ONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
# Flags that a mount in a new user namespace must keep, as statvfs and as mount spell them.
_KEPT = {2: _NOSUID, 4: _NODEV, 8: _NOEXEC, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Where the new root is mounted, unseen by other processes: a folder that every Linux has and that
# holds nothing Python reads.
_MOUNT_POINT = "/sys"


def leave_network() -> bool:
    """Move this process into user, network, IPC and mount namespaces of its own."""
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(_NEWUSER | _NEWNET | _NEWIPC | _NEWNS) != 0:
        return False
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        try:
            handle = os.open(f"/proc/self/{name}", os.O_WRONLY)
            try:
                os.write(handle, text.encode())
            finally:
                os.close(handle)
        except OSError:
            # Without the maps nothing can be mounted, but the network is gone.
            break
    return True


def leave_file_system(readable: Sequence[str], hidden: Sequence[str]) -> bool:
    """Swap the root for an empty one where `readable` is seen, read-only, and /tmp is empty.

    The folders of `hidden` seem empty.

    To be called after `leave_network`.
    """
    try:
        _mount("none", "/", None, _REC | _PRIVATE)
        _mount("tmpfs", _MOUNT_POINT, "tmpfs", _NOSUID | _NODEV, b"size=1m,mode=755")
        for path in readable:
            _show(path, _MOUNT_POINT + path)
        for path in hidden:
            _mount("none", _MOUNT_POINT + path, "tmpfs", _NOSUID | _NODEV | _READ_ONLY)
        os.mkdir(_MOUNT_POINT + "/tmp", 0o700)  # noqa: PTH102
        os.chdir(_MOUNT_POINT)
        # With both names the same, the old root lies on top of the new one and is taken off.
        _checked(LIBC.syscall(_PIVOT_ROOT.get(os.uname().machine, -1), b".", b"."))
        _checked(LIBC.umount2(b".", _DETACH))
        os.chdir("/")
    except OSError:
        return False
    return True


def number_processes_apart() -> bool:
    """Give the children of this process a namespace of process ids: when its first ends, all end."""
    return sys.platform == "linux" and bool(LIBC.unshare(_NEWPID) == 0)


def _show(source: str, target: str) -> None:
    if os.path.isdir(source):  # noqa: PTH112
        os.makedirs(target, exist_ok=True)  # noqa: PTH103
    elif not os.path.exists(target):  # noqa: PTH110
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, target, None, _BIND | _REC)
    found = os.statvfs(target).f_flag
    kept = sum(flag for seen, flag in _KEPT.items() if found & seen)
    _mount("none", target, None, _REMOUNT | _BIND | _READ_ONLY | kept)


def _mount(
    source: str, target: str, kind: str | None, flags: int, data: bytes | None = None
) -> None:
    _checked(
        LIBC.mount(
            source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data
        )
    )


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
