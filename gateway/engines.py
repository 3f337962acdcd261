"""The service Engines: lists engines, says who signed them, and removes them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf import empty_pb2

from enginemesh.v1 import engines_pb2, engines_pb2_grpc
from gateway.pages import one, page, resource_id
from mesh.signing import SignatureState

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

    from mesh.bus.index import EngineIndex
    from mesh.engine_removal import EngineRemover
    from mesh.engine_store import EngineRecord
    from mesh.signing import Trust

    Context = grpc.aio.ServicerContext[Any, Any]

_STATES = {
    SignatureState.VERIFIED: engines_pb2.SIGNATURE_STATE_VERIFIED,
    SignatureState.UNSIGNED: engines_pb2.SIGNATURE_STATE_UNSIGNED,
    SignatureState.UNTRUSTED: engines_pb2.SIGNATURE_STATE_UNTRUSTED,
    SignatureState.INVALID: engines_pb2.SIGNATURE_STATE_INVALID,
}


class EnginesServicer(engines_pb2_grpc.EnginesServicer):
    """Engines in the store, by its index.

    Args:
        index: Of the store.
        trust: Whose signatures count.
        remover: Removes engines from the store.
    """

    def __init__(self, index: EngineIndex, trust: Trust, remover: EngineRemover) -> None:
        self._index = index
        self._trust = trust
        self._remover = remover

    async def GetEngine(self, request: engines_pb2.GetEngineRequest, context: Context) -> engines_pb2.Engine:
        """See engines.proto."""
        resource_id("name", request.name, "engines")
        engines = self._newest_first(await self._index.engines())
        return one(engines, "engine", request.name, lambda engine: engine.name)

    async def ListEngines(
        self, request: engines_pb2.ListEnginesRequest, context: Context
    ) -> engines_pb2.ListEnginesResponse:
        """See engines.proto."""
        model = resource_id("model", request.model, "models") if request.model else None
        engines, token = page(
            self._newest_first(await self._index.engines(model)),
            lambda engine: engine.name,
            request.page_size,
            request.page_token,
        )
        return engines_pb2.ListEnginesResponse(engines=engines, next_page_token=token)

    async def DeleteEngine(
        self, request: engines_pb2.DeleteEngineRequest, context: Context
    ) -> empty_pb2.Empty:
        """See engines.proto."""
        digest = resource_id("name", request.name, "engines")
        # Half a removal would have to be done again: it goes on if the client leaves.
        await asyncio.shield(asyncio.ensure_future(self._remover.remove_one(digest)))
        return empty_pb2.Empty()

    def _newest_first(self, records: Iterable[EngineRecord]) -> list[engines_pb2.Engine]:
        newest_first = sorted(records, key=lambda record: (record.create_time, record.digest), reverse=True)
        return [_engine(record, self._trust) for record in newest_first]


def _engine(record: EngineRecord, trust: Trust) -> engines_pb2.Engine:
    manifest = record.manifest
    engine = engines_pb2.Engine(
        name=f"engines/{record.digest}",
        model=f"models/{manifest.model}",
        kind=manifest.kind,
        target=manifest.target.to_proto(),
        precision=manifest.precision,
        size_bytes=manifest.size,
        max_seq_len=manifest.max_seq_len,
        max_batch_size=manifest.max_batch_size,
        versions=manifest.versions,
        capabilities=manifest.capabilities,
        signature_state=_STATES[record.verdict(trust).state],
        signature_key_ids=[signature.key_id for signature in record.signatures],
        options=manifest.options,
    )
    engine.create_time.FromDatetime(record.create_time)
    return engine
