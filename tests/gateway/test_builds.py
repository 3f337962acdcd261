"""Builds and Operations over gRPC, with a real queue and build workers that are leases only."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from enginemesh.v1 import builds_pb2, builds_pb2_grpc, workers_pb2
from gateway.builds import BuildsServicer, choose_target
from gateway.interceptors import ErrorInterceptor
from gateway.operations import OperationsServicer
from mesh import build_operation
from mesh.build_logs import BuildLogs
from mesh.bus.build_jobs import BuildConsumer
from mesh.bus.leases import WORKER, Leases
from mesh.bus.serving import ServingIndex
from mesh.errors import PreconditionError
from mesh.model_fields import ServingSettings
from mesh.object_store import ObjectStore
from mesh.settings import GatewaySettings
from mesh.target import Target

AVX2 = Target(device_type="cpu", device_name="A", architecture="x86_64", instruction_set="avx2")
AVX512 = Target(device_type="cpu", device_name="B", architecture="x86_64", instruction_set="avx512")


def worker(name="b1", *, kinds=("fake",), target=AVX2, role=workers_pb2.WORKER_ROLE_BUILD):
    return workers_pb2.Worker(name=f"workers/{name}", role=role, kinds=kinds, target=target.to_proto())


def spec(**fields):
    return builds_pb2.ModelSpec(**{"model": "m", "kind": "fake", **fields})


@pytest.fixture
def logs(store_settings, monkeypatch):
    for name, value in store_settings.items():
        monkeypatch.setenv(name, value)
    return BuildLogs(ObjectStore.from_settings(GatewaySettings()))


@pytest.fixture
async def channel(redis, logs):
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    builds_pb2_grpc.add_BuildsServicer_to_server(BuildsServicer(redis, GatewaySettings()), server)
    operations_pb2_grpc.add_OperationsServicer_to_server(OperationsServicer(redis, logs), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(0)


@pytest.fixture
def builds(channel):
    return builds_pb2_grpc.BuildsStub(channel)


@pytest.fixture
def operations(channel):
    return operations_pb2_grpc.OperationsStub(channel)


@pytest.fixture
async def build_worker(redis):
    """A live build worker for AVX2 and kind fake; its side of the queue."""
    described = worker()
    await Leases(redis, WORKER).renew("b1", described.SerializeToString(), 60.0)
    return BuildConsumer(redis, AVX2.key, ["fake"], "b1")


async def finish(build_worker, taken):
    metadata = builds_pb2.BuildMetadata(spec=taken.job.spec, target=taken.job.target)
    result = builds_pb2.BuildResult(engine="engines/abc", size_bytes=3)
    operation = build_operation.succeeded(taken.job.build_id, metadata, result)
    assert await build_worker.finish(taken, operation)


def details(error, kind):
    """The error's details of one kind."""
    status = rpc_status.from_call(error)
    found = []
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


async def test_build_runs_from_call_to_result(builds, operations, build_worker):
    operation = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec()))
    watching = builds.WatchBuild(builds_pb2.WatchBuildRequest(name=operation.name))
    first = await watching.read()
    taken = await build_worker.take(1.0)
    await finish(build_worker, taken)
    last = await watching.read()

    assert build_operation.metadata_of(first).stage == builds_pb2.BUILD_STAGE_QUEUED
    assert build_operation.metadata_of(first).target.key == AVX2.key
    assert last.done
    assert build_operation.result_of(last).engine == "engines/abc"
    assert await watching.read() is grpc.aio.EOF
    assert await operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name)) == last


async def test_trace_goes_on_in_the_job(builds, build_worker, spans):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    await builds.CreateBuild(
        builds_pb2.CreateBuildRequest(spec=spec()),
        metadata=(("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),),
    )
    taken = await build_worker.take(1.0)

    span = next(s for s in spans.get_finished_spans() if s.name == "enginemesh.v1.Builds/CreateBuild")
    assert f"{span.context.trace_id:032x}" == trace_id
    assert taken.job.traceparent.split("-")[1:3] == [trace_id, f"{span.context.span_id:016x}"]


async def test_validate_only_builds_nothing(builds, operations, build_worker):
    checked = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec(), validate_only=True))

    assert checked.done
    assert checked.WhichOneof("result") == "response"
    assert build_operation.metadata_of(checked).target.key == AVX2.key
    assert await build_worker.take(0.01) is None
    listed = await operations.ListOperations(operations_pb2.ListOperationsRequest(name="operations"))
    assert not listed.operations


