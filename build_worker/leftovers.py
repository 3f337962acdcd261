"""Removes from the store what a build left that did not end well: blobs without an engine, kept results."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from build_worker.scratch import Scratch, builds_with_scratch
from mesh import sweeps
from mesh.bus.connection import UNREACHABLE
from mesh.errors import MeshError, NotFoundError
from mesh.store_layout import PUBLISHING, blob_key

if TYPE_CHECKING:
    from build_worker.scratch import BegunPublication
    from mesh.bus.builds import BuildQueue
    from mesh.engine_store import EngineStore
    from mesh.object_store import ObjectStore

log = structlog.get_logger(__name__)


def remove_leftovers(objects: ObjectStore, build_id: str) -> None:
    """Removes all that a build that has ended left in the store, but for its engine; harmless if nothing."""
    scratch = Scratch(objects, build_id)
    publication = scratch.publication()
    if publication is not None:
        take_back(objects, publication)
    scratch.remove()


def take_back(objects: ObjectStore, publication: BegunPublication) -> None:
    """Removes the blobs that a publication sent whose process has died, unless an engine needs them."""
    for entry in list(objects.list(f"{PUBLISHING}{publication.manifest.digest}/")):
        objects.delete(entry.key)
    for sha256 in publication.sent:
        objects.abort_uploads(blob_key(sha256))
    sweeps.sweep(objects, sweeps.References(objects), publication.sent)


async def sweep_ended(store: EngineStore, queue: BuildQueue) -> int:
    """Removes what is left of builds that ended while no worker had them; returns of how many.

    As of one that was cancelled after its worker had died.
    """
    removed = 0
    try:
        for build_id in await asyncio.to_thread(builds_with_scratch, store.objects):
            if await _has_ended(queue, build_id):
                await asyncio.to_thread(remove_leftovers, store.objects, build_id)
                removed += 1
    except (*UNREACHABLE, MeshError) as error:
        log.warning("leftovers not removed", error=str(error))
    return removed


async def _has_ended(queue: BuildQueue, build_id: str) -> bool:
    try:
        return bool((await queue.get(build_id)).done)
    except NotFoundError:
        return True
