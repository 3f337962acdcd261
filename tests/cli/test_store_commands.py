"""The commands that keep engines, on a real store and Redis."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from enginemesh.v1 import engines_pb2, workers_pb2
from mesh.bus.connection import connect
from mesh.bus.index import EngineIndex
from mesh.bus.leases import WORKER, Leases
from mesh.engine_store import EngineStore
from mesh.manifest import KeyParts
from mesh.settings import ClientSettings
from mesh.signing import SigningKey
from mesh.store_layout import blob_key, manifest_key
from tests import engines
from tests.gateway.helpers import byte_level_tokenizer

FILES = {"tokenizer.json": b"{}", "model/weights": b"weights" * 100}


@pytest.fixture(autouse=True)
def settings(store_settings, valkey, tmp_path, monkeypatch, redis):
    """A mesh that requires signatures, and has a key."""
    SigningKey.generate().save(tmp_path / "key")
    for name, value in {
        **store_settings,
        **valkey.settings,
        "ENGINEMESH_SIGNATURE_POLICY": "require",
        "ENGINEMESH_SIGNING_KEY": str(tmp_path / "key"),
        "ENGINEMESH_TRUSTED_KEYS": str(tmp_path / "key.pub"),
        "ENGINEMESH_LEASE_TTL_S": "0.1",
        "COLUMNS": "200",
    }.items():
        monkeypatch.setenv(name, value)
    return ClientSettings()


@pytest.fixture
def store(settings):
    return EngineStore.of_publisher(settings)


@pytest.fixture
def publish(store, tmp_path):
    """Publishes an engine; its manifest."""

    def make(files=FILES, **fields):
        manifest = engines.manifest(files, **fields)
        store.publish(manifest, engines.write(tmp_path / manifest.digest, files))
        return manifest

    return make


def with_redis(settings, work):
    async def connected():
        redis = connect(settings.redis_url)
        try:
            return await work(redis)
        finally:
            await redis.aclose()

    return asyncio.run(connected())


def indexed(settings) -> set[str]:
    records = with_redis(settings, lambda redis: EngineIndex(redis).engines())
    return {record.digest for record in records}


# -- keys ---------------------------------------------------------------------------------------------


def test_new_key_is_written_and_listed_once_trusted(invoke, run_command, tmp_path, monkeypatch):
    out = invoke("keys", "new", str(tmp_path / "other")).stdout
    key = SigningKey.load(tmp_path / "other").key_id
    assert f"key {key}" in out
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600
    status, _, err = run_command("keys", "new", str(tmp_path / "other"))
    assert (status, "File exists" in err) == (1, True)

    monkeypatch.setenv("ENGINEMESH_TRUSTED_KEYS", str(tmp_path / "other.pub"))
    listed = {row["key"]: row for row in json.loads(invoke("keys", "list", "--json").stdout)}
    own = SigningKey.load(tmp_path / "key").key_id
    assert listed[key] == {"key": key, "is_trusted": True, "signs": False}
    assert listed[own] == {"key": own, "is_trusted": False, "signs": True}
    assert own in invoke("keys", "list").stdout


# -- reindex ------------------------------------------------------------------------------------------


def test_reindex_makes_the_index_what_the_store_is(invoke, publish, store, settings):
    kept, gone = publish(), publish()
    invoke("reindex")
    store.remove(gone.digest)
    new = publish()
    out = invoke("reindex").stdout

    assert indexed(settings) == {kept.digest, new.digest}
    assert f"added {new.digest[:12]}" in out
    assert f"forgot {gone.digest[:12]}" in out
    assert "2 engines" in out


def test_redis_that_is_away_is_named_by_its_setting(run_command, monkeypatch, publish):
    publish()
    monkeypatch.setenv("ENGINEMESH_REDIS_URL", "redis://127.0.0.1:1/0")
    status, _, err = run_command("reindex")
    assert (status, "ENGINEMESH_REDIS_URL" in err) == (3, True)


# -- verify -------------------------------------------------------------------------------------------


def test_whole_engine_is_verified(invoke, publish):
    manifest = publish()
    out = invoke("verify", manifest.digest[:12]).stdout
    assert "signed by" in out
    assert "is whole" in out


def test_damaged_lost_and_torn_blobs_are_named(run_command, publish, store):
    manifest = publish({**FILES, "lost": b"lost", "torn": b"torn"})
    store.objects.put_bytes(blob_key(manifest.file("model/weights").sha256), b"W" * 700)
    store.objects.delete(blob_key(manifest.file("lost").sha256))
    store.objects.put_bytes(blob_key(manifest.file("torn").sha256), b"to")
    status, out, _ = run_command("verify", manifest.digest, "--json")
    report = json.loads(out)

    assert status == 1
    assert report["problems"].keys() == {"model/weights", "lost", "torn"}
    assert "another digest" in report["problems"]["model/weights"]
    assert "no object" in report["problems"]["lost"]
    assert "has 2 bytes, not 4" in report["problems"]["torn"]


def test_engine_that_nobody_signed_is_not_good(run_command, settings, publish, store, monkeypatch):
    manifest = publish()
    for entry in list(store.objects.list("signatures/")):
        store.objects.delete(entry.key)
    status, out, _ = run_command("verify", manifest.digest)
    assert (status, "signature: not signed" in out, "is whole" in out) == (1, True, True)
    monkeypatch.setenv("ENGINEMESH_SIGNATURE_POLICY", "warn")
    assert run_command("verify", manifest.digest)[0] == 0


def test_damaged_manifest_is_told(run_command, publish, store):
    manifest = publish()
    store.objects.put_bytes(manifest_key(manifest.digest), b"scribble")
    status, _, err = run_command("verify", manifest.digest)
    assert (status, "another digest" in err) == (1, True)


def test_unknown_engine_is_told(run_command, publish):
    publish()
    assert run_command("verify", "0" * 12)[0] == 2


# -- export and import --------------------------------------------------------------------------------


def test_exported_engine_is_imported_under_the_same_name(invoke, publish, store, settings, tmp_path):
    manifest = publish()
    signature = store.record(manifest.digest).signatures
    invoke("export", manifest.digest[:12], str(tmp_path / "out"))
    assert (tmp_path / "out/engine/model/weights").read_bytes() == FILES["model/weights"]
    for entry in list(store.objects.list("")):
        store.objects.delete(entry.key)
    out = invoke("import", str(tmp_path / "out")).stdout

    assert manifest.digest[:12] in out
    assert indexed(settings) == {manifest.digest}
    assert store.record(manifest.digest).signatures == signature
    assert store.read_file(manifest, "model/weights", 1000) == FILES["model/weights"]


def test_tampered_export_is_not_imported(run_command, invoke, publish, store, tmp_path):
    manifest = publish()
    invoke("export", manifest.digest, str(tmp_path / "out"))
    for entry in list(store.objects.list("")):
        store.objects.delete(entry.key)
    (tmp_path / "out/engine/model/weights").write_bytes(b"W" * 700)
    status, _, err = run_command("import", str(tmp_path / "out"))

    assert (status, "another digest" in err) == (1, True)
    assert store.engines() == []
    assert not list(store.objects.list("blobs/"))


def test_export_writes_to_an_empty_folder_only(run_command, publish, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    status, _, err = run_command("export", publish().digest, str(tmp_path / "out"))
    assert (status, "is not empty" in err) == (2, True)
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_export_of_a_damaged_engine_is_not_taken_for_whole(run_command, publish, store, tmp_path):
    manifest = publish()
    store.objects.put_bytes(blob_key(manifest.file("model/weights").sha256), b"W" * 700)
    status, _, err = run_command("export", manifest.digest, str(tmp_path / "out"))
    assert (status, "another digest" in err) == (1, True)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.fixture
def trtllm(tmp_path):
    """An engine directory as `trtllm-build` writes it, and a folder with its tokenizer."""
    config = {
        "version": "1.2.1",
        "pretrained_config": {
            "dtype": "bfloat16",
            "quantization": {"quant_algo": "FP8"},
            "mapping": {"world_size": 2},
        },
        "build_config": {"max_batch_size": 16, "max_seq_len": 4096, "max_num_tokens": 8192},
    }
    engine = engines.write(
        tmp_path / "trtllm",
        {"config.json": json.dumps(config).encode(), "rank0.engine": b"plan 0", "rank1.engine": b"plan 1"},
    )
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    (tokenizer / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}", "eos_token": "</s>"}')
    return [
        *("import", str(engine), "--model", "big", "--kind", "tensorrt_llm"),
        *("--target", "h100-sxm-80gb", "--tokenizer", str(tokenizer)),
    ]


def test_finished_tensorrt_llm_engine_is_brought_in(invoke, trtllm, store, settings):
    # Field case 33.
    invoke(*trtllm, "--version", "tensorrt=10.9")
    (record,) = store.engines("big")
    manifest = record.manifest

    assert indexed(settings) == {manifest.digest}
    assert record.signatures
    assert (manifest.kind, manifest.precision, manifest.max_seq_len) == ("tensorrt_llm", "fp8", 4096)
    assert manifest.versions == {"tensorrt_llm": "1.2.1", "tensorrt": "10.9"}
    assert manifest.target.compute_capability == "9.0"
    assert manifest.tokenizer.eos_token_ids == (0, 7)
    assert manifest.tokenizer.chat_template == "{{ x }}"
    assert store.read_file(manifest, "rank1.engine", 10) == b"plan 1"
    assert {file.path for file in manifest.files} >= {"config.json", "tokenizer.json"}


def test_importing_twice_makes_one_engine(invoke, trtllm, store):
    invoke(*trtllm)
    invoke(*trtllm)
    assert len(store.engines()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "rank1.engine").unlink(), "is for 2 GPUs, and has no rank1.engine"),
        (lambda folder: (folder / "rank0.engine").unlink(), "no engine of kind tensorrt_llm"),
        (lambda folder: (folder / "config.json").write_text("{}"), "--max-batch-size: is required"),
        (lambda folder: (folder / "config.json").write_text("["), "config.json is not JSON"),
    ],
)
def test_directory_that_is_no_engine_is_refused(run_command, trtllm, store, change, words):
    change(Path(trtllm[1]))
    status, _, err = run_command(*trtllm)
    assert (status, words in err) == (2, True), err
    assert list(store.objects.list("")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "abacus"], "--kind: must be one of"),
        (["--target", "h101"], "--target"),
        (["--model", "Not A Name"], "model"),
        (["--version", "tensorrt"], "must look like NAME=VALUE"),
        (["--tokenizer", "."], "has no tokenizer.json"),
    ],
)
def test_wrong_option_is_named(run_command, trtllm, store, arguments, words):
    status, _, err = run_command(*trtllm, *arguments)
    assert (status, words in err) == (2, True), err
    assert list(store.objects.list("")) == []


def test_without_a_key_nothing_is_published(run_command, trtllm, store, monkeypatch):
    monkeypatch.delenv("ENGINEMESH_SIGNING_KEY")
    status, _, err = run_command(*trtllm)
    assert (status, "enginemesh keys new" in err) == (4, True)
    assert list(store.objects.list("")) == []


# -- diff ---------------------------------------------------------------------------------------------


def key_parts(**fields) -> dict:
    base = {"source": "1" * 64, "spec": {"precision": "int8"}, "target": "t", "versions": {"openvino": "1"}}
    parts = KeyParts(**base | fields)
    return {"key_parts": parts, "build_key": parts.key}


def test_diff_names_what_changed_the_key(invoke, publish):
    first = publish(**key_parts())
    second = publish(
        {**FILES, "model/weights": b"other", "more": b""},
        precision="int4",
        **key_parts(spec={"precision": "int4"}, versions={"openvino": "2"}),
    )
    out = invoke("diff", first.digest, second.digest).stdout
    found = json.loads(invoke("diff", first.digest, second.digest, "--json").stdout)

    assert "Different build keys, by spec.precision, versions.openvino" in out
    assert [each["name"] for each in found["key"]] == ["spec.precision", "versions.openvino"]
    assert found["fields"] == [{"name": "precision", "first": '"int8"', "second": '"int4"'}]
    assert {each["path"]: (each["first"], each["second"]) for each in found["files"]} == {
        "model/weights": (700, 5),
        "more": (None, 0),
    }
    assert (found["shared_files"], found["shared_bytes"]) == (1, 2)


def test_diff_of_one_build_and_of_unknown_keys(invoke, publish):
    first = publish(**key_parts())
    second = publish(max_batch_size=9, **key_parts())
    silent = publish()
    assert "The same build key" in invoke("diff", first.digest, second.digest).stdout
    assert "does not say what it was made of" in invoke("diff", first.digest, silent.digest).stdout
    assert "Nothing differs." in invoke("diff", first.digest, first.digest).stdout


# -- gc and delete ------------------------------------------------------------------------------------


def test_gc_removes_what_a_dry_run_tells(invoke, publish, store, settings):
    used, gone = publish(), publish({**FILES, "own": b"own"})
    invoke("reindex")
    info = workers_pb2.Worker(engine=f"engines/{used.digest}").SerializeToString()
    with_redis(settings, lambda redis: Leases(redis, WORKER).renew("w1", info, 60))
    arguments = ("gc", "--keep", "0", "--min-age", "0s")
    told = json.loads(invoke(*arguments, "--dry-run", "--json").stdout)
    assert len(store.engines()) == 2
    removed = invoke(*arguments).stdout

    assert told["engines"] == [gone.digest]
    assert told["kept"] == {used.digest: "worker w1 uses it"}
    assert told["blobs"] == {engines.sha256(b"own"): 3}
    assert "removed 1 engines, 1 blobs with 3 B" in removed
    assert indexed(settings) == {used.digest}
    assert [record.digest for record in store.engines()] == [used.digest]


def test_gc_keeps_what_is_young_by_default(invoke, publish, store):
    for _ in range(5):
        publish()
    assert "removed 0 engines, 0 blobs" in invoke("gc").stdout
    assert len(store.engines()) == 5


@pytest.mark.parametrize("age", ["1", "h", "-1h", "1.5h", "1w"])
def test_age_without_a_unit_is_refused(invoke, age):
    assert invoke("gc", "--min-age", age).exit_code == 2


def test_delete_asks_the_gateway_by_the_first_digits(gateway, invoke, run_command):
    names = [f"engines/{first * 64}" for first in "ab"]
    gateway.engines += [engines_pb2.Engine(name=name) for name in names]
    invoke("delete", "aaaa")
    invoke("delete", "c" * 64)  # not listed: its manifest may be damaged
    assert [request.name for request in gateway.requests if "Delete" in type(request).__name__] == [
        names[0],
        f"engines/{'c' * 64}",
    ]
    assert run_command("delete", "dddd")[0] == 2
