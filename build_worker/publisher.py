"""Publishes an engine so that a later attempt of its build can take this up, or take it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from build_worker.leftovers import take_back
from build_worker.scratch import BegunPublication
from mesh.store_layout import blob_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from build_worker.scratch import Scratch
    from mesh.engine_store import EngineStore
    from mesh.manifest import Manifest


def publish(
    store: EngineStore,
    scratch: Scratch,
    manifest: Manifest,
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> None:
    """Stores an engine whose files lie in `folder`; see EngineStore.publish.

    What an earlier attempt had sent is used if it is of the same engine, and removed if it is not.

    Args:
        store: Where to.
        scratch: Of the build; notes what is sent, so that it can be taken back.
        manifest: The engine.
        folder: Where its files are.
        on_progress: Told (bytes done, bytes in all); what it raises ends the publication.
    """
    sent = {file.sha256 for file in manifest.files if not store.objects.exists(blob_key(file.sha256))}
    earlier = scratch.publication()
    if earlier is not None and earlier.manifest.digest == manifest.digest:
        for sha256 in sent:
            store.objects.abort_uploads(blob_key(sha256))
        sent.update(earlier.sent)
    elif earlier is not None:
        take_back(store.objects, earlier)
        sent = {file.sha256 for file in manifest.files if not store.objects.exists(blob_key(file.sha256))}
    scratch.write_publication(BegunPublication(manifest=manifest, sent=tuple(sorted(sent))))
    store.publish(manifest, folder, on_progress)
