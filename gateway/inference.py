"""Inference.Generate: receive, admit, queue, stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from gateway import admission
from gateway.request_trace import RequestTrace
from gateway.session import Session, Timeline
from mesh import telemetry
from mesh.errors import SlowConsumerError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    from opentelemetry.context import Context as OtelContext

    from gateway.catalogue import Catalogue
    from gateway.dispatcher import Dispatcher
    from gateway.tokenizer import ModelTokenizer
    from mesh.settings import GatewaySettings

    Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

REQUEST_ID_METADATA = "enginemesh-request-id"
CLIENT_METADATA = "enginemesh-client"
MAX_CLIENT_NAME = 128
STALL_CHECKS = 10
"""Sweeps per stall limit."""
FAR_FUTURE = float("inf")
LONG_PROMPT_BYTES = 8192
"""A prompt longer than this is tokenised in a thread, so that running streams don't wait for it."""


@dataclass(slots=True)
class _Write:
    """A call's task, and since when it waits for its client to read, in seconds of the loop's clock."""

    task: asyncio.Task[None]
    since: float = FAR_FUTURE


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves token streams.

    Args:
        catalogue: Models, their limits and tokenizers.
        dispatcher: Takes accepted requests.
        settings: Limits of this process.
    """

    def __init__(self, catalogue: Catalogue, dispatcher: Dispatcher, settings: GatewaySettings) -> None:
        self._catalogue = catalogue
        self._dispatcher = dispatcher
        self._settings = settings
        self.is_draining = False
        self._calls = 0
        self._writing: dict[Session, _Write] = {}

    async def Generate(  # type: ignore[override]  # it writes to the context; the stub knows iterators only
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """See inference.proto."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        request_trace = RequestTrace(_parent(context), arrived)
        session: Session | None = None
        error: BaseException | None = None
        self._calls += 1
        try:
            admission.check_capacity(self._calls - 1, self._settings.max_requests)
            with request_trace.admission():
                session = await self._admit(request, Timeline(arrived), _client(context))
            request_trace.admitted(session)
            await self._dispatcher.submit(session, self._timeout_s(context))
            await context.send_initial_metadata(((REQUEST_ID_METADATA, session.request_id),))
            await self._stream_unless_stalled(session, context, loop)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._calls -= 1
            # Also runs while a cancelled call is torn down: `end` takes back what the mesh still holds.
            if session is not None:
                self._dispatcher.end(session)
            request_trace.end(session, error, loop.time())

    async def _admit(
        self, request: inference_pb2.GenerateRequest, timeline: Timeline, client: str
    ) -> Session:
        if self.is_draining:
            raise UnavailableError("this gateway is shutting down; ask another", retry_after_s=1.0)
        checked = admission.check(request, self._settings.max_prompt_bytes)
        model = await self._catalogue.model(checked.model)
        engines = model.engines_for(checked.engine)
        prompt_ids = await _tokenise(request, model.tokenizer)
        serving = model.serving
        admitted = admission.admit(checked, prompt_ids, engines, serving.default_max_tokens)
        sampling = admitted.sampling
        now = asyncio.get_running_loop().time()
        self._dispatcher.room.check(checked.model, client, len(prompt_ids), now, serving)
        return Session(
            request_id=checked.request_id,
            model=checked.model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            eos_token_ids=frozenset() if sampling.ignore_eos else model.tokenizer.eos_token_ids,
            output=model.tokenizer.output(sampling.stop, _continued_ids(request, prompt_ids)),
            timeline=timeline,
            client=client,
            priority=checked.priority,
            engine=admitted.engine,
            engines=admitted.engines,
            return_token_ids=request.return_token_ids,
            max_attempts=self._settings.max_attempts,
            max_waiting_s=serving.max_waiting_s,
        )

    async def watch_stalls(self) -> None:
        """Ends, for ever, calls whose client has not read for longer than the stall limit.

        One sweep over all calls, rather than a timer around each write, which every token would pay for.
        """
        loop = asyncio.get_running_loop()
        limit = self._settings.stall_limit_s
        while True:
            await asyncio.sleep(limit / STALL_CHECKS)
            for session, call in list(self._writing.items()):
                stalled_s = loop.time() - call.since
                if stalled_s > limit:
                    session.fail(
                        SlowConsumerError(
                            f"stall_limit_s: nothing was read for {stalled_s:.1f} s, over {limit:g} s",
                            tokens_sent=session.taken,
                        )
                    )
                    call.task.cancel()

    async def _stream_unless_stalled(
        self, session: Session, context: Context, loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            await self._stream(session, context, loop)
        except asyncio.CancelledError:
            if isinstance(session.error, SlowConsumerError):
                raise session.error from None
            raise
        finally:
            self._writing.pop(session, None)

    async def _stream(self, session: Session, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        response = inference_pb2.GenerateResponse
        write = self._writing[session] = _Write(cast("asyncio.Task[None]", asyncio.current_task()))
        while session.terminal is None:
            write.since = FAR_FUTURE
            await session.wait(loop)
            delta = session.drain()
            if delta is not None:
                write.since = loop.time()
                await context.write(response(delta=delta))
        write.since = loop.time()
        await context.write(response(finished=session.finished(write.since)))

    def _timeout_s(self, context: Context) -> float:
        remaining = context.time_remaining()
        return self._settings.default_timeout_s if remaining is None else max(0.0, remaining)


def _client(context: Context) -> str:
    """Who calls, for fair shares and limits: the name that the call gives, else the host it comes from."""
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_METADATA:
            return f"name:{value!s}"[:MAX_CLIENT_NAME]
    return context.peer().rpartition(":")[0]


def _parent(context: Context) -> OtelContext:
    """The caller's trace context, from the call's metadata."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if key.startswith("trace")}
    return telemetry.extract(str(metadata.get("traceparent", "")), str(metadata.get("tracestate", "")))


def _continued_ids(request: inference_pb2.GenerateRequest, prompt_ids: Sequence[int]) -> Sequence[int]:
    """What the answer's text goes on from; a conversation's answer is a text of its own."""
    return () if request.WhichOneof("input") == "chat" else prompt_ids


async def _tokenise(request: inference_pb2.GenerateRequest, tokenizer: ModelTokenizer) -> Sequence[int]:
    if request.WhichOneof("input") == "token_ids":
        return tokenizer.check_ids(request.token_ids.ids)
    if request.ByteSize() > LONG_PROMPT_BYTES:
        return await asyncio.to_thread(_encode, request, tokenizer)
    return _encode(request, tokenizer)


def _encode(request: inference_pb2.GenerateRequest, tokenizer: ModelTokenizer) -> Sequence[int]:
    if request.WhichOneof("input") == "chat":
        return tokenizer.encode_chat(request.chat.messages)
    return tokenizer.encode_prompt(request.prompt)
