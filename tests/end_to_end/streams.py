"""Streams against a running mesh, and what a test wants to know of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import psutil
from typing_extensions import Self

from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from mesh.transport import channel_options

CALL_LIMIT_S = 90.0


@dataclass
class Stream:
    """One answer as its client saw it. Pauses are between messages, in seconds."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: inference_pb2.Finished | None = None
    longest_pause: float = 0.0


class Streams:
    """Streams of one gateway, all on one connection."""

    def __init__(self, address: str, model: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(16 << 20))
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._model = model
        self.running: list[Stream] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def request(self, prompt: str, max_tokens: int, **fields) -> inference_pb2.GenerateRequest:
        """A greedy request that goes on past the end of the model's text."""
        sampling = {
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **fields.pop("sampling", {}),
        }
        return inference_pb2.GenerateRequest(
            model=self._model, prompt=prompt, sampling=sampling, return_token_ids=True, **fields
        )

    async def run(self, prompt: str, max_tokens: int, stream: Stream | None = None) -> Stream:
        """One answer, read to its end; `stream` shows what came so far."""
        stream = stream or Stream()
        last = 0.0
        async for message in self.stub.Generate(self.request(prompt, max_tokens), timeout=CALL_LIMIT_S):
            now = time.monotonic()
            if last:
                stream.longest_pause = max(stream.longest_pause, now - last)
            last = now
            assert stream.finished is None
            stream.tokens += message.delta.token_ids
            stream.text += message.delta.text
            if message.HasField("finished"):
                stream.finished = message.finished
        assert stream.finished is not None
        return stream

    def start(self, prompts: list[str], max_tokens: int) -> list[asyncio.Task[Stream]]:
        """Many answers at once; `running` shows what came so far of those started last."""
        self.running = [Stream() for _ in prompts]
        return [
            asyncio.ensure_future(self.run(prompt, max_tokens, stream))
            for prompt, stream in zip(prompts, self.running, strict=True)
        ]


def ready_workers(mesh):
    """The inference workers of a local mesh that take work; a killed one holds its lease a little longer."""
    with mesh.client() as client:
        return [worker for worker in client.ready_workers() if _is_alive(worker.process_id)]


def _is_alive(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
