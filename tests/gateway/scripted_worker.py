"""A worker that a test drives by hand: real queue, real link, no engine."""

from __future__ import annotations

import asyncio

import grpc

from enginemesh.internal.v1 import link_pb2, link_pb2_grpc, queue_pb2
from mesh.bus.requests import RequestConsumer
from tests.gateway.helpers import step


class ScriptedWorker:
    """Takes requests and sends what it is told to."""

    def __init__(self, redis, worker_id: str, *, model: str = "m", engine: str = "e" * 64) -> None:
        self.worker_id = worker_id
        self._engine = engine
        self._consumer = RequestConsumer(redis, model, engine, worker_id, claim_idle_s=0.2)
        self._entries = {}
        self._call = None
        self._channel = None
        self._inbox: asyncio.Queue[link_pb2.GatewayMessage] = asyncio.Queue()
        self._reader = None
        self._last_handle = 0
        self.is_beating = True
        self._beating = None
        self._writing = asyncio.Lock()  # grpc takes one write at a time

    async def take(self, *, claim: bool = False) -> queue_pb2.QueuedRequest:
        """Waits for a request, and holds its entry."""
        await self._consumer.open()
        while True:
            entries = await self._consumer.take(1, claim=claim) or await self._consumer.wait(0.1)
            if entries:
                request = queue_pb2.QueuedRequest.FromString(entries[0].payload)
                self._entries[request.request_id] = entries[0]
                return request

    async def connect(self, address: str) -> None:
        """Opens the link to a gateway."""
        self._channel = grpc.aio.insecure_channel(address)
        self._call = link_pb2_grpc.LinksStub(self._channel).Connect()
        hello = link_pb2.Hello(worker_id=self.worker_id, engine=self._engine)
        await self._call.write(link_pb2.WorkerMessage(hello=hello))
        self._reader = asyncio.ensure_future(self._read())
        self._beating = asyncio.ensure_future(self._beat())
        await self.receive("hello")

    async def claim(self, request: queue_pb2.QueuedRequest) -> int | None:
        """Asks to run a request: its handle, or None if refused. The entry is acknowledged either way."""
        if self._call is None:
            await self.connect(request.gateway_address)
        self._last_handle += 1
        claim = link_pb2.Claim(
            request_id=request.request_id, attempt=request.attempt, handle=self._last_handle
        )
        await self._write(link_pb2.WorkerMessage(claims=link_pb2.Claims(claims=[claim])))
        message = await self.receive("grants", "refusals")
        if entry := self._entries.pop(request.request_id, None):
            await self._consumer.acknowledge([entry])
        return claim.handle if message.grants else None

    async def begin(self) -> tuple[queue_pb2.QueuedRequest, int]:
        """Takes a request and gets it granted."""
        request = await self.take()
        handle = await self.claim(request)
        assert handle is not None
        return request, handle

    async def send(self, *rows, finishes=()) -> None:
        """Sends a frame."""
        await self._write(link_pb2.WorkerMessage(step=step(*rows, finishes=finishes)))

    async def receive(self, *fields: str) -> link_pb2.GatewayMessage:
        """The next message that carries one of these fields."""
        while True:
            message = await asyncio.wait_for(self._inbox.get(), 10)
            if any(message.HasField(f) if f == "hello" else getattr(message, f) for f in fields):
                return message

    async def closed(self) -> None:
        """Returns once the gateway has ended the link."""
        await asyncio.wait_for(self._reader, 10)

    async def break_link(self) -> None:
        """Drops the connection."""
        self._beating.cancel()
        self._reader.cancel()
        await self._channel.close()
        self._call = None

    async def close(self) -> None:
        """Ends the link, if any, and leaves the queue."""
        if self._call is not None:
            await self.break_link()
        await self._consumer.close()

    async def _write(self, message) -> None:
        async with self._writing:
            await self._call.write(message)

    async def _read(self) -> None:
        async for message in self._call:
            self._inbox.put_nowait(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self.is_beating:
                await self._write(link_pb2.WorkerMessage(heartbeat=link_pb2.Heartbeat()))
