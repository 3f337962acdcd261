"""An engine whose blob, manifest or signature was tampered with, or that is for other hardware, never loads.

With a real worker, S3 server and Redis. All but damaged blobs are refused before a byte is fetched.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mesh.bus.index import EngineIndex, rebuild_index
from mesh.engine_store import EngineStore
from mesh.errors import IntegrityError
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings
from mesh.signing import SigningKey
from mesh.store_layout import blob_key, manifest_key, signature_key
from tests import engines
from tests.conditions import until
from tests.infer_worker.conftest import make_fake_engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def key(tmp_path):
    made = SigningKey.generate()
    made.save(tmp_path / "key")
    return made


@pytest.fixture
def store(environment, key, tmp_path, monkeypatch):
    """What a publisher has; workers that are started from now on require its signature."""
    environment |= {
        "ENGINEMESH_SIGNATURE_POLICY": "require",
        "ENGINEMESH_TRUSTED_KEYS": str(tmp_path / "key.pub"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return EngineStore(ObjectStore.from_settings(MeshSettings()), key)


@pytest.fixture
def publish(store, tmp_path):
    """Publishes an engine that would load; its manifest."""

    def make(store: EngineStore = store, **fields):
        folder, manifest = make_fake_engine(tmp_path, **fields)
        store.publish(manifest, folder)
        return manifest

    return make


def forge_signature(store, manifest) -> None:
    key = store._signing_key
    forged = SigningKey.generate().sign(manifest.to_bytes()).model_copy(update={"key_id": key.key_id})
    store.objects.put_bytes(signature_key(manifest.digest, key.key_id), forged.to_bytes())


def change_manifest(store, manifest) -> str:
    """Puts another manifest in its place, under its own digest and with the signature; that digest."""
    signature = store.record(manifest.digest).signatures[0]
    changed = manifest.model_copy(update={"options": {"load_error": "run what I want"}})
    store.objects.put_bytes(manifest_key(changed.digest), changed.to_bytes())
    store.objects.put_bytes(signature_key(changed.digest, signature.key_id), signature.to_bytes())
    store.objects.delete(manifest_key(manifest.digest))
    return changed.digest


async def test_what_was_tampered_with_is_refused_before_any_download(store, publish, start, seen, reindex):
    key = store._signing_key
    forged, unsigned, altered, damaged = (publish() for _ in range(4))
    forge_signature(store, forged)
    store.objects.delete(signature_key(unsigned.digest, key.key_id))
    changed = change_manifest(store, altered)
    data = damaged.to_bytes().replace(b'"max_batch_size":4', b'"max_batch_size":9')
    store.objects.put_bytes(manifest_key(damaged.digest), data)
    other_key = SigningKey.generate()
    stranger = publish(EngineStore(store.objects, other_key))
    other_hardware = publish(target=engines.TARGET.model_copy(update={"architecture": "sparc"}))
    await reindex()
    await start()

    detail = await seen.detail()
    for digest, reason in (
        (forged.digest, f"the signature of key {key.key_id} does not fit the manifest"),
        (changed, f"the signature of key {key.key_id} does not fit the manifest"),
        (unsigned.digest, "not signed"),
        (stranger.digest, f"signed by key {other_key.key_id}, which is not trusted"),
        (other_hardware.digest, "architecture: engine expects sparc"),
    ):
        assert f"{digest[:12]}: {reason}" in detail
    assert damaged.digest[:12] not in detail  # it did not even get into the index
    with pytest.raises(IntegrityError, match="another digest"):
        store.manifest(damaged.digest)
    assert seen.fetched() == []

    good = publish()
    await reindex()
    assert (await seen.ready()).engine == f"engines/{good.digest}"


async def test_tampered_blob_is_not_loaded(store, publish, start, reindex, tmp_path):
    manifest = publish()
    file = manifest.file("script.json")
    store.objects.put_bytes(blob_key(file.sha256), b"x" * file.size)
    await reindex()
    process = await start()
    assert await asyncio.wait_for(process.wait(), 30) == 1
    log = (tmp_path / "worker.log").read_text()
    assert "blob of 'script.json' has another digest in the store" in log
    assert file.sha256 in log
    assert not list((tmp_path / "data" / "engines" / "engines").iterdir())


@pytest.fixture
def reindex(store, redis):
    """Tells Redis what the store has."""
    return lambda: rebuild_index(store, EngineIndex(redis))


class Seen:
    """What is seen of the worker from outside."""

    def __init__(self, mesh, cache: Path) -> None:
        self._mesh = mesh
        self._cache = cache

    async def detail(self) -> str:
        """Why it waits."""
        await self._mesh.in_state("WAITING_FOR_ENGINE")

        async def is_told() -> bool:
            return bool((await self._mesh.worker()).detail)

        await until(is_told)
        return (await self._mesh.worker()).detail

    async def ready(self):
        return await self._mesh.in_state("READY")

    def fetched(self) -> list[Path]:
        return [
            path for path in self._cache.rglob("*") if path.is_file() and path.name not in {"lock", "waiting"}
        ]


@pytest.fixture
def seen(mesh, tmp_path):
    return Seen(mesh, tmp_path / "data" / "engines")
