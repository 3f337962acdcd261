"""Sources: only what may be read is read, and every byte of it counts."""

from __future__ import annotations

import os

import pytest

from build_worker import source
from mesh.errors import InvalidFieldError, NotFoundError, UnavailableError
from mesh.object_store import ObjectStore
from mesh.settings import BuildWorkerSettings


def ignore(_fraction):
    pass


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def settings(root):
    return BuildWorkerSettings(source_roots=str(root))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "download").mkdir()
    return tmp_path / "download"


@pytest.mark.parametrize("name", ["m.gguf", "{root}/m.gguf", "sub/../m.gguf"])
def test_file_in_a_source_folder_is_found(settings, root, folder, name):
    (root / "sub").mkdir()
    (root / "m.gguf").write_bytes(b"x")

    assert source.fetch(name.format(root=root), settings, folder, ignore) == root.resolve() / "m.gguf"


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "{root}/../secret",
        "/etc/passwd",
        "link",
        "linked/secret",
        "absent",
        "a\0b",
        "x" * 300,
        "loop",
    ],
)
def test_what_is_outside_or_absent_is_refused_alike(settings, root, folder, name):
    (root.parent / "secret").write_text("s")
    (root / "link").symlink_to(root.parent / "secret")
    (root / "linked").symlink_to(root.parent)
    (root / "loop").symlink_to(root / "loop")

    with pytest.raises(InvalidFieldError, match=r"spec\.source: .* is not in a folder"):
        source.fetch(name.format(root=root), settings, folder, ignore)


def test_without_source_folders_nothing_may_be_read(folder, tmp_path):
    with pytest.raises(InvalidFieldError, match="it has 0"):
        source.fetch(str(tmp_path), BuildWorkerSettings(source_roots=""), folder, ignore)


@pytest.mark.parametrize("name", ["http://x/y", "s3://bucket", "s3:///x", "hf://owner", "hf://a/b/../c"])
def test_malformed_place_is_refused(settings, folder, name):
    with pytest.raises(InvalidFieldError, match=r"spec\.source"):
        source.fetch(name, settings, folder, ignore)


def test_no_source_is_an_empty_folder(settings, folder):
    assert source.fetch("", settings, folder, ignore) == folder


def test_digest_sees_changed_bytes_of_same_size_and_time(root):
    path = root / "m.gguf"
    path.write_bytes(b"aaaa")
    times = path.stat()
    before = source.digest(path, [], ignore)
    path.write_bytes(b"aaab")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert source.digest(path, [], ignore) != before


def test_digest_of_a_file_does_not_depend_on_its_name(root):
    for name in ("a", "b"):
        (root / name).write_bytes(b"weights")

    assert source.digest(root / "a", [], ignore) == source.digest(root / "b", [], ignore)


def test_digest_of_a_folder_depends_on_names_and_not_on_hidden_files(root):
    (root / "a").write_bytes(b"1")
    before = source.digest(root, [], ignore)
    (root / ".cache").mkdir()
    (root / ".cache" / "x").write_bytes(b"2")
    with_hidden = source.digest(root, [], ignore)
    (root / "a").rename(root / "b")

    assert with_hidden == before
    assert source.digest(root, [], ignore) != before


def test_link_out_of_the_folder_is_refused_unless_it_leads_to_a_root(root, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "weights").write_bytes(b"w")
    (root / "model.safetensors").symlink_to(blobs / "weights")

    with pytest.raises(InvalidFieldError, match=r"model\.safetensors is a link"):
        source.digest(root, [], ignore)
    assert source.digest(root, [blobs.resolve()], ignore)


def test_digest_reports_how_much_is_read(root):
    (root / "m").write_bytes(bytes(3 * source.HASH_BYTES))
    seen = []

    source.digest(root / "m", [], seen.append)

    assert seen == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]


@pytest.fixture
def bucket(store_settings, monkeypatch):
    """A store with a model below "models/m" and one file beside it."""
    for name, value in store_settings.items():
        monkeypatch.setenv(name, value)
    settings = BuildWorkerSettings()
    store = ObjectStore.from_settings(settings)
    store.put_bytes("models/m/config.json", b"{}")
    store.put_bytes("models/m/deep/weights", b"w" * 100)
    store.put_bytes("models/m2/other", b"x")
    store.put_bytes("models/single.gguf", b"gguf")
    return settings


@pytest.mark.parametrize("prefix", ["models/m", "models/m/"])
def test_bucket_prefix_is_downloaded_whole_and_nothing_else(bucket, folder, prefix):
    seen = []

    path = source.fetch(f"s3://{bucket.s3_bucket}/{prefix}", bucket, folder, seen.append)

    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert found == {"config.json", "deep/weights"}
    assert (path / "deep" / "weights").read_bytes() == b"w" * 100
    assert seen[-1] == 1.0


def test_single_object_is_a_file(bucket, folder):
    path = source.fetch(f"s3://{bucket.s3_bucket}/models/single.gguf", bucket, folder, ignore)

    assert path.name == "single.gguf"
    assert path.read_bytes() == b"gguf"


@pytest.mark.parametrize("place", ["{bucket}/absent", "{bucket}/models/sing", "no-such-bucket/m"])
def test_absent_object_or_bucket_is_refused_and_not_made(bucket, folder, place):
    with pytest.raises(InvalidFieldError, match="there is nothing at s3://"):
        source.fetch(f"s3://{place.format(bucket=bucket.s3_bucket)}", bucket, folder, ignore)

    absent = ObjectStore.from_settings(
        bucket.model_copy(update={"s3_bucket": "no-such-bucket"}), create_bucket=False
    )
    with pytest.raises(NotFoundError):
        list(absent.list(""))


def test_unreachable_hub_is_unavailable_and_says_what_to_look_at(settings, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(UnavailableError, match=r"hf://owner/name cannot be fetched .* HF_TOKEN"):
        source.fetch("hf://owner/name", settings, folder, ignore)
