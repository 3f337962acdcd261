"""The gateway as a gRPC server: reflection, health, listings, channelz, pings, large messages, drain."""

import asyncio
import contextlib

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from enginemesh.v1 import (
    engines_pb2,
    engines_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from gateway.server import INFRASTRUCTURE_SERVICES, SERVICES
from mesh.bus.leases import WORKER, Leases
from mesh.bus.serving import ServingIndex
from mesh.model_fields import ServingSettings
from mesh.settings import GatewaySettings
from tests.conditions import until
from tests.gateway.helpers import LENGTH
from tests.gateway.test_inference import collect, details_of, request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def ready_worker(redis, engine):
    """The lease of a worker that serves the model."""
    info = workers_pb2.Worker(
        name="workers/w9",
        role=workers_pb2.WORKER_ROLE_INFERENCE,
        state=workers_pb2.WORKER_STATE_READY,
        model="models/m",
        slots=4,
        slots_used=1,
    )
    await Leases(redis, WORKER).renew("w9", info.SerializeToString(), ttl_s=60)
    return info


async def test_reflection_names_every_service(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([ask])):
        names = {service.name for service in answer.list_services_response.service}
    assert names == {*SERVICES, *INFRASTRUCTURE_SERVICES}


async def test_health_has_an_entry_per_service_and_model(channel, ready_worker):
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", *SERVICES):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING

    async def model_serves():
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await stub.Check(health_pb2.HealthCheckRequest(service="m"))).status == SERVING

    await until(model_serves)


async def test_health_of_a_model_without_workers_is_not_serving(channel):
    stub = health_pb2_grpc.HealthStub(channel)

    async def model_is_known():
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await stub.Check(health_pb2.HealthCheckRequest(service="m"))).status == NOT_SERVING

    await until(model_is_known)


async def test_models_say_whether_they_wait_for_a_worker(channel, engine, redis):
    stub = models_pb2_grpc.ModelsStub(channel)
    model = await stub.GetModel(models_pb2.GetModelRequest(name="models/m"))
    assert model.state == models_pb2.MODEL_STATE_SCALED_TO_ZERO
    assert (model.engines, model.workers, model.max_seq_len) == (1, 0, 1 << 20)
    assert not model.HasField("oldest_wait")
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request())

    async def waiting():
        model = await stub.GetModel(models_pb2.GetModelRequest(name="models/m"))
        return model.queued_requests == 1 and model.oldest_wait.ToMilliseconds() > 0 and model

    await until(waiting)
    assert (await waiting()).state == models_pb2.MODEL_STATE_WAITING_FOR_WORKER
    listed = await stub.ListModels(models_pb2.ListModelsRequest())
    assert [m.state for m in listed.models] == [models_pb2.MODEL_STATE_WAITING_FOR_WORKER]
    call.cancel()


async def test_models_count_all_that_this_gateway_holds_and_workers_that_start(channel, engine, redis):
    stub = models_pb2_grpc.ModelsStub(channel)
    info = workers_pb2.Worker(
        name="workers/w8",
        role=workers_pb2.WORKER_ROLE_INFERENCE,
        state=workers_pb2.WORKER_STATE_LOADING,
        model="models/m",
    )
    await Leases(redis, WORKER).renew("w8", info.SerializeToString(), ttl_s=60)
    await ServingIndex(redis).put("m", ServingSettings(max_workers=3))
    count = GatewaySettings().queue_window + 3
    calls = [inference_pb2_grpc.InferenceStub(channel).Generate(request()) for _ in range(count)]

    async def all_wait():
        model = await stub.GetModel(models_pb2.GetModelRequest(name="models/m"))
        return model.queued_requests == count and model

    await until(all_wait)
    model = await all_wait()
    assert (model.workers, model.starting_workers, model.serving.max_workers) == (0, 1, 3)
    for call in calls:
        call.cancel()


