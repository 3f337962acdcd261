"""What this gateway knows of each model: its engines' limits and its tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from gateway.tokenizer import ModelTokenizer
from mesh.bus.connection import UNREACHABLE
from mesh.bus.index import NO_EVENT, rebuild_index
from mesh.errors import InvalidFieldError, MeshError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from mesh.bus.index import EngineIndex
    from mesh.engine_store import EngineRecord, EngineStore
    from mesh.manifest import Manifest
    from mesh.model_fields import ServingSettings
    from mesh.signing import Trust

log = structlog.get_logger(__name__)

TOKENIZER_LIMIT_BYTES = 64 << 20
WATCH_TIMEOUT_S = 1.0
RETRY_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, with all its engines of one vocabulary.

    Attributes:
        engines: By digest.
        tokenizer: Shared by all of them.
        indexed: Digests of all its engines, those of other vocabularies included.
        serving: Its limits.
    """

    name: str
    engines: dict[str, Manifest]
    tokenizer: ModelTokenizer
    indexed: frozenset[str]
    serving: ServingSettings

    def engines_for(self, engine: str) -> list[Manifest]:
        """The engines that a request may run on: the one that it names, or all.

        Raises:
            InvalidFieldError: this model has no such engine.
        """
        if not engine:
            return list(self.engines.values())
        if engine not in self.engines:
            raise InvalidFieldError("engine", f"model {self.name!r} has no engine {engine!r}")
        return [self.engines[engine]]


class Catalogue:
    """Models by name, kept up to date by the index's events.

    Args:
        index: Names engines and their manifests.
        store: Holds their tokenizers.
        trust: Engines that it refuses do not exist here, as their tokenizers and templates would be used.
    """

    def __init__(self, index: EngineIndex, store: EngineStore, trust: Trust) -> None:
        self._index = index
        self._store = store
        self._trust = trust
        self._models: dict[str, ServedModel] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def model(self, name: str) -> ServedModel:
        """One model.

        Raises:
            NotFoundError: it has no engine.
            UnavailableError: the store or the index cannot be reached.
        """
        known = self._models.get(name)
        return known if known is not None else await self._update(name)

    def engine(self, model: str, digest: str) -> Manifest | None:
        """An engine of a model, if both are known here."""
        known = self._models.get(model)
        return known.engines.get(digest) if known is not None else None

    async def names(self) -> list[str]:
        """All models that have an engine; what is known here as long as the index is not whole."""
        indexed = await self._index.models()
        return indexed if await self._index.is_whole() else sorted({*indexed, *self._models})

    async def open(self) -> None:
        """Makes the index from the store if Redis has none."""
        try:
            await self._mend_index()
        except (*UNREACHABLE, MeshError) as error:
            log.warning("index not checked", error=str(error))

    async def watch(self) -> None:
        """Keeps every model loaded, for ever, so that no request waits for the store.

        Also makes the index anew from the store after Redis lost its data.
        """
        seen = NO_EVENT
        is_stale = True
        while True:
            try:
                if await self._mend_index() or is_stale:
                    await self._refresh()
                    is_stale = False
                change = await self._index.wait_for_change(seen, WATCH_TIMEOUT_S)
                if change is not None:
                    seen, is_stale = change, True
            except (*UNREACHABLE, MeshError) as error:
                log.warning("models not refreshed", error=str(error))
                is_stale = True
                await asyncio.sleep(RETRY_DELAY_S)

    async def _mend_index(self) -> bool:
        """Makes the index from the store if Redis has lost it; whether it had to."""
        if await self._index.is_whole():
            return False
        log.warning("redis has no whole index of engines; it is made from the store")
        await rebuild_index(self._store, self._index)
        return True

    async def _refresh(self) -> None:
        for name in {*self._models, *await self._index.models()}:
            try:
                await self._update(name)
            except NotFoundError:
                continue  # its last engine is gone
            except MeshError as error:  # one broken model must not hide the others
                log.warning("model not loaded", model=name, error=error.message)

    async def _update(self, name: str) -> ServedModel:
        """Makes what is known of a model agree with the index; one caller at a time for each model."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            records = self._trusted(await self._records(name))
            serving = await self._index.serving.of(name)
            if not records:
                self._models.pop(name, None)
                self._locks.pop(name, None)
                raise NotFoundError(
                    "model", name, f"no model named {name!r}: it has no engine that may be used"
                )
            digests = frozenset(record.digest for record in records)
            known = self._models.get(name)
            if known is None or known.indexed != digests:
                known = self._models[name] = await self._load(name, records, digests, serving)
            if known.serving != serving:
                known = self._models[name] = replace(known, serving=serving)
            return known

    async def _records(self, name: str) -> list[EngineRecord]:
        """A model's engines in the index; while that is not whole, those that it had last are kept.

        Raises:
            UnavailableError: the index is not whole, and the model is not known here.
        """
        records = await self._index.engines(name)
        if records:
            return records
        if await self._index.is_whole():
            return await self._index.engines(name)  # it may have become whole since it was read
        raise UnavailableError("the index of engines is being made from the store", retry_after_s=1.0)

    def _trusted(self, records: list[EngineRecord]) -> list[EngineRecord]:
        trusted = []
        for record in records:
            refusal = record.refusal(self._trust)
            if refusal:
                log.warning("engine not used", engine=record.digest, reason=refusal)
            else:
                trusted.append(record)
        return trusted

    async def _load(
        self,
        name: str,
        records: list[EngineRecord],
        digests: frozenset[str],
        serving: ServingSettings,
    ) -> ServedModel:
        newest = max(records, key=lambda record: (record.create_time, record.digest)).manifest
        file = newest.file(newest.tokenizer.file)
        same_vocabulary = {
            record.digest: record.manifest
            for record in records
            if record.manifest.file(record.manifest.tokenizer.file).sha256 == file.sha256
        }
        if len(same_vocabulary) < len(records):
            log.warning("engines with another tokenizer are not served", model=name)
        data = await asyncio.to_thread(
            self._store.read_file, newest, newest.tokenizer.file, TOKENIZER_LIMIT_BYTES
        )
        tokenizer = await asyncio.to_thread(ModelTokenizer, data, newest.tokenizer)
        return ServedModel(name, same_vocabulary, tokenizer, digests, serving)
