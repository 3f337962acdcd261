"""Which engine of the store this worker runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from infer_worker.backends import backend_class
from mesh.bus.connection import BLOCK_LIMIT_S, UNREACHABLE
from mesh.matching import match, require_match
from mesh.signing import SignatureState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mesh.bus.index import EngineIndex
    from mesh.engine_store import EngineRecord
    from mesh.manifest import Manifest
    from mesh.matching import Policy
    from mesh.signing import Trust
    from mesh.target import Target

log = structlog.get_logger(__name__)

RETRY_DELAY_S = 0.5
DIGEST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Device:
    """What engines a worker may run.

    Attributes:
        target: Its hardware.
        kinds: The kinds that it handles.
        policy: How near an engine's target must be.
        trust: Whose engines it runs.
        given_up: Engines that failed here in spite of all, by digest, and how.
    """

    target: Target
    kinds: Sequence[str]
    policy: Policy
    trust: Trust
    given_up: dict[str, str] = field(default_factory=dict)

    def refusal(self, record: EngineRecord) -> str:
        """Why an engine may not run here, by kind, hardware, versions and signature; empty if it may.

        To be asked before anything of the engine is fetched.
        """
        manifest = record.manifest
        if record.digest in self.given_up:
            return self.given_up[record.digest]
        if manifest.kind not in self.kinds:
            return f"kind {manifest.kind}, this worker handles {', '.join(self.kinds)}"
        verdict = match(manifest, self.target, backend_class(manifest.kind).versions(), self.policy)
        return record.refusal(self.trust) if verdict else str(verdict)

    def require(self, manifest: Manifest) -> None:
        """Raises PreconditionError (ENGINE_MISMATCH) unless the engine may run here."""
        require_match(manifest, self.target, backend_class(manifest.kind).versions(), self.policy)


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine to run, if there is one, and why others were passed over."""

    record: EngineRecord | None
    refusals: tuple[str, ...]


def choose_engine(records: Iterable[EngineRecord], device: Device) -> Choice:
    """The first engine that may run on the device; records come newest first."""
    refusals: list[str] = []
    for record in records:
        why = device.refusal(record)
        if not why:
            _warn_of_signature(record, device.trust)
            return Choice(record, tuple(refusals))
        refusals.append(f"{record.digest[:DIGEST_SHOWN]}: {why}")
    return Choice(None, tuple(refusals))


def _warn_of_signature(record: EngineRecord, trust: Trust) -> None:
    verdict = record.verdict(trust)
    if trust.policy == "warn" and verdict.state is not SignatureState.VERIFIED:
        log.warning("engine used without a trusted signature", engine=record.digest, why=verdict.reason)


async def wait_for_engine(
    index: EngineIndex, models: Sequence[str], device: Device, on_waiting: Callable[[str], None]
) -> Choice:
    """Returns once the index has an engine of one of the models that may run on the device.

    Args:
        index: Of the store.
        models: Whose engines; of several the first that has one.
        device: Where it shall run.
        on_waiting: Told why it waits, each time that this was found out.
    """
    while True:
        try:
            since = await index.latest_event_id()
            reasons: list[str] = []
            for model in models:
                choice = choose_engine(await index.engines(model), device)
                if choice.record is not None:
                    return choice
                reasons.extend(choice.refusals or (f"model {model} has no engine",))
            on_waiting("; ".join(reasons))
            while await index.wait_for_change(since, BLOCK_LIMIT_S) is None:
                pass
        except UNREACHABLE as error:
            on_waiting(f"Redis unreachable: {error}")
            await asyncio.sleep(RETRY_DELAY_S)
