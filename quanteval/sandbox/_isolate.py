"""What keeps a Linux process in: Landlock for files, seccomp for system calls, no capabilities, rlimits.

Each measure returns whether it took hold; none is assumed. Written with ctypes so that it needs no
package and can run in a freshly forked child.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

# --------------------------------------------------------------------------- rlimits and privileges


def limit_resources(cpu_s: int, memory_bytes: int, open_files: int = 64) -> None:
    """Limit CPU seconds, address space, open files; no core dumps, no file content can be written."""
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, open_files, open_files),
        (resource.RLIMIT_NPROC, 64, 64),
    ):
        now = resource.getrlimit(what)[1]
        if now != resource.RLIM_INFINITY:
            soft, hard = min(soft, now), min(hard, now)  # noqa: PLW2901
        resource.setrlimit(what, (soft, hard))


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def drop_privileges() -> bool:
    """Give up the way to new privileges and all capabilities."""
    ok = bool(_LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
    _LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    nothing = bytes(24)
    number = {"x86_64": 126, "aarch64": 91}.get(platform.machine())
    if number is not None:
        ok = bool(_LIBC.syscall(number, header, nothing) == 0) and ok
    return ok


# --------------------------------------------------------------------------- Landlock

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FS_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}


def readable_paths() -> list[str]:
    """Return what a Python program needs to read: the standard library, shared libraries, /dev/null."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"}
    folders |= {os.path.join(sys.base_prefix, "lib", name) for name in _shared_libraries()}  # noqa: PTH118
    return [p for p in sorted(folders) if os.path.exists(p)] + [  # noqa: PTH110
        "/dev/null",
        "/dev/urandom",
        "/etc/ld.so.cache",
    ]


def _shared_libraries() -> list[str]:
    folder = os.path.join(sys.base_prefix, "lib")  # noqa: PTH118
    return [n for n in os.listdir(folder) if ".so" in n] if os.path.isdir(folder) else []  # noqa: PTH112, PTH208


def restrict_files(read_only: Sequence[str]) -> bool:
    """Allow reading under the given paths and no other use of any file. False without Landlock."""
    if sys.platform != "linux":
        return False
    abi = _LIBC.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    rights = _FS_RIGHTS_BY_ABI[max(version for version in _FS_RIGHTS_BY_ABI if version <= abi)]
    attributes = struct.pack("Q", rights)
    if abi >= 4:
        attributes += struct.pack("Q", 3)  # TCP bind and connect
    if abi >= 6:
        attributes += struct.pack("Q", 3)  # abstract sockets and signals out of this domain
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in read_only:
            try:
                handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)  # noqa: PTH112
            rule = struct.pack("=Qi", allowed, handle)
            _LIBC.syscall(_ADD_RULE, ruleset, 1, rule, 0)
            os.close(handle)
        _LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


# --------------------------------------------------------------------------- seccomp

# Numbers of the calls that a function under test has no business with: starting processes and
# programs, signals, sockets, changing files, other processes, shared memory, the kernel itself.
_DENIED = {
    "x86_64": (
        57, 58, 59, 322, 62, 200, 129, 297, 434, 424, 438, 101, 310, 311, 302, 160, 109, 112, 141, 203,
        41, 53, 42, 49, 29, 30, 64, 68, 319, 425, 321, 298, 323, 248, 249, 250,
        76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 188, 189, 190, 235,
        258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316, 452,
        135, 155, 161, 165, 166, 167, 169, 175, 246, 272, 308, 313,
    ),
    "aarch64": (
        221, 281, 129, 130, 138, 240, 434, 424, 438, 117, 270, 271, 261, 164, 154, 157, 140, 122,
        198, 199, 200, 203, 194, 196, 190, 186, 279, 425, 280, 241, 282, 217, 218, 219,
        5, 6, 7, 33, 34, 35, 36, 37, 38, 45, 46, 52, 53, 54, 55, 88, 276, 452,
        39, 40, 41, 51, 92, 97, 104, 105, 142, 224, 268, 273,
    ),
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_OPEN_FLAGS_AT = {"x86_64": {2: 24, 257: 32}, "aarch64": {56: 32}}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE3, _OPENAT2 = 435, 437
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38


def _filter(machine: str) -> bytes:
    """Return the BPF program: deny the calls above, new processes, and opening files to write."""

    def op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    program = [
        op(_LOAD, 4),
        op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        op(_RETURN, _KILL),
        op(_LOAD, 0),
    ]
    if machine == "x86_64":
        # Calls of the x32 interface would go by other numbers.
        program += [op(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1), op(_RETURN, _ERRNO | _EPERM)]
    for number in _DENIED[machine]:
        program += [op(_JUMP_EQUAL, number, 0, 1), op(_RETURN, _ERRNO | _EPERM)]
    for number in (_CLONE3, _OPENAT2):
        # "Not there" makes the C library fall back to the calls that can be looked into.
        program += [op(_JUMP_EQUAL, number, 0, 1), op(_RETURN, _ERRNO | _ENOSYS)]
    checks = [(_CLONE[machine], 16, _CLONE_THREAD, True)]
    checks += [(number, at, _WRITING, False) for number, at in _OPEN_FLAGS_AT[machine].items()]
    for number, offset, bits, allow_when_set in checks:
        hit, miss = (_ALLOW, _ERRNO | _EPERM) if allow_when_set else (_ERRNO | _EPERM, _ALLOW)
        program += [
            op(_JUMP_EQUAL, number, 0, 4),
            op(_LOAD, offset),
            op(_JUMP_SET, bits, 0, 1),
            op(_RETURN, hit),
            op(_RETURN, miss),
        ]
    program.append(op(_RETURN, _ALLOW))
    return b"".join(program)


def restrict_calls() -> bool:
    """Install the filter. False where seccomp or this processor's table is missing."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _AUDIT_ARCH:
        return False
    program = _filter(machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(_LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0)
