"""Verbs that serve until they are stopped: serve, mock-server."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from typing import Any

from quanteval.cli.output import notify
from quanteval.errors import ConfigError


def serve(parsed: argparse.Namespace) -> int:
    """Build one scheme's artifact and serve it."""
    from quanteval.serving import ServeOptions, server_spec

    # A stop unwinds like Ctrl-C, so that engines end their own children and no folder is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = ServeOptions(parsed.host, parsed.port, parsed.name)
    with server_spec(parsed.overrides, options, notify) as path:
        from quanteval.server.__main__ import serve as serve_spec

        serve_spec(json.loads(path.read_text(encoding="utf-8")), _say_where(parsed.host, "/v1"))
    return 0


def mock_server(parsed: argparse.Namespace) -> int:
    """Serve scripted timings, faults and answers."""
    from quanteval.server.mock import MockSettings, run_mock
    from quanteval.targets import build

    target = f"{MockSettings.__module__}.{MockSettings.__name__}"
    settings = build({"_target_": target, **_settings(parsed.settings)}, where="mock-server")
    run_mock(settings, parsed.host, parsed.port, _say_where(parsed.host, "/v1"))
    return 0


def _say_where(host: str, path: str) -> Callable[[int], None]:
    """Return what prints the address once a server answers; whoever starts one waits for that line."""
    return lambda port: print(f"http://{host}:{port}{path}", flush=True)


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f'"{pair}" is not a setting: write NAME=VALUE, e.g. ttft_s=0.1')
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f'"{pair}": the value is not YAML') from None
    return found
