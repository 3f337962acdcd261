"""Keeps those who publish engines and those who collect garbage out of each other's way, without a lock.

The danger: a publisher finds a blob in the store and relies on it; a collector, to whom no manifest names
that blob, removes it; the publisher writes a manifest that names it. So both announce what they are about to
do before they look at what the other does:

    publisher:  announce the blobs; wait for sweeps that name one of them; send what is missing; write the
                manifest; take the announcement back
    collector:  announce the sweep; read the announcements, then the manifests; remove what none of them
                names; take the sweep back

Whoever announces second sees the other, as S3 answers consistently. A collector that sees a publisher, or
its manifest, leaves the blobs alone; a publisher that sees a sweep waits for its end, and sends again what
it removed. Neither waits for a process that died: a collector removes nothing later than
REMOVE_LIMIT_S after its announcement, so a publisher waits no longer than WAIT_LIMIT_S; announcements older
than ANNOUNCEMENT_LIFETIME do not count. A killed publisher's announcement goes with the next publication
of the same engine.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from mesh.errors import MeshError, NotFoundError, PreconditionError
from mesh.manifest import canonical_json
from mesh.store_layout import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_SUFFIX,
    MANIFESTS,
    PUBLISHING,
    SWEEPS,
    blob_key,
    manifest_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from mesh.object_store import ObjectInfo, ObjectStore

SWEEP_BLOBS = 200
"""Blobs of one sweep at most; publishers who need one of them wait for its end."""

REMOVE_LIMIT_S = 30.0
WAIT_LIMIT_S = 180.0
"""REMOVE_LIMIT_S, and what the store's client may take for one call with all its tries, and a good margin."""

ANNOUNCEMENT_LIFETIME = timedelta(days=7)
POLL_INTERVAL_S = 0.2
LIST_LIMIT_BYTES = 64 << 20
PARALLEL_CALLS = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")


@contextmanager
def announced(
    objects: ObjectStore, digest: str, blobs: Collection[str], tick: Callable[[], None]
) -> Iterator[Callable[[], bool]]:
    """While this context lasts no collector removes these blobs, whether they are in the store yet or not.

    Args:
        objects: The store.
        digest: The engine that is being published.
        blobs: sha256 of each of its blobs.
        tick: Called now and then while this waits for a sweep; what it raises ends the wait.

    Yields:
        What tells, once the manifest is written, whether the announcement stood until then. It does not if
        another publisher of the same engine was done earlier; then one has to look after the blobs again,
        as the engine might have been removed since.
    """
    key = f"{PUBLISHING}{digest}/{uuid.uuid4().hex}"
    objects.put_bytes(key, canonical_json(sorted(blobs)))
    try:
        _wait_for_sweeps(objects, set(blobs), tick)
        yield lambda: objects.exists(key)
    except BaseException:
        with suppress(MeshError):
            objects.delete(key)
        raise
    # The manifest names the blobs from now on, so those who died over the same engine need them no more.
    for entry in list(objects.list(f"{PUBLISHING}{digest}/")):
        objects.delete(entry.key)


class References:
    """Which blobs are needed: by a manifest, or by somebody who publishes."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._by_manifest: dict[str, frozenset[str]] = {}

    def read(self, without: Collection[str] = ()) -> set[str]:
        """The sha256 of every blob that is needed now; engines in `without` do not count.

        Manifests never change, so each is read once.

        Raises:
            PreconditionError: a manifest is damaged (MANIFEST_DAMAGED): what it named cannot be known.
        """
        # In this order: who takes the announcement back has written the manifest by then.
        needed = self._announced()
        uncounted = {manifest_key(digest) for digest in without}
        keys = [entry.key for entry in self._objects.list(MANIFESTS) if entry.key not in uncounted]
        with ThreadPoolExecutor(PARALLEL_CALLS) as pool:
            unread = [key for key in keys if key not in self._by_manifest]
            self._by_manifest.update(zip(unread, pool.map(self._read_manifest, unread), strict=True))
        return needed.union(*(self._by_manifest[key] for key in keys))

    def _announced(self) -> set[str]:
        now = datetime.now(timezone.utc)
        needed: set[str] = set()
        for entry in list(self._objects.list(PUBLISHING)):
            if now - entry.last_modified < ANNOUNCEMENT_LIFETIME:
                needed.update(_read_list(self._objects, entry))
        return needed

    def _read_manifest(self, key: str) -> frozenset[str]:
        try:
            data = self._objects.get_bytes(key, MANIFEST_LIMIT_BYTES)
        except NotFoundError:  # removed since it was listed
            return frozenset()
        digest = key.removeprefix(MANIFESTS).removesuffix(MANIFEST_SUFFIX)
        if hashlib.sha256(data).hexdigest() != digest:
            raise PreconditionError(
                "MANIFEST_DAMAGED",
                key,
                f"{key} is no manifest or a damaged one, so nobody knows which blobs it needs; restore "
                f"it, or remove it with `enginemesh delete {digest}`",
            )
        # Also of a schema that a later version of the mesh wrote: whatever looks like a digest is kept.
        return frozenset(_SHA256.findall(data.decode(errors="replace")))


def sweep(objects: ObjectStore, references: References, blobs: Collection[str]) -> list[str]:
    """Removes those blobs that nobody needs; returns them. What time does not suffice for stays."""
    removed: list[str] = []
    candidates = list(blobs)
    for start in range(0, len(candidates), SWEEP_BLOBS):
        removed += _sweep_some(objects, references, candidates[start : start + SWEEP_BLOBS])
    return removed


def _sweep_some(objects: ObjectStore, references: References, blobs: list[str]) -> list[str]:
    deadline = time.monotonic() + REMOVE_LIMIT_S
    key = f"{SWEEPS}{uuid.uuid4().hex}"
    objects.put_bytes(key, canonical_json(blobs))

    def remove(sha256: str) -> bool:
        if time.monotonic() > deadline:
            return False
        objects.delete(blob_key(sha256))
        return True

    try:
        needed = references.read()
        free = [sha256 for sha256 in blobs if sha256 not in needed]
        with ThreadPoolExecutor(PARALLEL_CALLS) as pool:
            is_removed = list(pool.map(remove, free))
    finally:
        objects.delete(key)
    return [sha256 for sha256, is_gone in zip(free, is_removed, strict=True) if is_gone]


def _wait_for_sweeps(objects: ObjectStore, blobs: set[str], tick: Callable[[], None]) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    waiting_for = [
        entry.key for entry in list(objects.list(SWEEPS)) if blobs.intersection(_read_list(objects, entry))
    ]
    for key in waiting_for:
        while objects.exists(key):
            tick()
            if time.monotonic() > deadline:
                objects.delete(key)  # its collector died
                break
            time.sleep(POLL_INTERVAL_S)


def _read_list(objects: ObjectStore, entry: ObjectInfo) -> list[str]:
    try:
        data = objects.get_bytes(entry.key, LIST_LIMIT_BYTES)
    except NotFoundError:  # taken back since it was listed
        return []
    try:
        names = json.loads(data)
    except ValueError:
        names = None
    if not isinstance(names, list):
        raise PreconditionError("STORE_DAMAGED", entry.key, f"object {entry.key} is not what the mesh writes")
    return [name for name in names if isinstance(name, str)]
