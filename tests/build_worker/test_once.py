"""The same engine is made once, however often and under whatever names it is asked for; another is not."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from enginemesh.v1 import builds_pb2, builds_pb2_grpc
from gateway.server import Gateway
from mesh import build_operation
from mesh.settings import GatewaySettings
from mesh.target import Target
from tests.build_worker.helpers import until_ready

A10 = Target.from_name("a10")
H100 = Target.from_name("h100-sxm-80gb")


@pytest.fixture
async def channel(environment):
    """A client's channel to a gateway."""
    gateway = Gateway(GatewaySettings(port=0))
    await gateway.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as opened:
        yield opened
    await gateway.stop()


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"weights")
    return path


async def built(queue, *build_ids):
    return [build_operation.result_of(await queue.wait(build_id, 60.0)) for build_id in build_ids]


async def test_asked_twenty_times_at_once_it_is_built_once(channel, run_worker, redis, store, spans):
    builds, operations = builds_pb2_grpc.BuildsStub(channel), operations_pb2_grpc.OperationsStub(channel)
    for name in ("b1", "b2"):
        run_worker(name)
        await until_ready(redis, name)

    async def ask(number):
        request = builds_pb2.CreateBuildRequest(
            spec=builds_pb2.ModelSpec(model="m", kind="fake"), request_id=f"request-{number}"
        )
        operation = await builds.CreateBuild(request)
        return await operations.WaitOperation(
            operations_pb2.WaitOperationRequest(name=operation.name), timeout=60
        )

    ended = await asyncio.gather(*(ask(number) for number in range(20)))

    engines = {build_operation.result_of(operation).engine for operation in ended}
    assert len(engines) == 1
    assert "" not in engines
    assert [span.name for span in spans.get_finished_spans()].count("publish") == 1
    assert len(list(store.objects.list("manifests/"))) == 1


async def test_same_weights_at_several_places_are_built_once(run_worker, queue, create, tmp_path, weights):
    places = [tmp_path / f"copy-{number}.gguf" for number in range(3)]
    for place in places:
        place.write_bytes(weights.read_bytes())
    for name in ("b1", "b2", "b3"):
        run_worker(name)

    options = {"compile_ms": "500"}
    ids = await asyncio.gather(*(create(source=str(place), options=options) for place in places))
    results = await built(queue, *ids)

    assert len(set(ids)) == 3
    assert len({result.engine for result in results}) == 1
    assert sorted(result.cached for result in results) == [False, True, True]


async def test_claim_of_a_build_that_died_lapses(run_worker, queue, create, redis, weights):
    options = {"compile_ms": "100"}
    probe = await create(source=str(weights), options=options)
    run_worker()
    key = (await built(queue, probe))[0].build_key
    await redis.set(f"em:{{builds}}:key:{key}", "a-dead-build", px=800)

    (again,) = await built(queue, await create(source=str(weights), options=options))

    assert again.cached


# Field case 32: a cache whose key lacked GPU and weights handed one GPU's engine to another.
async def test_two_targets_are_two_engines(run_worker, queue, create, store, weights):
    for target in (A10, H100):
        run_worker(f"on-{target.key}", target)

    results = await built(
        queue, *[await create(target=target, source=str(weights)) for target in (A10, H100)]
    )

    assert results[0].build_key != results[1].build_key
    manifests = [store.record(result.engine.removeprefix("engines/")).manifest for result in results]
    assert [manifest.target.key for manifest in manifests] == [A10.key, H100.key]
    assert not any(result.cached for result in results)


# Field case 32, the other half of it.
async def test_changed_weights_at_the_same_place_are_another_engine(run_worker, queue, create, weights):
    run_worker()
    (first,) = await built(queue, await create(source=str(weights)))
    weights.write_bytes(b"WEIGHTS")

    (second,) = await built(queue, await create(source=str(weights)))

    assert second.build_key != first.build_key
    assert second.engine != first.engine
    assert not second.cached