async def test_same_request_id_gives_same_operation(builds, build_worker):
    request = builds_pb2.CreateBuildRequest(spec=spec(), request_id="mine")

    first, second = [await builds.CreateBuild(request) for _ in range(2)]

    assert first.name == second.name


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"spec": {"model": "Bad Name"}}, "spec.model"),
        ({"spec": {"kind": ""}}, "spec.kind"),
        ({"spec": {"max_seq_len": 1 << 31}}, "spec.max_seq_len"),
        ({"spec": {}, "request_id": "x" * 129}, "request_id"),
    ],
)
async def test_malformed_request_names_its_field(builds, build_worker, request_fields, field):
    wanted = builds_pb2.CreateBuildRequest(**{**request_fields, "spec": spec(**request_fields["spec"])})

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await builds.CreateBuild(wanted)

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    violations = details(caught.value, error_details_pb2.BadRequest)[0].field_violations
    assert [violation.field for violation in violations] == [field]


async def test_no_build_worker_is_a_failed_precondition(builds):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec()))

    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(caught.value, error_details_pb2.ErrorInfo)[0].reason == "NO_BUILD_WORKER"
    assert details(caught.value, error_details_pb2.PreconditionFailure)[0].violations


@pytest.mark.parametrize("call", ["GetOperation", "WaitOperation", "CancelOperation", "DeleteOperation"])
@pytest.mark.parametrize(
    ("name", "code"),
    [("operations/none", grpc.StatusCode.NOT_FOUND), ("builds/1", grpc.StatusCode.INVALID_ARGUMENT)],
)
async def test_unknown_name_is_refused(operations, call, name, code):
    request = getattr(operations_pb2, f"{call}Request")(name=name)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(operations, call)(request)

    assert caught.value.code() == code


async def test_watch_of_unknown_build_is_not_found(builds):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await builds.WatchBuild(builds_pb2.WatchBuildRequest(name="operations/none")).read()

    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_pages_show_every_operation_once(builds, operations, build_worker):
    names = {
        (await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec(model=f"m{number}")))).name
        for number in range(5)
    }
    request = operations_pb2.ListOperationsRequest(name="operations", page_size=2)
    pages = []
    while not pages or request.page_token:
        answer = await operations.ListOperations(request)
        pages.append([operation.name for operation in answer.operations])
        request.page_token = answer.next_page_token

    assert [len(shown) for shown in pages] == [2, 2, 1]
    assert {name for shown in pages for name in shown} == names


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"name": "builds"}, "name"), ({"filter": "done"}, "filter"), ({"page_size": -1}, "page_size")],
)
async def test_malformed_listing_names_its_field(operations, fields, field):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await operations.ListOperations(operations_pb2.ListOperationsRequest(**fields))

    violations = details(caught.value, error_details_pb2.BadRequest)[0].field_violations
    assert [violation.field for violation in violations] == [field]


async def test_wait_ends_with_the_build_or_its_timeout(builds, operations, build_worker):
    operation = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec()))
    taken = await build_worker.take(1.0)

    early = await operations.WaitOperation(
        operations_pb2.WaitOperationRequest(
            name=operation.name, timeout=duration_pb2.Duration(nanos=20_000_000)
        )
    )
    # Without a timeout of its own, a wait ends with a state before its call's deadline.
    before_deadline = await operations.WaitOperation(
        operations_pb2.WaitOperationRequest(name=operation.name), timeout=1.0
    )
    waiting = asyncio.ensure_future(
        operations.WaitOperation(operations_pb2.WaitOperationRequest(name=operation.name))
    )
    await finish(build_worker, taken)

    assert not early.done
    assert not before_deadline.done
    assert (await waiting).done


async def test_cancelled_build_can_be_deleted(builds, operations, build_worker):
    operation = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await operations.DeleteOperation(operations_pb2.DeleteOperationRequest(name=operation.name))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    await operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
    ended = await operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name))
    await operations.DeleteOperation(operations_pb2.DeleteOperationRequest(name=operation.name))

    assert ended.error.code == grpc.StatusCode.CANCELLED.value[0]
    with pytest.raises(grpc.aio.AioRpcError):
        await operations.GetOperation(operations_pb2.GetOperationRequest(name=operation.name))


async def test_serving_is_kept_per_model_and_no_part_of_the_build(builds, build_worker, redis):
    first = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec(serving={"max_waiting_s": 5})))
    second = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec(serving={"max_workers": 2})))
    silent = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec()))

    assert first.name == second.name == silent.name
    assert not build_operation.metadata_of(first).spec.HasField("serving")
    assert (await ServingIndex(redis).all()) == {"m": ServingSettings(max_workers=2)}


