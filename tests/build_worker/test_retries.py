"""A build whose worker is killed, in each of its stages: it ends well on another one, and leaves nothing."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

import psutil
import pytest
from google.rpc import code_pb2

from build_worker.leftovers import sweep_ended
from build_worker.scratch import Attempt, BegunPublication, Scratch
from cli.spans import load
from mesh import build_operation
from mesh.build_logs import BuildLogs
from mesh.manifest import EngineFile, Manifest, TokenizerInfo
from mesh.store_layout import blob_key
from mesh.target import detect_cpu
from tests.build_worker.helpers import until_ready
from tests.conditions import until
from tests.faulty_proxy import FaultyProxy

STAGES = ["fetch", "convert", "quantise", "compile", "publish"]
HUGE_BYTES = 200 << 30

# A worker whose answers from the store are held back at this request stands in the stage.
STALL_AT = {
    "fetch": None,  # which lasts by itself
    "convert": "/convert/0",
    "quantise": "/quantise/0",
    "compile": "/compile/0",
    "publish": "PUT /{bucket}/blobs/sha256/",
}


@pytest.fixture
def stage():
    """Where the store's answers to a worker behind the proxy are held back."""
    return "publish"


@pytest.fixture
def proxy(s3, store_settings, stage):
    """The store, for one worker that will be killed."""
    made = FaultyProxy(int(s3.settings["ENGINEMESH_S3_ENDPOINT"].rpartition(":")[2]))
    if STALL_AT[stage]:
        made.stall_at = STALL_AT[stage].format(bucket=store_settings["ENGINEMESH_S3_BUCKET"]).encode()
    yield made
    made.close()


@pytest.fixture
def manifest():
    blobs = [hashlib.sha256(name.encode()).hexdigest() for name in ("tokenizer.json", "script.json")]
    return Manifest(
        model="m",
        kind="fake",
        target=detect_cpu(),
        precision="none",
        build_key="0" * 64,
        versions={},
        max_batch_size=1,
        max_seq_len=1,
        max_num_tokens=1,
        tokenizer=TokenizerInfo(vocab_size=1),
        files=tuple(
            EngineFile(path=path, size=4, sha256=sha256)
            for path, sha256 in zip(("tokenizer.json", "script.json"), blobs, strict=True)
        ),
    )


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"weights")
    return path


def objects(store):
    """What lies in the store, without logs."""
    return {entry.key for entry in store.objects.list("") if not entry.key.startswith("logs/")}


def assert_only_engine(store, manifest):
    """Nothing half made is in the store."""
    assert objects(store) == {
        *(blob_key(file.sha256) for file in manifest.files),
        f"manifests/{manifest.digest}.json",
        f"builds/{manifest.build_key}",
        f"models/m/{manifest.digest}",
    }
    uploads = store.objects._client._list_multipart_uploads(store.objects._bucket).uploads
    assert uploads == []


def family(process_id):
    """A process and all that it has started."""
    process = psutil.Process(process_id)
    return [process, *process.children(recursive=True)]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stage", STAGES)
async def test_build_of_a_worker_killed_in_a_stage_ends_well_on_another(stage, start_worker, queue, request):
    redis, store, create, source, proxy, tmp_path = (
        request.getfixturevalue(name) for name in ("redis", "store", "create", "source", "proxy", "tmp_path")
    )
    if stage == "fetch":
        with source.open("wb") as file:
            file.truncate(HUGE_BYTES)  # without content; it takes minutes to read
    first = start_worker("first", ENGINEMESH_S3_ENDPOINT=f"127.0.0.1:{proxy.port}")
    trace_id = secrets.token_hex(16)
    build_id = await create(
        (f"00-{trace_id}-{secrets.token_hex(8)}-01", ""),
        source=str(source),
        options={"build_helpers": "1", "engine_mib": "20" if stage == "publish" else "0"},
    )

    async def is_there():
        metadata = build_operation.metadata_of(await queue.get(build_id))
        return proxy.is_stalled if stage != "fetch" else metadata.detail == "reading weights"

    def has_spans():
        trace = load(tmp_path / "data" / "traces", trace_id)
        return {span.name for span in trace.spans} == {*STAGES[: STAGES.index(stage)]}

    await until(is_there)
    await until(has_spans)
    second = start_worker("second")
    victims = family(first.pid)
    first.kill()
    first.wait()
    await until(lambda: all(map(is_gone, victims)), limit_s=5.0)
    source.write_bytes(b"weights")
    ended = await queue.wait(build_id, 60.0)

    result, metadata = build_operation.result_of(ended), build_operation.metadata_of(ended)
    assert (result.cached, metadata.worker, metadata.attempt) == (False, "workers/second", 2)
    manifest = store.record(result.engine.removeprefix("engines/")).manifest
    assert_only_engine(store, manifest)
    await until_ready(redis, "second")
    assert list((tmp_path / "data" / "builds").iterdir()) == []
    assert_goes_on(BuildLogs(store.objects).read(ended.name), stage)
    second.terminate()
    await asyncio.to_thread(second.wait)
    assert_one_trace(load(tmp_path / "data" / "traces", trace_id), stage)


