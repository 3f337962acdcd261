"""Messages survive any cutting of the stream between a worker and its engine."""

from __future__ import annotations

import pytest

from enginemesh.internal.v1 import engine_process_pb2
from infer_worker.child_messages import MessageReader, encode_message

COMMANDS = [
    engine_process_pb2.EngineCommand(cancel=7),
    engine_process_pb2.EngineCommand(),
    engine_process_pb2.EngineCommand(add=engine_process_pb2.AddSequence(id=1, prompt_ids=range(10_000))),
]


@pytest.mark.parametrize("size", [1, 3, 4096, 1 << 20])
def test_messages_come_out_as_they_went_in(size):
    stream = b"".join(encode_message(command) for command in COMMANDS)
    reader = MessageReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    messages = [message for piece in pieces for message in reader.feed(piece)]
    assert [engine_process_pb2.EngineCommand.FromString(message) for message in messages] == COMMANDS
