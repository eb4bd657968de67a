"""A whole run on an endpoint that `quanteval serve` puts up: nothing measured there is ever used again."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.e2e.test_fake_run import only_run, quanteval, stages


@pytest.fixture(scope="module")
def endpoint(tiny_folder):
    arguments = [
        "serve", f"model={tiny_folder}", "scheme=[fp32]", "runtime.threads=1", "--port", "0",
    ]  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "quanteval", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def test_an_endpoint_is_measured_anew_each_time(endpoint, tiny_folder, tmp_path):
    command = [
        "run", f"model={tiny_folder}", "engine=openai", "scheme=[endpoint]", "bench=quick",
        f"scheme.endpoint.base_url={endpoint}", "task=[pydoc,divergence_pydoc]", "task.pydoc.limit=2",
        "task.divergence_pydoc.limit=2", "task.divergence_pydoc.greedy_tokens=0", "gate=smoke",
        "bench.buckets=[{low: 8, high: 16}]", "bench.output_tokens=2",
    ]  # fmt: skip
    first = quanteval(tmp_path, *command)
    assert first.returncode == 0, first.stdout + first.stderr
    run = only_run(tmp_path)
    result = run.variant("endpoint").load_result()
    assert result.status == "ok"
    assert set(result.stages) == {"artifact", "bench", "task:pydoc", "task:divergence_pydoc"}
    before = stages(run, "endpoint")
    second = quanteval(tmp_path, *command)
    assert second.returncode == 0, second.stdout + second.stderr
    after = stages(only_run(tmp_path), "endpoint")
    assert before.keys() == after.keys()
    assert not {name for name in before if before[name] == after[name]}