def assert_goes_on(log, killed_in):
    """The second attempt does nothing again that the first one had finished."""
    first, second = log.split("attempt 2 on workers/second")
    assert "attempt 1 on workers/first" in first
    done = [
        name for name in ("convert", "quantise", "compile") if STAGES.index(name) < STAGES.index(killed_in)
    ]
    for name in ("convert", "quantise", "compile"):
        assert (f"stage {name}: done by an earlier attempt" in second) == (name in done)
        assert (f"fake {name}" in second) == (name not in done)


def assert_one_trace(trace, killed_in):
    """The spans of both attempts are in the trace, each stage below the attempt that it was of."""
    builds = [span for span in trace.spans if span.name == "build"]
    assert [span.attributes["enginemesh.build.attempt"] for span in builds] == [1, 2]
    assert [span.is_error for span in builds] == [True, False]
    lost, ended = ([child.name for child in trace.children(span.span_id)] for span in builds)
    assert lost == STAGES[: STAGES.index(killed_in)]
    assert ended == STAGES
    assert trace.roots() == builds


async def test_cancelled_after_its_worker_died(start_worker, run_worker, queue, proxy, request):
    store, create, source = (request.getfixturevalue(name) for name in ("store", "create", "source"))
    first = start_worker("first", ENGINEMESH_S3_ENDPOINT=f"127.0.0.1:{proxy.port}")
    build_id = await create(source=str(source))
    await until(lambda: proxy.is_stalled)
    first.kill()
    first.wait()
    assert objects(store)

    await queue.cancel(build_id)
    run_worker("second")
    ended = await queue.wait(build_id, 30.0)

    assert ended.error.code == code_pb2.CANCELLED
    assert objects(store) == set()


async def test_cancelled_while_it_is_published(run_worker, queue, proxy, store, create):
    run_worker(s3_endpoint=f"127.0.0.1:{proxy.port}")
    build_id = await create(options={"engine_mib": "20"})
    await until(lambda: proxy.is_stalled)

    await queue.cancel(build_id)
    proxy.go_on()
    ended = await queue.wait(build_id, 30.0)

    assert ended.error.code == code_pb2.CANCELLED
    assert objects(store) == set()


async def test_what_ended_without_a_worker_is_swept(create, queue, store, manifest, tmp_path):
    ended, running = await create(), await create(model="other")
    await queue.cancel(ended)
    for build_id in (ended, running):
        scratch = Scratch(store.objects, build_id, limit_bytes=100)
        scratch.write_attempt(Attempt(number=1, worker="w"))
        (tmp_path / build_id).mkdir()
        (tmp_path / build_id / "half").write_bytes(b"made")
        assert scratch.keep("key/convert", tmp_path / build_id)
    sent = tuple(file.sha256 for file in manifest.files)
    for sha256 in sent:
        store.objects.put_bytes(blob_key(sha256), b"blob")
    Scratch(store.objects, ended).write_publication(BegunPublication(manifest=manifest, sent=sent))

    assert await sweep_ended(store, queue) == 1

    assert {key.split("/")[1] for key in objects(store)} == {running}
