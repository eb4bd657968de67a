"""What keeps a Linux process in, besides namespaces and seccomp: rlimits, no capabilities, Landlock.

Each measure returns whether it took hold; none is assumed. Written with ctypes so that it needs no
package and can run in a freshly forked child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import resource
import struct
import sys
import sysconfig
from typing import NamedTuple

LIBC = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock during calls.
_HELD = ctypes.PyDLL(None, use_errno=True)
# Looked up here, once, and not by each child: what a child writes to has to be copied.
prctl, syscall, _c_fork = LIBC.prctl, LIBC.syscall, _HELD.fork

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
MAX_PROCESSES = 64


def fork() -> int:
    """Fork a process that has a single thread; 0 in the child.

    The C library's own call: os.fork lets each module that registered for it write to the child's memory,
    which then has to be copied, and takes twice as long. None of these modules matters with one thread.
    """
    process = int(_c_fork())
    if process < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return process


def address_of(data: bytes) -> int:
    """Return where bytes lie; they must be kept for as long as the address is used."""
    return int(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0)


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
        prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
        # 0: the parent lives outside of this process's namespace.
        if os.getppid() not in (parent, 0):
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_privileges() -> bool:
    """Give up the way to new privileges and all capabilities."""
    if sys.platform != "linux":
        return False
    ok = bool(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    number = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine)
    if number is None:
        return False
    version_3 = struct.pack("Ii", 0x20080522, 0)
    return bool(syscall(number, version_3, bytes(24)) == 0) and ok


# --------------------------------------------------------------------------- files


def remove(folder: str) -> None:
    """Remove a folder with all that it holds, as far as that can be done."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in folders + files:
            entry = os.path.join(path, name)  # noqa: PTH118
            with contextlib.suppress(OSError):
                os.unlink(entry)  # noqa: PTH108
            with contextlib.suppress(OSError):
                os.rmdir(entry)  # noqa: PTH106
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # noqa: PTH106


class Place(NamedTuple):
    """What a sandbox's candidates are locked in by: an empty folder, its Landlock ruleset, the seccomp
    filter, /dev/null, and their limits.
    """

    folder: str
    ruleset: int | None
    filter: bytes | None
    null: int
    cpu_s: float
    memory_bytes: int

    def remove(self) -> None:
        """Remove the folder and close the descriptors; to be called once no candidate is left."""
        remove(self.folder)
        for descriptor in (self.ruleset, self.null):
            if descriptor is not None:
                os.close(descriptor)


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
    above = {*readable_paths()}
    for path in readable_paths():
        above |= {entry.path for entry in _entries(path) if entry.name.startswith("python")}
    found = {
        entry.path
        for path in above
        for entry in _entries(path)
        if entry.name in ("site-packages", "dist-packages")
    }
    return tuple(sorted(path for path in found if not os.path.islink(path)))  # noqa: PTH114


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except OSError:
        return []


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


def prepare_files(folder: str) -> int | None:
    """Return a Landlock ruleset: reading in `folder` and by `reading_rules`, and no other use of any file.

    It is a descriptor that any number of processes may restrict themselves by. None without Landlock.
    """
    if sys.platform != "linux":
        return None
    abi = syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return None
    rights = _FS_RIGHTS_BY_ABI[max(version for version in _FS_RIGHTS_BY_ABI if version <= abi)]
    attributes = struct.pack("Q", rights)
    if abi >= 4:
        attributes += struct.pack("Q", _TCP_BIND_AND_CONNECT)
    if abi >= 6:
        attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = int(syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    if ruleset < 0:
        return None
    for path, wanted in {**reading_rules(), folder: _READ_DIR}.items():
        _allow(ruleset, path, wanted)
    return ruleset


def restrict_files(ruleset: int | None) -> bool:
    """Restrict this process by a ruleset. False without one."""
    if ruleset is None:
        return False
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(syscall(_RESTRICT_SELF, ruleset, 0) == 0)


def _allow(ruleset: int, path: str, wanted: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    allowed = wanted if os.path.isdir(path) else wanted & _READ_FILE  # noqa: PTH112
    syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, handle), 0)
    os.close(handle)
