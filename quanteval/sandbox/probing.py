"""What this system really keeps a candidate from, found by letting a few of them try."""

from __future__ import annotations

import functools
import socket
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from quanteval.errors import QuantevalError
from quanteval.sandbox.runner import LAYERS, Problem, Sandbox


@dataclass(frozen=True)
class Level:
    """What candidates are kept from here.

    `name` is 'isolated' (all three), 'partial' (some) or 'rlimits' (none of them), `layers` what does
    it, `notes` say what is missing.
    """

    name: str
    filesystem_isolated: bool
    network_isolated: bool
    processes_contained: bool
    notes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def isolated(self) -> bool:
        """Whether all three hold, the least that is accepted by default."""
        return self.filesystem_isolated and self.network_isolated and self.processes_contained


_TEST = "def check(f):\n    assert f({!r}) is True\n"

# Each returns True when everything it tries is refused. Process id 1 means that one kill ends all.
_ATTEMPTS = {
    "filesystem": """
def f(path):
    for mode in ("rb", "r+b", "ab"):
        try:
            open(path, mode).close()
            return False
        except OSError:
            pass
    return True
""",
    "network": """
import socket
def f(ports):
    tcp, udp = ports
    try:
        socket.create_connection(("127.0.0.1", tcp), 2)
        return False
    except OSError:
        pass
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", udp))
        return False
    except OSError:
        return True
""",
    "processes": """
import os, time
def f(_):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        return True
    return os.getpid() == 1
""",
}
_MISSING = {
    "filesystem": "candidates can read this user's files: no Landlock and no user namespaces",
    "network": "candidates can reach the network: no seccomp and no user namespaces",
    "processes": "candidates can leave processes behind: no seccomp and no user namespaces",
}
# Each guards the files alone where the other is missing.
_SECOND = {
    "files": "Landlock alone guards the files: no namespaces",
    "landlock": "namespaces alone guard the files: no Landlock",
}
_UNSUMMED = "memory is limited for each process, not for all of a candidate's together: no seccomp"


def probe(layers: Collection[str] = LAYERS) -> Level:
    """Return what candidates are really kept from; measured once in a process.

    Raises QuantevalError when the sandbox does not work at all.
    """
    return _measure(tuple(layers))


@functools.cache
def _measure(layers: tuple[str, ...]) -> Level:
    if sys.platform != "linux":
        note = f'"{sys.platform}" offers nothing that this sandbox can use'
        return Level("rlimits", False, False, False, (note,))
    try:
        held, active = _try_all(layers)
    except OSError as error:
        raise QuantevalError(f'the sandbox does not start: "{error}"') from None
    name = "isolated" if all(held.values()) else "partial" if any(held.values()) else "rlimits"
    return Level(
        name=name,
        filesystem_isolated=held["filesystem"],
        network_isolated=held["network"],
        processes_contained=held["processes"],
        notes=(
            *(_MISSING[key] for key, ok in held.items() if not ok),
            *(_SECOND[layer] for layer in _SECOND if held["filesystem"] and layer not in active),
            *(() if "seccomp" in active else (_UNSUMMED,)),
        ),
        layers=tuple(sorted(active)),
    )


def _try_all(layers: Collection[str]) -> tuple[dict[str, bool], set[str]]:
    """Return which attempts failed, as they should, and the names of the layers that took hold."""
    held: dict[str, bool] = {}
    active: set[str] = set()
    with (
        tempfile.NamedTemporaryFile() as canary,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        Sandbox(allow_weak=True, layers=layers, measure_factor=lambda: 1.0) as sandbox,
    ):
        udp.bind(("127.0.0.1", 0))
        targets = {
            "filesystem": str(Path(canary.name).resolve()),
            "network": (tcp.getsockname()[1], udp.getsockname()[1]),
            "processes": None,
        }
        for name, code in _ATTEMPTS.items():
            result = sandbox.run(Problem(name, code, "f", _TEST.format(targets[name])))
            if result["status"] == "error":
                raise QuantevalError(f"the sandbox does not work: {result['detail']}")
            held[name] = result["status"] == "passed"
            active |= set(result["held"])
    return held, active
