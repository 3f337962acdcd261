"""Exported engines in a mesh on this machine, for `enginemesh chaos` and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.failures import EXIT_REFUSED, CommandError
from cli.options import local_settings
from cli.store_access import with_redis
from mesh.bus.index import EngineIndex
from mesh.engine_copy import ENGINE_FOLDER, is_exported, read_exported
from mesh.engine_store import EngineStore

if TYPE_CHECKING:
    from pathlib import Path

    from cli.local_mesh import LocalMesh
    from mesh.manifest import Manifest


def manifest_of(folder: Path, kind: str) -> Manifest:
    """The manifest of an exported engine.

    Raises:
        CommandError: it is none, or of another kind.
        IntegrityError: it is damaged.
    """
    if not is_exported(folder):
        raise CommandError(f"{folder} holds no engine that `export` wrote", EXIT_REFUSED)
    manifest = read_exported(folder)[0]
    if manifest.kind != kind:
        raise CommandError(f"the engine in {folder} is of kind {manifest.kind}, not {kind}", EXIT_REFUSED)
    return manifest


def import_into(mesh: LocalMesh, folder: Path) -> None:
    """Publishes an exported engine in a mesh that runs, signed with the mesh's own key."""
    settings = local_settings(mesh.plan.data_dir)
    store = EngineStore.of_publisher(settings)
    manifest = read_exported(folder)[0]
    store.publish(manifest, folder / ENGINE_FOLDER)
    record = store.record(manifest.digest)
    with_redis(settings, lambda redis: EngineIndex(redis).add(record))
