"""A seccomp filter that lets a Linux process compute and read files, and nothing else.

It lists what is allowed, so that a system call unknown to it is refused. No process can be started,
no program run, no network socket made, no file opened for writing, no other process signalled or
looked into.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import NamedTuple

from quanteval.sandbox._isolate import PR_SET_NO_NEW_PRIVS, address_of, prctl

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers on x86-64 and on AArch64; None where there is no such call.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "recvfrom": (45, 207), "shutdown": (48, 210), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "close_range": (436, 436),
    "flock": (73, 32), "fadvise64": (221, 223), "eventfd2": (290, 19),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "mremap": (25, 216), "madvise": (28, 233), "membarrier": (324, 283),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103),
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
    "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165), "getrlimit": (97, 163), "sysinfo": (99, 179), "uname": (63, 160),
    "getrandom": (318, 278), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158),
    "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
}  # fmt: skip

# "Not there" makes the C library fall back to an older call that can be looked into.
_MISSING = {"clone3": 435, "openat2": 437}


class _If(NamedTuple):
    """A call that is allowed when an argument has one of the values, or a bit set or all bits unset."""

    numbers: tuple[int | None, int | None]
    argument: int
    values: tuple[int, ...] = ()
    bit_set: int = 0
    bits_unset: int = 0


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_AF_UNIX = 1
# Duplicate, descriptor flags, status flags, duplicate close-on-exec. Not F_SETOWN, which lets the
# kernel send signals to other processes, as some ioctls do.
_FCNTL = (0, 1, 2, 3, 4, 1030)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)


# Stands for the process's own id until the filter is installed.
_OWN_ID = 0x7FFFFFF1


def _conditional() -> list[_If]:
    return [
        _If((2, None), 1, bits_unset=_WRITING),  # open
        _If((257, 56), 2, bits_unset=_WRITING),  # openat
        _If((56, 220), 0, bit_set=_CLONE_THREAD),  # clone
        _If((53, 199), 0, values=(_AF_UNIX,)),  # socketpair: asyncio makes one
        # sendto without an address: with one, half of a pair reaches any socket of a file's name.
        _If((44, 206), 5, values=(0,)),
        _If((72, 25), 1, values=_FCNTL),
        _If((16, 29), 1, values=_IOCTL),
        _If((302, 261), 0, values=(0,)),  # prlimit64, of this process
        _If((234, 131), 0, values=(_OWN_ID,)),  # tgkill, of this process
    ]


_LOAD, _JUMP, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, k)


def build_filter(machine: str) -> bytes:
    """Return the BPF program for this processor ('x86_64' or 'aarch64'), for the process of id 0x7FFFFFF1.

    The calls are searched by halves: the kernel runs through the program for each call there is when it
    is installed, and for each call that is made.
    """
    column = list(_AUDIT_ARCH).index(machine)
    program = [_op(_LOAD, 4), _op(_EQUAL, _AUDIT_ARCH[machine], 1), _op(_RETURN, _KILL)]
    program += [_op(_LOAD, 0), *_search(_spans(column))]
    return b"".join(program)


def _spans(column: int) -> list[tuple[int, list[bytes]]]:
    """Return the first call's number of each span of numbers, ascending, and what is done with the span."""
    refuse, allow = [_op(_RETURN, _ERRNO | _EPERM)], [_op(_RETURN, _ALLOW)]
    actions: dict[int, list[bytes]] = {
        number: [_op(_RETURN, _ERRNO | _ENOSYS)] for number in _MISSING.values()
    }
    actions |= {n[column]: allow for n in _ALLOWED.values() if n[column] is not None}  # type: ignore[misc]
    for condition in _conditional():
        if (number := condition.numbers[column]) is not None:
            actions[number] = _checks(condition)
    spans = [(0, refuse)]
    for number, action in sorted(actions.items()):
        spans += [(number, action), (number + 1, refuse)]
    # What begins where another begins replaces it; what goes on as before begins no span. Calls of
    # x86-64's x32 interface have numbers from 2**30 on and are refused as all above the last.
    merged: list[tuple[int, list[bytes]]] = []
    for start, action in dict(spans).items():
        if not merged or merged[-1][1] != action:
            merged.append((start, action))
    return merged


def _search(spans: list[tuple[int, list[bytes]]]) -> list[bytes]:
    if len(spans) == 1:
        return spans[0][1]
    middle = len(spans) // 2
    low, high = _search(spans[:middle]), _search(spans[middle:])
    # A conditional jump reaches 255 instructions, an unconditional one any number.
    return [_op(_GREATER_EQUAL, spans[middle][0], 0, 1), _op(_JUMP, len(low)), *low, *high]


def _checks(condition: _If) -> list[bytes]:
    """Look at the low half of the argument: all arguments checked here are ints to the kernel."""
    low_half = 16 + 8 * condition.argument
    refuse = _op(_RETURN, _ERRNO | _EPERM)
    if condition.bits_unset:
        tests = [_op(_ANY_BIT, condition.bits_unset, 1, 0), _op(_RETURN, _ALLOW)]
    elif condition.bit_set:
        tests = [_op(_ANY_BIT, condition.bit_set, 0, 1), _op(_RETURN, _ALLOW)]
    else:
        tests = []
        for value in condition.values:
            tests += [_op(_EQUAL, value, 0, 1), _op(_RETURN, _ALLOW)]
    return [_op(_LOAD, low_half), *tests, refuse]


def prepare() -> bytes | None:
    """Return the filter for this machine; None where seccomp or this processor's numbers are missing."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _AUDIT_ARCH or struct.calcsize("P") != 8:
        return None
    return build_filter(machine)


def restrict_calls(program: bytes | None) -> bool:
    """Install a filter for good. False without one, or where seccomp is missing."""
    if program is None:
        return False
    program = program.replace(
        _OWN_ID.to_bytes(4, sys.byteorder), os.getpid().to_bytes(4, sys.byteorder)
    )
    header = struct.pack("HxxxxxxP", len(program) // 8, address_of(program))
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0)
