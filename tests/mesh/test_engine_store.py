"""An engine is in the store whole or not at all, and comes back as what its name says."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mesh.engine_store import EngineStore, blob_key
from mesh.errors import (
    IntegrityError,
    InvalidFieldError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from mesh.manifest import EngineFile
from mesh.object_store import PART_BYTES
from mesh.signing import SigningKey, Trust, load_public_keys
from mesh.store_layout import MANIFEST_LIMIT_BYTES
from tests import engines

FILES = {"tokenizer.json": b'{"tokens":[]}', "model/weights.bin": bytes(range(256)) * 40, "empty": b""}


@pytest.fixture
def folder(tmp_path):
    return engines.write(tmp_path / "engine", FILES)


def keys(objects) -> list[str]:
    return [entry.key for entry in objects.list("")]


def test_published_engine_is_found_by_every_way(store, objects, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)

    assert store.manifest(manifest.digest) == manifest
    assert store.find_build(manifest.build_key) == manifest.digest
    for found in (store.engines(), store.engines("m")):
        assert [record.manifest for record in found] == [manifest]
        assert found[0].digest == manifest.digest
        assert found[0].create_time == objects.stat(f"manifests/{manifest.digest}.json").last_modified
    assert {path: store.read_file(manifest, path, limit=20_000) for path in FILES} == FILES


def test_empty_store_has_nothing(store):
    assert store.engines() == []
    assert store.engines("m") == []
    assert store.find_build("0" * 64) is None


@pytest.mark.parametrize("digest", ["0" * 64, "short", "../" + "0" * 61, "A" * 64, "0" * 64 + "\n"])
def test_unknown_digest_is_not_found(store, digest):
    with pytest.raises(NotFoundError, match="no engine named"):
        store.manifest(digest)


def test_engines_are_listed_by_model_newest_first(store, folder):
    first, second = engines.manifest(FILES), engines.manifest(FILES)
    other = engines.manifest(FILES, model="m-other")
    for manifest in (first, second, other):
        store.publish(manifest, folder)

    found = store.engines()
    assert {record.digest for record in found} == {first.digest, second.digest, other.digest}
    assert found == sorted(found, key=lambda record: (record.create_time, record.digest), reverse=True)
    assert {record.digest for record in store.engines("m")} == {first.digest, second.digest}


def test_manifest_is_written_after_blobs_and_before_markers(store, objects, folder, monkeypatch):
    written = []
    put_stream, put_if_absent = objects.put_stream, objects.put_if_absent
    monkeypatch.setattr(
        objects, "put_stream", lambda key, *rest: written.append(key) or put_stream(key, *rest)
    )
    monkeypatch.setattr(
        objects, "put_if_absent", lambda key, data: written.append(key) or put_if_absent(key, data)
    )
    manifest = engines.manifest(FILES)
    key = SigningKey.generate()
    EngineStore(objects, key).publish(manifest, folder)

    assert written[0].startswith(f"publishing/{manifest.digest}/")
    assert written[1:] == [
        *(blob_key(file.sha256) for file in manifest.files),
        f"signatures/{manifest.digest}/{key.key_id}.json",
        f"manifests/{manifest.digest}.json",
        f"builds/{manifest.build_key}",
        f"models/m/{manifest.digest}",
    ]
    assert sorted(keys(objects)) == sorted(written[1:])


def test_signature_comes_back_with_the_engine(objects, folder):
    key = SigningKey.generate()
    store = EngineStore(objects, key)
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)

    assert store.record(manifest.digest).signatures == (key.sign(manifest.to_bytes()),)
    assert store.engines() == [store.record(manifest.digest)]


def test_publishers_with_two_keys_both_sign(objects, folder):
    manifest = engines.manifest(FILES)
    signing = [SigningKey.generate() for _ in range(2)]
    for key in signing:
        EngineStore(objects, key).publish(manifest, folder)

    signatures = EngineStore(objects).record(manifest.digest).signatures
    assert {signature.key_id for signature in signatures} == {key.key_id for key in signing}


def test_what_is_no_signature_hides_no_engine(store, objects, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    objects.put_bytes(f"signatures/{manifest.digest}/0123456789abcdef.json", b"scribble")
    objects.put_bytes(f"signatures/{manifest.digest}/huge", bytes(5000))

    assert store.record(manifest.digest).signatures == ()


def test_engine_that_is_not_trusted_is_not_what_the_build_made(objects, folder):
    key = SigningKey.generate()
    trust = Trust(load_public_keys(key.save(folder.parent / "key")), "require")
    unsigned, signed = engines.manifest(FILES), engines.manifest(FILES)
    store = EngineStore(objects, trust=trust)
    store.publish(unsigned, folder)
    assert store.find_build(unsigned.build_key) is None
    EngineStore(objects, key).publish(unsigned, folder)
    EngineStore(objects, key).publish(signed, folder)

    assert store.find_build(unsigned.build_key) == unsigned.digest
    assert store.find_build(signed.build_key) == signed.digest


def test_trusted_engine_takes_the_place_of_one_that_is_not(objects, folder):
    key = SigningKey.generate()
    trust = Trust(load_public_keys(key.save(folder.parent / "key")), "require")
    planted = engines.manifest(FILES)
    EngineStore(objects).publish(planted, folder)
    store = EngineStore(objects, key, trust)
    ours = engines.manifest(FILES, build_key=planted.build_key, precision="other")
    store.publish(ours, folder)

    assert store.find_build(planted.build_key) == ours.digest


def test_weights_common_to_two_targets_are_stored_once(store, objects, tmp_path):
    weights = os.urandom(100_000)
    one = {"tokenizer.json": b"{}", "weights.bin": weights, "kernels": b"for avx2"}
    other = {"tokenizer.json": b"{}", "model/weights.bin": weights, "kernels": b"for amx"}
    wider = engines.TARGET.model_copy(update={"instruction_set": "amx"})
    first, second = engines.manifest(one), engines.manifest(other, target=wider)
    store.publish(first, engines.write(tmp_path / "one", one))
    store.publish(second, engines.write(tmp_path / "other", other))

    blobs = list(objects.list("blobs/"))
    assert first.target.key != second.target.key
    assert len(blobs) == 4  # weights, tokenizer, and kernels of each
    assert sum(entry.size for entry in blobs) < 1.1 * len(weights)
    assert store.read_file(first, "weights.bin", 100_000) == weights
    assert store.read_file(second, "model/weights.bin", 100_000) == weights


def test_damaged_manifest_is_mended_by_publishing_again(store, objects, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    for content in (b"scribble", bytes(MANIFEST_LIMIT_BYTES + 1)):
        objects.put_bytes(f"manifests/{manifest.digest}.json", content)
        store.publish(manifest, folder)
        assert store.manifest(manifest.digest) == manifest


def test_engine_is_named_by_the_first_digits_of_its_digest(store, folder):
    manifests = [engines.manifest(FILES) for _ in range(3)]
    for manifest in manifests:
        store.publish(manifest, folder)

    for manifest in manifests:
        for name in (manifest.digest, manifest.digest[:12], f"engines/{manifest.digest}"):
            assert store.resolve(name) == manifest.digest
    with pytest.raises(NotFoundError, match="no engine named"):
        store.resolve("0" * 20)


def test_digits_that_begin_two_engines_are_refused(store, objects):
    for end in "12":
        objects.put_bytes("manifests/" + "0" * 63 + end + ".json", b"")

    with pytest.raises(InvalidFieldError, match="2 engines begin with 0000"):
        store.resolve("0000")
    for name in ("000", "", "../0000", "0000G"):
        with pytest.raises(InvalidFieldError, match="at least its first 4 digits"):
            store.resolve(name)


def test_removed_engine_leaves_only_its_blobs(objects, folder):
    store = EngineStore(objects, SigningKey.generate())
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    store.hide(manifest)
    for _ in range(2):
        store.remove(manifest.digest)

    assert keys(objects) == sorted(blob_key(file.sha256) for file in manifest.files)


def test_hidden_engine_is_made_again_and_shown_engine_is_found(store, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    store.hide(manifest)
    assert store.find_build(manifest.build_key) is None
    store.show(manifest)

    assert store.find_build(manifest.build_key) == manifest.digest


@pytest.mark.parametrize("size", [1000, 2 * PART_BYTES + 1])
def test_file_that_differs_from_its_manifest_publishes_nothing(store, objects, tmp_path, size):
    files = {"tokenizer.json": b"{}", "weights": os.urandom(size)}
    folder = engines.write(tmp_path, files)
    manifest = engines.manifest(files)
    with (folder / "weights").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x00\x00\x00\x00\x01")

    with pytest.raises(IntegrityError, match="'weights' has another digest"):
        store.publish(manifest, folder)
    assert keys(objects) == []


@pytest.mark.parametrize("content", [b"", b"{", b"{} "])
def test_file_of_another_size_publishes_nothing(store, objects, tmp_path, content):
    manifest = engines.manifest({"tokenizer.json": b"{}"})
    folder = engines.write(tmp_path, {"tokenizer.json": content})

    with pytest.raises(IntegrityError, match=f"has {len(content)} bytes, its manifest says 2"):
        store.publish(manifest, folder)
    assert keys(objects) == []


def test_empty_file_with_another_digest_publishes_nothing(store, objects, tmp_path):
    empty = EngineFile(path="empty", size=0, sha256="1" * 64)
    folder = engines.write(tmp_path, {"empty": b""})

    with pytest.raises(IntegrityError):
        store.publish(engines.manifest(files=None).model_copy(update={"files": (empty,)}), folder)
    assert keys(objects) == []


def test_missing_file_publishes_nothing(store, objects, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.publish(engines.manifest(), tmp_path)
    assert keys(objects) == []


def test_blobs_in_the_store_are_not_sent_again(store, objects, folder):
    store.publish(engines.manifest(FILES), folder)
    for path in FILES:
        (folder / path).unlink()
    second = engines.manifest(FILES)
    store.publish(second, folder)

    assert store.find_build(second.build_key) == second.digest


def test_blob_of_another_size_is_replaced(store, objects, folder):
    # As left by a store that does not write whole objects only.
    manifest = engines.manifest(FILES)
    objects.put_bytes(blob_key(manifest.file("model/weights.bin").sha256), b"torn")
    store.publish(manifest, folder)

    assert store.read_file(manifest, "model/weights.bin", limit=20_000) == FILES["model/weights.bin"]


def test_progress_ends_at_the_size_with_and_without_upload(store, folder):
    manifest = engines.manifest(FILES)
    for _ in range(2):
        seen: list[tuple[int, int]] = []
        store.publish(manifest, folder, lambda *progress, seen=seen: seen.append(progress))
        assert seen == sorted(seen)
        assert seen[-1] == (manifest.size, manifest.size)


def test_publishing_again_keeps_the_create_time(store, objects, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    etags = {entry.key: (entry.etag, entry.last_modified) for entry in objects.list("")}
    store.publish(manifest, folder)

    assert {entry.key: (entry.etag, entry.last_modified) for entry in objects.list("")} == etags


def test_racing_publishers_of_one_engine_are_harmless(connect_store, folder):
    manifest = engines.manifest(FILES)
    stores = [EngineStore(connect_store()) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda store: store.publish(manifest, folder), stores))

    assert [record.manifest for record in stores[0].engines("m")] == [manifest]
    assert stores[0].find_build(manifest.build_key) == manifest.digest
    assert stores[0].read_file(manifest, "tokenizer.json", limit=100) == FILES["tokenizer.json"]


def test_first_of_two_engines_of_one_build_is_the_build(store, folder):
    first = engines.manifest(FILES)
    second = engines.manifest(FILES, build_key=first.build_key, precision="other")
    store.publish(first, folder)
    store.publish(second, folder)

    assert store.find_build(first.build_key) == first.digest
    assert len(store.engines()) == 2


def test_build_whose_engine_was_removed_is_made_again(store, objects, folder):
    gone = engines.manifest(FILES)
    store.publish(gone, folder)
    objects.delete(f"manifests/{gone.digest}.json")
    assert store.find_build(gone.build_key) is None
    again = engines.manifest(FILES, build_key=gone.build_key, precision="other")
    store.publish(again, folder)

    assert store.find_build(gone.build_key) == again.digest


def test_marker_that_names_no_digest_is_no_build(store, objects):
    objects.put_bytes("builds/" + "0" * 64, "é".encode())

    assert store.find_build("0" * 64) is None


def test_manifest_with_other_content_is_refused(store, objects, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    objects.put_bytes(f"manifests/{manifest.digest}.json", engines.manifest(FILES).to_bytes())

    with pytest.raises(IntegrityError, match="another digest"):
        store.manifest(manifest.digest)


def test_what_cannot_be_read_hides_no_other_engine(store, objects, folder):
    good = engines.manifest(FILES)
    store.publish(good, folder)
    objects.put_bytes("manifests/" + "0" * 64 + ".json", b"no manifest")
    objects.put_bytes("manifests/README.txt", b"a stranger")
    objects.put_bytes("models/m/" + "1" * 64, b"")

    assert [record.manifest for record in store.engines()] == [good]
    assert [record.manifest for record in store.engines("m")] == [good]


def test_file_with_other_content_is_refused(store, objects, folder):
    manifest = engines.manifest(FILES)
    store.publish(manifest, folder)
    file = manifest.file("tokenizer.json")
    objects.put_bytes(blob_key(file.sha256), b"x" * file.size)

    with pytest.raises(IntegrityError, match=r"'tokenizer\.json' has another digest"):
        store.read_file(manifest, "tokenizer.json", limit=100)


def test_file_above_the_limit_is_refused_before_it_is_read(store):
    manifest = engines.manifest(FILES)  # not even published

    with pytest.raises(
        PreconditionError, match=r"'tokenizer\.json' of the engine has 13 bytes; the limit is 12"
    ):
        store.read_file(manifest, "tokenizer.json", limit=12)


def test_missing_file_is_not_found(store):
    manifest = engines.manifest(FILES)

    with pytest.raises(NotFoundError, match="has no file 'other'"):
        store.read_file(manifest, "other", limit=1)
    with pytest.raises(NotFoundError, match="no object named"):
        store.read_file(manifest, "tokenizer.json", limit=100)


def test_store_that_dies_while_publishing_leaves_no_engine(connect_store, store, objects, proxy, tmp_path):
    files = {"tokenizer.json": b"{}", "weights": os.urandom(3 * PART_BYTES)}
    folder = engines.write(tmp_path, files)
    manifest = engines.manifest(files)
    behind = EngineStore(connect_store(proxy.port))

    def die(done: int, total: int) -> None:
        if done > PART_BYTES:
            proxy.close()

    with pytest.raises(UnavailableError, match="ENGINEMESH_S3_ENDPOINT"):
        behind.publish(manifest, folder, die)
    assert store.engines() == []
    left = keys(objects)
    assert left[0] == blob_key(engines.sha256(b"{}"))
    assert all(key.startswith(f"publishing/{manifest.digest}/") for key in left[1:])
    store.publish(manifest, folder)
    assert store.manifest(manifest.digest) == manifest
    assert not list(objects.list("publishing/"))