async def test_listings_show_models_engines_and_workers(channel, engine, ready_worker):
    models = await models_pb2_grpc.ModelsStub(channel).ListModels(models_pb2.ListModelsRequest())
    assert [(m.name, m.state, m.slots) for m in models.models] == [
        ("models/m", models_pb2.MODEL_STATE_READY, 4)
    ]
    engines = await engines_pb2_grpc.EnginesStub(channel).ListEngines(engines_pb2.ListEnginesRequest())
    assert [e.name for e in engines.engines] == [f"engines/{engine.digest}"]
    assert engines.engines[0].target == engine.target.to_proto()
    assert dict(engines.engines[0].options) == engine.options
    workers = await workers_pb2_grpc.WorkersStub(channel).ListWorkers(workers_pb2.ListWorkersRequest())
    assert list(workers.workers) == [ready_worker]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: models_pb2_grpc.ModelsStub(c).GetModel, models_pb2.GetModelRequest(name="models/x")),
        (lambda c: engines_pb2_grpc.EnginesStub(c).GetEngine, engines_pb2.GetEngineRequest(name="engines/x")),
        (lambda c: workers_pb2_grpc.WorkersStub(c).GetWorker, workers_pb2.GetWorkerRequest(name="workers/x")),
    ],
)
async def test_what_does_not_exist_is_not_found(channel, call, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel)(message)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert details_of(caught.value, error_details_pb2.ResourceInfo).resource_name == message.name


async def test_channelz_knows_this_server(channel):
    servers = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
    assert servers.server


async def test_a_client_that_pings_each_second_keeps_its_call(gateway, worker):
    """Field case 19: more pings without data than core's default of two strikes allows."""
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=options) as pinging:
        answer = asyncio.ensure_future(collect(inference_pb2_grpc.InferenceStub(pinging).Generate(request())))
        _, handle = await worker.begin()
        await asyncio.sleep(10)  # ten seconds without data are what the case is about
        await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
        assert (await answer)[0] == "y"


async def test_five_megabytes_pass_and_more_names_the_limit(channel, worker):
    """Field case 20."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    ids = [200] * 1_000_000 + [97]  # two bytes each on the wire; the last one ends no half character
    message = inference_pb2.GenerateRequest(
        model="m", token_ids={"ids": ids}, sampling={"max_tokens": 2}, return_token_ids=True
    )
    answer = asyncio.ensure_future(collect(stub.Generate(message)))
    _, handle = await worker.begin()
    await worker.send((handle, 0, [*b"ok"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "ok"
    too_large = inference_pb2.GenerateRequest(model="m", prompt="x" * (9 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(too_large))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(8 << 20) in caught.value.details()


async def test_a_long_prompt_is_refused_with_its_limit(channel):
    message = inference_pb2.GenerateRequest(model="m", prompt="x" * (5 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(inference_pb2_grpc.InferenceStub(channel).Generate(message))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(4 << 20) in caught.value.details()


async def test_a_draining_gateway_ends_its_streams_well_and_refuses_new_ones(gateway, channel, worker):
    """Field case 22."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    answer = asyncio.ensure_future(collect(stub.Generate(request())))
    _, handle = await worker.begin()
    stopping = asyncio.ensure_future(gateway.stop())
    await until(lambda: gateway.inference.is_draining)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request()))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert details_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() > 0
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    await worker.send((handle, 0, [*b"y"]), finishes=[(handle, LENGTH)])
    assert (await answer)[0] == "y"
    await stopping


def test_a_gateway_that_listens_everywhere_must_say_where_it_is():
    with pytest.raises(ValidationError, match="link_advertise_host"):
        GatewaySettings(link_host="0.0.0.0")
    settings = GatewaySettings(link_host="0.0.0.0", link_advertise_host="gateway-1")
    assert settings.link_address(7) == "gateway-1:7"
    assert GatewaySettings(link_host="10.0.0.1").link_address(7) == "10.0.0.1:7"
