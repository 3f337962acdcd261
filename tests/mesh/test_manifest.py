"""A manifest names itself by its content, and nothing but a manifest in its one form is taken for one."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mesh.errors import IntegrityError
from mesh.manifest import MODEL_NAME, EngineFile, KeyParts, Manifest, TokenizerInfo, canonical_json
from mesh.target import INSTRUCTION_SET_ORDER, Target
from tests import engines

SEGMENTS = st.text(st.sampled_from("abcXYZ019._ +-"), min_size=1, max_size=12).filter(
    lambda segment: segment not in {".", ".."}
)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join)
DIGESTS = st.binary(max_size=4).map(lambda data: hashlib.sha256(data).hexdigest())
TEXTS = st.text(max_size=20)
COUNTS = st.integers(min_value=1, max_value=1 << 40)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)

TARGETS = st.builds(
    Target,
    device_type=st.sampled_from(["gpu", "cpu"]),
    device_name=TEXTS,
    compute_capability=st.sampled_from(["", "8.0", "9.0", "12.0"]),
    memory_bytes=COUNTS,
    instruction_set=st.sampled_from(INSTRUCTION_SET_ORDER),
)


@st.composite
def manifests(draw) -> Manifest:
    paths = draw(st.lists(PATHS, unique=True, max_size=5))
    paths = [path for path in paths if not any(other.startswith(f"{path}/") for other in paths)]
    paths = [path for path in paths if path.split("/")[0] != "tokenizer.json"] + ["tokenizer.json"]
    files = [
        EngineFile(path=p, size=draw(COUNTS), sha256=draw(DIGESTS)) for p in draw(st.permutations(paths))
    ]
    return with_files(
        files,
        kind=draw(TEXTS),
        target=draw(TARGETS),
        build_key=draw(DIGESTS),
        versions=draw(st.dictionaries(TEXTS, TEXTS, max_size=4)),
        options=draw(st.dictionaries(TEXTS, TEXTS, max_size=4)),
        capabilities=tuple(draw(st.lists(TEXTS, max_size=4))),
        tokenizer=TokenizerInfo(
            vocab_size=draw(COUNTS),
            chat_template=draw(TEXTS),
            eos_token_ids=tuple(draw(st.lists(COUNTS, max_size=3))),
        ),
    )


def with_files(files: list[EngineFile], **fields) -> Manifest:
    return Manifest(**(engines.manifest(**fields).model_dump() | {"files": files}))


@given(manifests())
def test_manifest_survives_its_bytes(manifest):
    data = manifest.to_bytes()
    back = Manifest.from_bytes(data, manifest.digest)

    assert back == manifest
    assert back.to_bytes() == data
    assert back.digest == hashlib.sha256(data).hexdigest()


@given(manifests(), st.randoms())
def test_order_of_keys_does_not_change_the_digest(manifest, random):
    def shuffled(value):
        if not isinstance(value, dict):
            return value
        items = [(key, shuffled(inner)) for key, inner in value.items()]
        random.shuffle(items)
        return dict(items)

    again = Manifest.model_validate(shuffled(manifest.model_dump(mode="json")))
    assert again.digest == manifest.digest


@given(JSON_VALUES)
def test_canonical_json_is_stable(value):
    data = canonical_json(value)

    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


@given(manifests(), st.data())
def test_changed_byte_is_refused(manifest, data):
    content = bytearray(manifest.to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))

    with pytest.raises(IntegrityError, match="another digest"):
        Manifest.from_bytes(bytes(content), manifest.digest)


def test_digest_tells_everything_apart():
    base = {"build_key": "0" * 64}
    changes = [
        {},
        {"model": "other"},
        {"kind": "other"},
        {"precision": "other"},
        {"target": engines.TARGET.model_copy(update={"instruction_set": "avx512"})},
        {"versions": {"openvino": "1"}},
        {"versions": {"openvino": "2"}},
        {"max_seq_len": 129},
        {"tokenizer": TokenizerInfo(vocab_size=256, chat_template="x")},
        {"files": {"tokenizer.json": b"[]"}},
        {"build_key": "1" * 64},
    ]
    manifests = [engines.manifest(change.pop("files", None), **(base | change)) for change in changes]
    assert len({manifest.digest for manifest in manifests}) == len(changes)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a/..",
        ".",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        "a\\..\\b",
        "C:\\x",
        "a\x00b",
        "a\nb",
        "a\n",
        "~",
        "é",
        "a" * 513,
    ],
)
def test_path_that_could_leave_the_folder_is_refused(path):
    with pytest.raises(ValidationError):
        EngineFile(path=path, size=0, sha256="0" * 64)
    with pytest.raises(ValidationError):
        TokenizerInfo(file=path, vocab_size=1)


@given(st.text(st.sampled_from("ab./\\"), max_size=12))
def test_accepted_path_stays_inside_under_its_one_name(tmp_path_factory, path):
    try:
        accepted = EngineFile(path=path, size=0, sha256="0" * 64).path
    except ValidationError:
        return
    base = tmp_path_factory.getbasetemp()
    resolved = (base / accepted).resolve()
    assert str(resolved.relative_to(base.resolve())) == accepted


@pytest.mark.parametrize("path", ["config.json", "a/b/weights-0.bin", ".hidden", "a b+c_d", "...", "a" * 512])
def test_plain_path_is_accepted(path):
    assert EngineFile(path=path, size=0, sha256="0" * 64).path == path


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"], ["a/b/c", "a/b"], ["a", "b", "a"]], ids="+".join)
def test_paths_that_clash_are_refused(paths):
    files = [EngineFile(path=path, size=0, sha256="0" * 64) for path in [*paths, "tokenizer.json"]]
    with pytest.raises(ValidationError, match="same path, or one is the other's folder"):
        with_files(files)


def test_tokenizer_must_be_among_the_files():
    with pytest.raises(ValidationError, match=r"'tokenizer\.json' is not among the files"):
        engines.manifest({"weights": b""})


@pytest.mark.parametrize("name", ["m", "smollm2-135m", "llama-3.1-8b", "a" * 63])
def test_model_name_is_accepted(name):
    assert engines.manifest(model=name).model == name
    assert MODEL_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "M", "-m", "m-", "a/b", "a b", "a" * 64, "m\n", "é", "..", "m:1"])
def test_other_model_name_is_refused(name):
    with pytest.raises(ValidationError):
        engines.manifest(model=name)
    assert not MODEL_NAME.fullmatch(name)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n"])
def test_what_is_no_sha256_is_refused(digest):
    with pytest.raises(ValidationError):
        EngineFile(path="a", size=0, sha256=digest)
    with pytest.raises(ValidationError):
        engines.manifest(build_key=digest)


@pytest.mark.parametrize(
    "fields", [{"max_batch_size": 0}, {"max_seq_len": 0}, {"max_num_tokens": -1}, {"unknown": 1}]
)
def test_senseless_or_unknown_field_is_refused(fields):
    with pytest.raises(ValidationError):
        engines.manifest(**fields)


def test_manifest_in_another_form_is_refused():
    manifest = engines.manifest()
    spaced = json.dumps(json.loads(manifest.to_bytes()), indent=1).encode()
    with pytest.raises(IntegrityError, match="not in canonical form"):
        Manifest.from_bytes(spaced, engines.sha256(spaced))
    lenient = manifest.to_bytes().replace(b'"max_seq_len":128', b'"max_seq_len":"128"')
    with pytest.raises(IntegrityError, match="not in canonical form"):
        Manifest.from_bytes(lenient, engines.sha256(lenient))


def test_manifest_of_another_schema_is_refused_by_number():
    later = canonical_json(json.loads(engines.manifest().to_bytes()) | {"schema_version": 2, "more": 1})

    with pytest.raises(IntegrityError, match="manifest schema 2, this version reads 1"):
        Manifest.from_bytes(later, engines.sha256(later))


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b'{"schema_version":1}', b"\xff", b"[" * 100_000, b"1" * 5000]
)
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(IntegrityError):
        Manifest.from_bytes(data, engines.sha256(data))


def test_files_are_found_by_path_and_sizes_add_up():
    manifest = engines.manifest({"tokenizer.json": b"12", "a/b": b"345"})

    assert manifest.file("a/b").size == 3
    assert manifest.size == 5
    with pytest.raises(KeyError):
        manifest.file("a")


def test_changed_copy_has_its_own_digest():
    manifest = engines.manifest()
    before = manifest.digest
    changed = manifest.model_copy(update={"max_seq_len": 7})

    assert changed.digest == hashlib.sha256(changed.to_bytes()).hexdigest() != before
    assert manifest.digest == before
    assert manifest.model_copy().digest == before


def test_key_parts_must_make_the_key():
    parts = KeyParts(source="1" * 64, spec={"precision": "int8"}, target="t", versions={})
    named = engines.manifest(key_parts=parts, build_key=parts.key)

    assert Manifest.from_bytes(named.to_bytes(), named.digest) == named
    with pytest.raises(ValidationError, match="build_key is not the digest of key_parts"):
        engines.manifest(key_parts=parts)


def test_engine_without_key_parts_keeps_the_name_that_it_had_before_there_were_any():
    assert "key_parts" not in json.loads(engines.manifest().to_bytes())
