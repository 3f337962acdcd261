"""Inference.Generate: receive, admit, queue, stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from gateway import admission
from gateway.request_trace import RequestTrace
from gateway.session import Session, Timeline
from mesh import telemetry
from mesh.errors import UnavailableError

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
LONG_PROMPT_BYTES = 8192
"""A prompt longer than this is tokenised in a thread, so that running streams don't wait for it."""


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

    async def Generate(  # type: ignore[override]  # it writes to the context; the stub knows iterators only
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """See inference.proto."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        request_trace = RequestTrace(_parent(context), arrived)
        session: Session | None = None
        error: BaseException | None = None
        try:
            with request_trace.admission():
                session = await self._admit(request, Timeline(arrived))
            request_trace.admitted(session)
            await self._dispatcher.submit(session, self._timeout_s(context))
            await context.send_initial_metadata(((REQUEST_ID_METADATA, session.request_id),))
            await self._stream(session, context, loop)
        except BaseException as raised:
            error = raised
            raise
        finally:
            # Also runs while a cancelled call is torn down: `end` takes back what the mesh still holds.
            if session is not None:
                self._dispatcher.end(session)
            request_trace.end(session, error, loop.time())

    async def _admit(self, request: inference_pb2.GenerateRequest, timeline: Timeline) -> Session:
        if self.is_draining:
            raise UnavailableError("this gateway is shutting down; ask another", retry_after_s=1.0)
        admission.check_capacity(len(self._dispatcher.table), self._settings.max_requests)
        checked = admission.check(request, self._settings.max_prompt_bytes)
        model = await self._catalogue.model(checked.model)
        engines = model.engines_for(checked.engine)
        prompt_ids = await _tokenise(request, model.tokenizer)
        admitted = admission.admit(checked, prompt_ids, engines)
        sampling = admitted.sampling
        return Session(
            request_id=checked.request_id,
            model=checked.model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            eos_token_ids=frozenset() if sampling.ignore_eos else model.tokenizer.eos_token_ids,
            output=model.tokenizer.output(sampling.stop),
            timeline=timeline,
            priority=checked.priority,
            engine=admitted.engine,
            return_token_ids=request.return_token_ids,
            max_attempts=self._settings.max_attempts,
        )

    async def _stream(self, session: Session, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        response = inference_pb2.GenerateResponse
        while session.terminal is None:
            await session.wait(loop)
            delta = session.drain()
            if delta is not None:
                await context.write(response(delta=delta))
        session.timeline.ended = loop.time()
        await context.write(response(finished=session.finished(session.timeline.ended)))

    def _timeout_s(self, context: Context) -> float:
        remaining = context.time_remaining()
        return self._settings.default_timeout_s if remaining is None else max(0.0, remaining)


def _parent(context: Context) -> OtelContext:
    """The caller's trace context, from the call's metadata."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if key.startswith("trace")}
    return telemetry.extract(str(metadata.get("traceparent", "")), str(metadata.get("tracestate", "")))


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
