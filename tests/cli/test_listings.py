"""Listings follow every page, as tables and as JSON."""

from __future__ import annotations

import json

import pytest
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cli import tables
from enginemesh.v1 import builds_pb2, engines_pb2, models_pb2, targets_pb2, workers_pb2
from mesh.errors import BuildError


def test_models_of_all_pages_are_shown(gateway, invoke):
    gateway.models += [
        models_pb2.Model(name="models/a", state=models_pb2.MODEL_STATE_READY, slots=32, slots_used=3),
        models_pb2.Model(
            name="models/b",
            state=models_pb2.MODEL_STATE_WAITING_FOR_WORKER,
            starting_workers=1,
            queued_requests=3,
            oldest_wait=Duration(seconds=2, nanos=500_000_000),
        ),
        models_pb2.Model(name="models/c", state=models_pb2.MODEL_STATE_SCALED_TO_ZERO),
    ]
    out = invoke("models").stdout
    assert "a      ready" in out, out
    assert "3/32" in out
    assert "waiting for worker" in out
    assert "0 (+1)" in out
    assert "3 for 2.5 s" in out
    assert "scaled to zero" in out


def test_empty_listing_says_what_to_do(gateway, invoke):
    assert "enginemesh build" in invoke("models").stdout


def test_json_holds_every_plain_field(gateway, invoke):
    gateway.models.append(models_pb2.Model(name="models/a"))
    (model,) = json.loads(invoke("models", "--json").stdout)
    assert model["name"] == "models/a"
    assert model["slots_used"] == 0


def test_engines_of_one_model(gateway, invoke):
    gateway.engines.append(
        engines_pb2.Engine(
            name=f"engines/{'ab' * 32}",
            model="models/a",
            kind="openvino",
            target=targets_pb2.Target(key="cpu-x86_64-avx2"),
            size_bytes=135 << 20,
            options={"profile": "exact", "speculation": "prompt_lookup", "lora": "tone"},
        )
    )
    out = invoke("engines", "--model", "a").stdout
    assert "abababababab  a" in out
    assert "prompt_lookup, lora tone" in out
    assert "135.0 MiB" in out
    assert gateway.requests[0].model == "models/a"


def test_worker_that_waits_says_why(gateway, invoke):
    gateway.workers.append(
        workers_pb2.Worker(
            name="workers/w1",
            role=workers_pb2.WORKER_ROLE_INFERENCE,
            state=workers_pb2.WORKER_STATE_WAITING_FOR_ENGINE,
            model="models/a",
            detail="1 engine, for sm90 [exact]",
        )
    )
    out = invoke("workers").stdout
    assert "waiting for engine" in out
    assert "1 engine, for sm90 [exact]" in out


def _operation(name, stage, percent, **more):
    operation = operations_pb2.Operation(name=f"operations/{name}", **more)
    operation.metadata.Pack(
        builds_pb2.BuildMetadata(
            spec=builds_pb2.ModelSpec(model="a", kind="openvino"), stage=stage, progress_percent=percent
        )
    )
    return operation


@pytest.fixture
def operations(gateway):
    """A build in each state."""
    done = _operation("b2", builds_pb2.BUILD_STAGE_DONE, 100, done=True)
    done.response.Pack(builds_pb2.BuildResult(engine="engines/cdcdcdcdcdcdcd", size_bytes=1 << 20))
    failed = _operation("b3", builds_pb2.BUILD_STAGE_CONVERT, 40, done=True)
    failed.error.CopyFrom(BuildError("no such file", stage="convert").to_status())
    gateway.operations += [_operation("b1", builds_pb2.BUILD_STAGE_FETCH, 2), done, failed]
    return gateway.operations


def test_builds_show_stage_and_outcome(operations, invoke):
    lines = {line.split()[0]: line for line in invoke("builds").stdout.splitlines() if line.startswith("b")}
    assert "fetch" in lines["b1"]
    assert lines["b2"].rstrip().endswith("cdcdcdcdcdcd")
    assert lines["b3"].rstrip().endswith("no such file")


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model: a\nkind: openvino\nsource: a.gguf\n")
    return str(path)


def test_build_is_followed_to_its_engine(operations, invoke, model_file, gateway):
    del operations[2]
    result = invoke("build", model_file)
    assert result.stdout == "engine cdcdcdcdcdcd is built and published (1.0 MiB)\n"
    assert "fetch" in result.stderr
    create, watch = gateway.requests
    assert create.spec.source == "a.gguf"
    assert watch.name == "operations/b1"


def test_a_build_for_each_target_is_made_and_followed(operations, invoke, tmp_path, gateway):
    del operations[2]
    path = tmp_path / "model.yaml"
    path.write_text(
        "model: a\nkind: openvino\nsource: a.gguf\ntargets: [cpu-x86_64-avx2, cpu-x86_64-amx]\n"
        "serving: {max_workers: 3}\n"
    )

    result = invoke("build", str(path), "--request-id", "nightly")

    ready = "engine cdcdcdcdcdcd is built and published (1.0 MiB)"
    assert result.stdout == f"cpu-x86_64-avx2: {ready}\ncpu-x86_64-amx: {ready}\n"
    assert {"cpu-x86_64-avx2", "cpu-x86_64-amx"} <= set(result.stderr.split())
    checks, creates = gateway.requests[:2], gateway.requests[2:4]
    assert [request.validate_only for request in gateway.requests[:4]] == [True, True, False, False]
    assert [request.target for request in checks] == ["cpu-x86_64-avx2", "cpu-x86_64-amx"]
    assert [request.request_id for request in creates] == [
        "nightly/cpu-x86_64-avx2",
        "nightly/cpu-x86_64-amx",
    ]
    assert creates[0].spec.serving.max_workers == 3


def test_failure_of_one_of_several_builds_names_its_target(operations, run_command, model_file, gateway):
    gateway.operations[:] = [operations[2]]
    status, out, err = run_command("build", model_file, "--target", "l4", "--target", "a10")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: l4: internal: no such file")


def test_build_that_fails_ends_with_its_error(operations, run_command, model_file):
    del operations[1]
    status, _, err = run_command("build", model_file)
    assert status == 1
    assert err.splitlines()[-1] == "error: internal: no such file (reason BUILD_FAILED, stage convert)"


def test_wrong_model_file_names_line_and_field(run_command, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model: a\nkind: openvino\nmax_batch: 4\n")
    status, _, err = run_command("build", str(path))
    assert status == 2
    assert f"{path}:3: max_batch" in err


def test_units_are_for_people():
    assert tables.size(512) == "512 B"
    assert tables.size(3 << 40) == "3.0 TiB"
    moment = Timestamp()
    moment.GetCurrentTime()
    moment.seconds -= 7300
    assert tables.age(moment) == "2 h"
