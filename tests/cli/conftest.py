"""A gateway that answers what a test puts into it."""

# ruff: noqa: N802 -- gRPC names the methods of a servicer

from __future__ import annotations

from concurrent import futures

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from grpc_status import rpc_status
from typer.testing import CliRunner

from cli.main import app, run
from enginemesh.v1 import (
    builds_pb2,
    builds_pb2_grpc,
    engines_pb2,
    engines_pb2_grpc,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)


class ScriptedGateway(
    inference_pb2_grpc.InferenceServicer,
    models_pb2_grpc.ModelsServicer,
    engines_pb2_grpc.EnginesServicer,
    workers_pb2_grpc.WorkersServicer,
    builds_pb2_grpc.BuildsServicer,
    operations_pb2_grpc.OperationsServicer,
):
    """Hands out the lists it holds, one item a page; ends calls with `error` if set."""

    def __init__(self):
        self.requests = []
        self.answer = []
        self.models, self.engines, self.workers, self.operations = [], [], [], []
        self.logs, self.logs_to_come, self.operations_to_come = {}, [], []
        self.error = None
        self.address = ""

    def Generate(self, request, context):
        self.requests.append(request)
        yield from self.answer
        self._fail(context)

    def CreateBuild(self, request, context):
        self.requests.append(request)
        self._fail(context)
        return self.operations[0]

    def WatchBuild(self, request, context):
        self.requests.append(request)
        yield from self.operations

    def ListModels(self, request, context):
        self._fail(context)
        items, token = _page(self.models, request.page_token)
        return models_pb2.ListModelsResponse(models=items, next_page_token=token)

    def DeleteEngine(self, request, context):
        self.requests.append(request)
        self._fail(context)
        return empty_pb2.Empty()

    def ListEngines(self, request, context):
        self.requests.append(request)
        items, token = _page(self.engines, request.page_token)
        return engines_pb2.ListEnginesResponse(engines=items, next_page_token=token)

    def ListWorkers(self, request, context):
        items, token = _page(self.workers, request.page_token)
        return workers_pb2.ListWorkersResponse(workers=items, next_page_token=token)

    def GetBuildLog(self, request, context):
        self._fail(context)
        text = self.logs_to_come.pop(0) if self.logs_to_come else self.logs[request.name]
        return builds_pb2.BuildLog(text=text)

    def GetOperation(self, request, context):
        return self.operations_to_come.pop(0) if self.operations_to_come else self.operations[0]

    def CancelOperation(self, request, context):
        self.requests.append(request)
        return empty_pb2.Empty()

    def DeleteOperation(self, request, context):
        self.requests.append(request)
        return empty_pb2.Empty()

    def ListOperations(self, request, context):
        self.requests.append(request)
        items, token = _page(self.operations, request.page_token)
        return operations_pb2.ListOperationsResponse(operations=items, next_page_token=token)

    def _fail(self, context):
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error.to_status()))


def _page(items, token):
    at = int(token or 0)
    return items[at : at + 1], str(at + 1) if at + 1 < len(items) else ""


@pytest.fixture
def gateway(monkeypatch):
    """A ScriptedGateway at the address that commands use."""
    servicer = ScriptedGateway()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    for add in (
        inference_pb2_grpc.add_InferenceServicer_to_server,
        models_pb2_grpc.add_ModelsServicer_to_server,
        engines_pb2_grpc.add_EnginesServicer_to_server,
        workers_pb2_grpc.add_WorkersServicer_to_server,
        builds_pb2_grpc.add_BuildsServicer_to_server,
        operations_pb2_grpc.add_OperationsServicer_to_server,
    ):
        add(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("ENGINEMESH_GATEWAY", servicer.address)
    monkeypatch.setenv("COLUMNS", "200")
    yield servicer
    server.stop(None).wait()


@pytest.fixture
def invoke():
    """Runs a command in this process; errors are raised."""

    def call(*arguments, **more):
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False, **more)

    return call


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Runs a command as the shell does; gives exit status, output and error output."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["enginemesh", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call