async def test_a_check_keeps_no_serving(builds, build_worker, redis):
    await builds.CreateBuild(
        builds_pb2.CreateBuildRequest(spec=spec(serving={"max_workers": 2}), validate_only=True)
    )

    assert await ServingIndex(redis).all() == {}


def test_target_may_be_named():
    gpus = [Target.from_name(name, cuda_major=12) for name in ("h100-sxm-80gb", "h100-sxm-80gb:mig-1g.10gb")]
    fleet = [worker(f"b{number}", target=target) for number, target in enumerate(gpus)]

    assert [choose_target(fleet, "fake", target.name).key for target in gpus] == [gpu.key for gpu in gpus]


def test_only_target_of_the_kind_is_chosen():
    fleet = [
        worker(),
        worker("b2"),
        worker("b3", kinds=("openvino",), target=AVX512),
        worker("w1", target=AVX512, role=workers_pb2.WORKER_ROLE_INFERENCE),
    ]

    assert choose_target(fleet, "fake", "").key == AVX2.key
    assert choose_target(fleet, "openvino", AVX512.key).key == AVX512.key


@pytest.mark.parametrize(
    ("fleet", "wanted", "reason", "words"),
    [
        ([], "", "NO_BUILD_WORKER", "build workers: none"),
        ([worker(kinds=("openvino",))], "", "NO_BUILD_WORKER", "workers/b1 builds openvino for cpu-"),
        ([worker()], "cpu-x86_64-amx", "NO_BUILD_WORKER", "target 'cpu-x86_64-amx'"),
        (
            [worker(), worker("b2", target=AVX512)],
            "",
            "AMBIGUOUS_TARGET",
            f"{AVX2.key}, {AVX512.key}",
        ),
    ],
)
def test_unclear_target_is_refused_with_what_there_is(fleet, wanted, reason, words):
    with pytest.raises(PreconditionError, match=words) as caught:
        choose_target(fleet, "fake", wanted)

    assert caught.value.reason == reason


async def names(operations, **fields):
    answer = await operations.ListOperations(operations_pb2.ListOperationsRequest(**fields))
    return [operation.name for operation in answer.operations], answer.next_page_token


async def test_filter_shows_what_is_wanted_in_pages(builds, operations, build_worker):
    made = [
        (await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec(model=f"m{number}")))).name
        for number in range(4)
    ]
    taken = await build_worker.take(1.0)
    await finish(build_worker, taken)
    ended = f"operations/{taken.job.build_id}"

    running, token = await names(operations, filter="done = false", page_size=2)
    rest, end = await names(operations, filter="done = false", page_size=2, page_token=token)

    assert {*running, *rest} == {*made} - {ended}
    assert (len(running), len(rest), end) == (2, 1, "")
    assert (await names(operations, filter="outcome=succeeded"))[0] == [ended]
    assert (await names(operations, filter='model = "m3" AND kind != openvino AND stage = QUEUED'))[0] == [
        made[3]
    ]
    assert (await names(operations, filter="model = none-of-them"))[0] == []


async def test_log_is_read_by_build_and_engine_and_goes_with_the_build(
    builds, operations, build_worker, logs
):
    operation = await builds.CreateBuild(builds_pb2.CreateBuildRequest(spec=spec()))
    build_id = operation.name.removeprefix("operations/")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await builds.GetBuildLog(builds_pb2.GetBuildLogRequest(name=operation.name))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND

    await asyncio.to_thread(logs.write, build_id, "caf\u00e9\n".encode(), "abc")
    for name in (operation.name, "engines/abc"):
        assert (await builds.GetBuildLog(builds_pb2.GetBuildLogRequest(name=name))).text == "caf\u00e9\n"

    await finish(build_worker, await build_worker.take(1.0))
    await operations.DeleteOperation(operations_pb2.DeleteOperationRequest(name=operation.name))
    with pytest.raises(grpc.aio.AioRpcError):
        await builds.GetBuildLog(builds_pb2.GetBuildLogRequest(name=operation.name))
    assert (await builds.GetBuildLog(builds_pb2.GetBuildLogRequest(name="engines/abc"))).text


@pytest.mark.parametrize("name", ["", "builds/1", "operations/", "operations/../engines", "engines/a/b"])
async def test_log_of_a_malformed_name_is_refused(builds, name):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await builds.GetBuildLog(builds_pb2.GetBuildLogRequest(name=name))

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
