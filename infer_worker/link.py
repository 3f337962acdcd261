"""The worker's end of a link: one gRPC stream to one gateway process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from enginemesh.internal.v1 import link_pb2, link_pb2_grpc
from infer_worker.outbox import Outbox
from mesh.transport import LINK_MESSAGE_BYTES, channel_options

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = grpc.aio.StreamStreamCall[link_pb2.WorkerMessage, link_pb2.GatewayMessage]

CONNECT_LIMIT_S = 2.0
CLOSE_LIMIT_S = 1.0


class LinkError(Exception):
    """The link is lost; the message says how."""


class Link:
    """One link, from its first connection to its loss. It is not opened again; a new one takes its place.

    Args:
        address: Where the gateway listens for links, "host:port".
        hello: How this worker introduces itself.
        on_message: Told what the gateway says.
    """

    def __init__(
        self,
        address: str,
        hello: link_pb2.Hello,
        on_message: Callable[[Link, link_pb2.GatewayMessage], None],
    ) -> None:
        self.address = address
        self.outbox = Outbox()
        self.gateway_id = ""
        """Who answered; empty until then."""
        self.last_heard = 0.0
        """When the gateway last said anything, by the loop's clock."""
        self.unanswered_since = 0.0
        """When a claim was last dropped because no answer had come."""
        self._hello = hello
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._heartbeat_s = 0.0
        self._is_beat_due = False
        self._last_sent = 0.0
        self._closing = asyncio.Event()

    async def run(self) -> str:
        """Connects and carries messages until the link is lost or closed; returns how it ended."""
        channel = grpc.aio.insecure_channel(self.address, options=channel_options(LINK_MESSAGE_BYTES))
        try:
            call = link_pb2_grpc.LinksStub(channel).Connect()
            await asyncio.wait_for(self._introduce(call), CONNECT_LIMIT_S)
            await self._carry(call)
        except (LinkError, grpc.RpcError, asyncio.InvalidStateError) as error:
            return _brief(error)
        except asyncio.TimeoutError:
            return f"no answer within {CONNECT_LIMIT_S:g} s"
        else:
            return "closed"
        finally:
            await channel.close()

    def close(self) -> None:
        """Lets `run` send what is left, end the stream in order and return."""
        self._closing.set()
        self.outbox.wake()

    async def _introduce(self, call: Call) -> None:
        await call.write(link_pb2.WorkerMessage(hello=self._hello))
        reply = await _next_message(call)
        if reply is None or not reply.HasField("hello"):
            raise LinkError("the gateway did not introduce itself")
        self.gateway_id = reply.hello.gateway_id
        self._heartbeat_s = reply.hello.heartbeat_interval_ms / 1000
        self.last_heard = self._last_sent = self._loop.time()

    async def _carry(self, call: Call) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._read(call), self._write(call))]
        beat = self._loop.call_later(self._heartbeat_s, self._beat)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.is_set():  # the gateway ends the stream once it has read all
                done, _ = await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)
            for task in done:
                task.result()
        finally:
            beat.cancel()
            self._heartbeat_s = 0.0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Call) -> None:
        while (message := await _next_message(call)) is not None:
            self.last_heard = self._loop.time()
            self._on_message(self, message)
        if not self._closing.is_set():
            raise LinkError("the gateway ended it")

    async def _write(self, call: Call) -> None:
        while True:
            while (message := self.outbox.take()) is not None:
                await call.write(message)
                self._last_sent = self._loop.time()
            if self._closing.is_set():
                await call.done_writing()
                return
            if self._is_beat_due:
                self._is_beat_due = False
                await call.write(link_pb2.WorkerMessage(heartbeat=link_pb2.Heartbeat()))
                self._last_sent = self._loop.time()
            await self.outbox.wait()

    def _beat(self) -> None:
        """Makes a heartbeat due if nothing was sent for an interval, and looks again when one could be.

        It depends on this loop alone: the engine is in another process.
        """
        if not self._heartbeat_s:
            return
        silence = self._loop.time() - self._last_sent
        if silence >= self._heartbeat_s:
            self._is_beat_due = True
            self.outbox.wake()
            silence = 0.0
        self._loop.call_later(self._heartbeat_s - silence, self._beat)


async def _next_message(call: Call) -> link_pb2.GatewayMessage | None:
    """What the gateway says next; None at the end of the stream."""
    message = await call.read()
    return message if isinstance(message, link_pb2.GatewayMessage) else None


def _brief(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
