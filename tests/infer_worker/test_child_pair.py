"""The engine's end of the socketpair."""

from __future__ import annotations

import socket

import pytest

from enginemesh.internal.v1 import engine_process_pb2, step_pb2
from infer_worker.child_messages import MessageReader, encode_message
from infer_worker.child_pair import CONGESTED_BYTES, Pair

BIG = engine_process_pb2.EngineEvent(step=step_pb2.StepOutput(token_ids=range(100_000)))


@pytest.fixture
def ends():
    """The pair of an engine, and the socket of its worker."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        yield Pair(theirs), ours


def _events(data):
    return [engine_process_pb2.EngineEvent.FromString(message) for message in MessageReader().feed(data)]


def test_commands_come_in(ends):
    pair, worker = ends
    assert pair.receive(0) == []
    command = engine_process_pb2.EngineCommand(cancel=3)
    worker.sendall(encode_message(command) * 2)
    assert pair.receive(5) == [command, command]


def test_worker_that_does_not_read_never_blocks_the_engine(ends):
    pair, worker = ends
    count = 0
    while not pair.is_congested:
        pair.send(BIG)
        count += 1
    worker.sendall(encode_message(engine_process_pb2.EngineCommand(cancel=3)))
    assert [command.cancel for command in pair.receive(5)] == [3]  # it still hears

    data = b""
    total = count * len(encode_message(BIG))
    while len(data) < total:
        pair.receive(0)
        data += worker.recv(1 << 20)
    assert _events(data) == [BIG] * count
    assert not pair.is_congested
    assert total > CONGESTED_BYTES


def test_worker_that_is_gone_closes_the_pair(ends):
    pair, worker = ends
    worker.close()
    assert pair.receive(5) == []
    assert not pair.is_open
    pair.send(BIG)
    pair.drain()
