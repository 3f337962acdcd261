"""`enginemesh up` as a user runs it: real processes, the fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli import spans
from cli.embedded import free_port, is_free
from cli.options import ENVIRONMENT_FILE

ENGINEMESH = str(Path(sys.executable).parent / "enginemesh")
START_LIMIT_S = 90.0
ANSWER_TOKENS = 20


def until(condition, limit_s=START_LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


class Mesh:
    """A running `enginemesh up`."""

    def __init__(self, folder, *options, **environment):
        self.folder = folder
        self.data = folder / "data"
        self.port = free_port()
        self.log = folder / "up.log"
        # None of the addresses that the machine's own environment may set.
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ENGINEMESH_")
        } | environment
        command = [ENGINEMESH, "up", "--kind", "fake", "--data", str(self.data), "--port", str(self.port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, env=self.environment, cwd=folder
            )

    def wait_ready(self):
        until(lambda: "The mesh is ready" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def text(self):
        return self.log.read_text()

    def command(self, *arguments, status=0):
        """Runs an enginemesh command against this mesh; its standard output."""
        done = subprocess.run(
            [ENGINEMESH, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.folder,
            env={**self.environment, "ENGINEMESH_DATA_DIR": str(self.data), "COLUMNS": "160"},
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    def workers(self, role="WORKER_ROLE_INFERENCE"):
        """The workers that are ready."""
        return [
            worker
            for worker in json.loads(self.command("workers", "--json"))
            if worker["role"] == role and worker["state"] == "WORKER_STATE_READY"
        ]

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number=signal.SIGINT):
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A mesh with two workers and metrics."""
    port = free_port()
    folder = tmp_path_factory.mktemp("up")
    started = Mesh(folder, "--workers", "2", ENGINEMESH_METRICS_PORT=str(port))
    started.metrics_port = port
    started.wait_ready()
    yield started
    started.process.terminate()
    started.process.wait(60)


def generate(mesh, *options):
    return mesh.command("generate", "--raw", "-n", str(ANSWER_TOKENS), "--json", *options, "hello")


def test_answer_streams_through_all_processes(mesh):
    messages = [json.loads(line) for line in generate(mesh).splitlines()]
    assert messages[-1]["finished"]["usage"]["completion_tokens"] == ANSWER_TOKENS
    assert len(messages) > 2


def test_one_request_gives_one_trace_of_both_services(mesh):
    generate(mesh, "--request-id", "traced")
    found = until(lambda: _whole_trace(mesh, "traced"), 20)
    (root,) = [span for span in found if span["name"].endswith("/Generate")]
    by_id = {span["span_id"] for span in found}
    assert all(span["parent_id"] in by_id for span in found if span is not root)
    assert len({span["trace_id"] for span in found}) == 1
    assert all(root["start_ns"] <= span["start_ns"] for span in found)
    waterfall = mesh.command("trace", "traced")
    assert "traced" in waterfall
    assert "█" in waterfall


def _whole_trace(mesh, request_id):
    try:
        found = json.loads(mesh.command("trace", request_id, "--json"))
    except AssertionError:
        return None  # not written yet
    return found if {span["service"] for span in found} == {"gateway", "infer_worker"} else None


def test_spans_cover_the_whole_time_of_a_long_answer(mesh):
    mesh.command("generate", "--raw", "-n", "200", "--ignore-eos", "--request-id", "covered", "hello")
    until(lambda: _whole_trace(mesh, "covered"), 20)
    folder = mesh.data / "traces"
    trace = spans.load(folder, spans.find(folder, "covered"))
    (root,) = [span for span in trace.spans if span.name.endswith("/Generate")]
    assert trace.coverage(root) > 0.95


def test_metrics_of_each_process_are_served(mesh):
    until(lambda: len(mesh.workers()) == 2)
    generate(mesh)
    gateway = metrics(mesh.metrics_port)
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert gateway[f"gen_ai_server_{name}_seconds_count"] >= 1
    assert 1 <= gateway["enginemesh_links_active"] <= 2  # a worker opens one with its first request
    workers = [metrics(mesh.metrics_port + offset) for offset in (2, 3)]
    # One of them may have had no request yet.
    assert sum(worker.get("enginemesh_engine_step_duration_seconds_count", 0) for worker in workers) >= 1
    assert all(worker["enginemesh_slots"] >= 1 for worker in workers)


