"""A gateway that a test drives by hand: real queue, real links, no clients."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import grpc

from enginemesh.internal.v1 import link_pb2, link_pb2_grpc, queue_pb2, step_pb2
from enginemesh.v1 import sampling_pb2
from mesh.bus import keys
from mesh.bus.leases import GATEWAY, Leases
from mesh.bus.requests import RequestProducer
from tests.conditions import until

MODEL = "m"
LEASE_TTL_S = 60.0


@dataclass
class Answer:
    """What came for one attempt of a request."""

    key: tuple[str, int]
    handle: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish: step_pb2.SequenceFinish | None = None
    frames: int = 0

    @property
    def reason(self) -> str:
        """Why it ended, "" while it has not."""
        if self.finish is None:
            return ""
        return step_pb2.SequenceFinishReason.Name(self.finish.reason).removeprefix("SEQUENCE_FINISH_REASON_")


class GatewayLink:
    """One worker's stream, as this gateway sees it."""

    def __init__(self, hello):
        self.hello = hello
        self.answers: dict[int, Answer] = {}
        self.heartbeats = 0
        self.frames: list[step_pb2.StepOutput] = []
        self.outgoing: asyncio.Queue = asyncio.Queue()
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self.is_closed = False
        self.reading: asyncio.Future | None = None

    def drop(self) -> None:
        """Ends the link from the gateway's side."""
        self.reading.cancel()

    def send(self, **fields) -> None:
        self.outgoing.put_nowait(link_pb2.GatewayMessage(**fields))


class ScriptedGateway(link_pb2_grpc.LinksServicer):
    """Grants every claim unless `grant` says otherwise (False: refuse, None: keep silent)."""

    def __init__(self, redis, gateway_id: str = "gw") -> None:
        self.gateway_id = gateway_id
        self.links: list[GatewayLink] = []
        self.answers: dict[tuple[str, int], Answer] = {}
        self.claims: list[tuple[str, int]] = []
        self.unwanted_rows = 0
        self.grant = lambda _key: True
        self.heartbeat_ms = 50
        self._producer = RequestProducer(redis)
        self._leases = Leases(redis, GATEWAY)
        self._server = None
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> ScriptedGateway:
        self._server = grpc.aio.server()
        link_pb2_grpc.add_LinksServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        await self._leases.renew(self.gateway_id, b"", LEASE_TTL_S)
        return self

    async def stop(self) -> None:
        await self._server.stop(0)

    async def release_lease(self) -> None:
        await self._leases.release(self.gateway_id)

    def request(self, request_id: str, prompt=(1, 2, 3), *, attempt=1, generated=(), **sampling):
        fields = {"max_tokens": 5, **sampling}
        return queue_pb2.QueuedRequest(
            request_id=request_id,
            attempt=attempt,
            gateway_id=self.gateway_id,
            gateway_address=self.address,
            prompt_ids=prompt,
            generated_ids=generated,
            sampling=sampling_pb2.SamplingParams(**fields),
        )

    async def queue(self, request_id: str, *args, stream=None, **fields) -> None:
        """Puts a request in the queue."""
        await self.queue_message(self.request(request_id, *args, **fields), stream)

    async def queue_message(self, request, stream=None) -> None:
        stream = stream or keys.model_stream(MODEL, "normal")
        await self._producer.add(stream, request.SerializeToString(), 60)

    async def answer(self, request_id: str, attempt: int = 1) -> Answer:
        """Waits until a request has ended."""
        await self.answered(request_id, attempt, lambda answer: answer.finish is not None)
        return self.answers[request_id, attempt]

    async def tokens(self, request_id: str, count: int, attempt: int = 1) -> Answer:
        """Waits until a request has so many tokens."""
        await self.answered(request_id, attempt, lambda answer: len(answer.ids) >= count)
        return self.answers[request_id, attempt]

    async def answered(self, request_id, attempt, condition) -> None:
        key = (request_id, attempt)
        await until(lambda: key in self.answers and condition(self.answers[key]))

    async def Connect(self, request_iterator, context):  # noqa: N802 - gRPC's name
        first = await anext(aiter(request_iterator))
        link = GatewayLink(first.hello)
        self.links.append(link)
        reply = link_pb2.HelloReply(gateway_id=self.gateway_id, heartbeat_interval_ms=self.heartbeat_ms)
        await context.write(link_pb2.GatewayMessage(hello=reply))
        writing = asyncio.ensure_future(self._write(link, context))
        link.reading = asyncio.ensure_future(self._read(link, request_iterator))
        try:
            await asyncio.wait([link.reading])
        finally:
            link.is_closed = True
            writing.cancel()
            link.reading.cancel()

    async def _read(self, link, messages) -> None:
        async for message in messages:
            self._take(link, message)
            await link.is_reading.wait()

    async def _write(self, link, context) -> None:
        with contextlib.suppress(grpc.RpcError):
            while True:
                await context.write(await link.outgoing.get())

    def _take(self, link, message) -> None:
        kind = message.WhichOneof("message")
        if kind == "claims":
            for claim in message.claims.claims:
                self._answer_claim(link, claim)
        elif kind == "heartbeat":
            link.heartbeats += 1
        elif kind == "step":
            self._take_step(link, message.step)

    def _answer_claim(self, link, claim) -> None:
        key = (claim.request_id, claim.attempt)
        self.claims.append(key)
        verdict = self.grant(key)
        if verdict is None:
            return
        if not verdict:
            link.send(refusals=[claim.handle])
            return
        self.take(link, key, claim.handle)

    def take(self, link, key, handle) -> None:
        """Grants a claim."""
        self.answers[key] = link.answers[handle] = Answer(key, handle)
        link.send(grants=[handle])

    def _take_step(self, link, step) -> None:
        link.frames.append(step)
        assert len(set(step.ids)) == len(step.ids)
        assert len(step.logprobs) in (0, len(step.token_ids))
        start = 0
        for handle, offset, count in zip(step.ids, step.offsets, step.counts, strict=True):
            answer = link.answers.get(handle)
            if answer is None:
                self.unwanted_rows += 1
            elif offset > len(answer.ids):
                link.send(resends=[link_pb2.Resend(handle=handle, offset=len(answer.ids))])
            else:
                answer.ids[offset:] = step.token_ids[start : start + count]
                answer.logprobs[offset:] = step.logprobs[start : start + count]
                answer.frames += 1
            start += count
        for finish in step.finishes:
            if finish.id in link.answers:
                link.answers[finish.id].finish = finish
