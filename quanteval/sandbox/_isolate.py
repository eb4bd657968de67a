"""What keeps a Linux process in, besides namespaces and seccomp: rlimits, no capabilities, Landlock.

Each measure returns whether it took hold; none is assumed. Written with ctypes so that it needs no
package and can run in a freshly forked child.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import math
import os
import platform
import resource
import struct
import sys
import sysconfig

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
MAX_PROCESSES = 64

# --------------------------------------------------------------------------- rlimits and privileges


def limit_resources(cpu_s: float, memory_bytes: int) -> None:
    """Limit CPU seconds, address space and open files; no core dumps, no file content can be written.

    The referee watches the CPU time exactly; the limit here is for when there is none to watch.
    """
    limit(resource.RLIMIT_CPU, math.ceil(2 * cpu_s) + 1)
    limit(resource.RLIMIT_AS, memory_bytes)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 64)


def limit_processes() -> None:
    """Limit the number of processes: of this user, with those of other programs, and never of root."""
    limit(resource.RLIMIT_NPROC, MAX_PROCESSES)


def limit(what: int, value: int) -> None:
    """Set one soft and hard limit, or leave the lower one that is already there."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process with this id, ends."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
        # 0: the parent lives outside of this process's namespace.
        if os.getppid() not in (parent, 0):
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_privileges() -> bool:
    """Give up the way to new privileges and all capabilities."""
    if sys.platform != "linux":
        return False
    ok = bool(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    number = {"x86_64": 126, "aarch64": 91}.get(platform.machine())
    if number is None:
        return False
    version_3 = struct.pack("Ii", 0x20080522, 0)
    return bool(LIBC.syscall(number, version_3, bytes(24)) == 0) and ok


# --------------------------------------------------------------------------- files

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Each version of Landlock knows more rights; asking for one that it does not know is an error.
_FS_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


@functools.cache
def readable_paths() -> tuple[str, ...]:
    """Return what a Python program needs to read: the standard library, shared libraries, time zones."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"}
    folders |= {os.path.join(sys.base_prefix, "lib", name) for name in _shared_libraries()}  # noqa: PTH118
    folders |= {"/dev/null", "/dev/urandom", "/etc/ld.so.cache"}
    return tuple(path for path in sorted(folders) if os.path.exists(path))  # noqa: PTH110


@functools.cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of installed packages below those: they bring suites and their tests along."""
    patterns = [
        os.path.join(path, level, name)  # noqa: PTH118
        for path in readable_paths()
        for level in ("", "python*")
        for name in ("site-packages", "dist-packages")
    ]
    found = {path for pattern in patterns for path in glob.glob(pattern)}  # noqa: PTH207
    return tuple(sorted(path for path in found if not os.path.islink(path)))  # noqa: PTH114


@functools.cache
def reading_rules() -> dict[str, int]:
    """Return Landlock rights by path: what is readable without what packages hold.

    A right holds for all that a folder contains, so a folder with packages gives way to its entries.
    """
    hidden = {os.path.realpath(path) for path in package_folders()}
    rules: dict[str, int] = {}
    left = [os.path.realpath(path) for path in readable_paths()]
    while left:
        path = left.pop()
        if path in hidden:
            continue
        if any(one.startswith(path + "/") for one in hidden):
            rules[path] = _READ_DIR
            # A link is no way out of the folder.
            left += [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
        else:
            rules[path] = _READ_FILE | _READ_DIR
    return rules


def _shared_libraries() -> list[str]:
    folder = os.path.join(sys.base_prefix, "lib")  # noqa: PTH118
    return [n for n in os.listdir(folder) if ".so" in n] if os.path.isdir(folder) else []  # noqa: PTH112, PTH208


def restrict_files(folder: str) -> bool:
    """Allow reading in `folder` and by `reading_rules`, and no other use of any file.

    False without Landlock.
    """
    if sys.platform != "linux":
        return False
    abi = LIBC.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    rights = _FS_RIGHTS_BY_ABI[max(version for version in _FS_RIGHTS_BY_ABI if version <= abi)]
    attributes = struct.pack("Q", rights)
    if abi >= 4:
        attributes += struct.pack("Q", _TCP_BIND_AND_CONNECT)
    if abi >= 6:
        attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path, wanted in {**reading_rules(), folder: _READ_DIR}.items():
            _allow(ruleset, path, wanted)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(LIBC.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, wanted: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    allowed = wanted if os.path.isdir(path) else wanted & _READ_FILE  # noqa: PTH112
    LIBC.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, handle), 0)
    os.close(handle)