def test_gauges_are_back_at_zero_when_nothing_runs(mesh):
    generate(mesh)
    until(lambda: metrics(mesh.metrics_port)["enginemesh_requests_active"] == 0, 20)
    until(lambda: metrics(mesh.metrics_port).get("enginemesh_queue_depth") == 0, 20)
    until(lambda: metrics(mesh.metrics_port).get("enginemesh_queue_oldest_wait_seconds") == 0, 20)
    until(lambda: metrics(mesh.metrics_port).get("enginemesh_workers") == 2, 20)
    for offset in (2, 3):
        until(lambda offset=offset: metrics(mesh.metrics_port + offset).get("enginemesh_slots_used") == 0, 20)


def metrics(port):
    """Each metric's sum over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    totals = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def test_listings_show_what_runs(mesh):
    (model,) = json.loads(mesh.command("models", "--json"))
    assert (model["name"], model["state"], model["workers"]) == ("models/fake", "MODEL_STATE_READY", 2)
    (engine,) = json.loads(mesh.command("engines", "--json"))
    assert (engine["model"], engine["kind"]) == ("models/fake", "fake")
    (build,) = json.loads(mesh.command("builds", "--json"))
    assert build["done"]
    assert len(mesh.workers("WORKER_ROLE_BUILD")) == 1


def test_doctor_finds_everything_reachable(mesh):
    found = {check["name"]: check for check in json.loads(mesh.command("doctor", "--json"))}
    assert [found[name]["state"] for name in ("redis", "s3", "gateway")] == ["ok", "ok", "ok"]


def test_keys_are_readable_by_owner_alone(mesh):
    path = mesh.data / ENVIRONMENT_FILE
    assert path.stat().st_mode & 0o077 == 0
    assert "ENGINEMESH_S3_SECRET_KEY=" in path.read_text()


def test_second_mesh_in_the_same_folder_is_refused(mesh):
    done = subprocess.run(
        [ENGINEMESH, "up", "--kind", "fake", "--data", str(mesh.data), "--port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=mesh.environment,
    )
    assert done.returncode == 1
    assert "already runs" in done.stderr


def test_killed_worker_is_started_again(mesh):
    until(lambda: len(mesh.workers()) == 2)
    killed = mesh.workers()[0]
    os.kill(killed["process_id"], signal.SIGKILL)
    until(lambda: len({worker["name"] for worker in mesh.workers()} - {killed["name"]}) == 2)
    assert "was ended by SIGKILL; starting it again" in mesh.text()
    generate(mesh)


def test_interrupt_stops_every_process_and_the_engine_is_found_again(tmp_path):
    mesh = Mesh(tmp_path)
    mesh.wait_ready()
    children = mesh.children()
    assert len(children) >= 5
    assert mesh.stop() == 0
    assert [child for child in children if child.is_running()] == []
    assert is_free(mesh.port)
    assert not (mesh.data / ENVIRONMENT_FILE).exists()
    again = Mesh(tmp_path)
    again.wait_ready()
    assert "was in the store already" in again.text()
    assert again.stop(signal.SIGTERM) == 0


def test_killed_up_takes_its_processes_with_it(tmp_path):
    mesh = Mesh(tmp_path)
    mesh.wait_ready()
    children = mesh.children()
    mesh.stop(signal.SIGKILL)
    until(lambda: not any(child.is_running() for child in children))


def test_taken_port_is_told(tmp_path, mesh):
    done = subprocess.run(
        [ENGINEMESH, "up", "--kind", "fake", "--data", str(tmp_path), "--port", str(mesh.port)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=mesh.environment,
    )
    assert done.returncode == 1
    assert f"port {mesh.port} is taken" in done.stderr
