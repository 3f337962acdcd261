"""Which engine is chosen, and what is said of the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timezone

import grpc
import pytest
import structlog

from infer_worker.engine_choice import Device, choose_engine, wait_for_engine
from mesh.bus.index import EngineIndex
from mesh.engine_store import EngineRecord
from mesh.errors import PreconditionError
from mesh.signing import SigningKey, Trust, load_public_keys
from mesh.target import Target
from tests import engines
from tests.conditions import until

DEVICE = Device(engines.TARGET, ["fake"], "exact", Trust({}, "off"))


def record(**fields) -> EngineRecord:
    manifest = engines.manifest(**{"versions": {"fake": "1"}, **fields})
    return EngineRecord(manifest, datetime.now(timezone.utc))


def test_first_engine_that_fits_is_taken():
    records = [record(versions={"fake": "2"}), record(kind="openvino"), record(), record()]
    choice = choose_engine(records, DEVICE)
    assert choice.record is records[2]
    assert choice.refusals == (
        f"{records[0].digest[:12]}: fake version: engine expects 2, found 1",
        f"{records[1].digest[:12]}: kind openvino, this worker handles fake",
    )


def test_engine_for_other_hardware_is_passed_over():
    wider = engines.TARGET.model_copy(update={"instruction_set": "amx"})
    choice = choose_engine([record(target=wider)], DEVICE)
    assert choice.record is None
    assert "instruction set: engine expects amx, found avx2" in choice.refusals[0]


@pytest.fixture
def key():
    return SigningKey.generate()


@pytest.fixture
def device(key, tmp_path):
    """Makes a device that trusts one key."""
    keys = load_public_keys(key.save(tmp_path / "key"))
    return lambda policy: Device(engines.TARGET, ["fake"], "exact", Trust(keys, policy))


def signed(key: SigningKey, by: SigningKey | None = None) -> EngineRecord:
    """An engine with a signature of `key`, or with one that only says so."""
    unsigned = record()
    signature = (by or key).sign(unsigned.manifest.to_bytes())
    return replace(unsigned, signatures=(signature.model_copy(update={"key_id": key.key_id}),))


def test_engine_without_a_trusted_signature_is_passed_over(device, key):
    other = SigningKey.generate()
    records = [record(), signed(other), signed(key, by=other), signed(key)]
    choice = choose_engine(records, device("require"))
    assert choice.record is records[3]
    for refusal, why in zip(
        choice.refusals,
        (
            "not signed;",
            f"signed by key {other.key_id}, which is not trusted;",
            f"the signature of key {key.key_id} does not fit the manifest;",
        ),
        strict=True,
    ):
        assert why in refusal


def test_other_hardware_is_named_before_the_signature(device, key):
    (refusal,) = choose_engine([record(versions={"fake": "2"})], device("require")).refusals
    assert "fake version" in refusal


@pytest.mark.parametrize(("policy", "warnings"), [("warn", 1), ("off", 0)])
def test_other_policies_take_unsigned_engines(device, policy, warnings):
    with structlog.testing.capture_logs() as logs:
        assert choose_engine([record()], device(policy)).record is not None
    assert len(logs) == warnings


def test_mismatch_is_refused_again_at_load():
    # Seen as TensorRT-LLM 222: an engine for other hardware was loaded.
    gpu = engines.TARGET.model_copy(update={"architecture": "aarch64", "instruction_set": "neon"})
    with pytest.raises(PreconditionError) as caught:
        DEVICE.require(record(target=gpu).manifest)
    assert caught.value.reason == "ENGINE_MISMATCH"
    assert caught.value.metadata["expected"] == "aarch64"
    assert caught.value.metadata["actual"] == "x86_64"


async def test_worker_waits_until_an_engine_that_fits_is_published(redis):
    index = EngineIndex(redis)
    reasons = []
    waiting = asyncio.ensure_future(wait_for_engine(index, ["m"], DEVICE, reasons.append))
    await until(lambda: reasons == ["model m has no engine"])
    await index.add(record(versions={"fake": "2"}))
    await until(lambda: "fake version" in reasons[-1])
    fitting = record()
    await index.add(fitting)
    choice = await asyncio.wait_for(waiting, 10)
    assert choice.record.digest == fitting.digest


@pytest.mark.parametrize(
    ("built", "found", "capabilities"),
    # Field case 30, as TensorRT-LLM 222 and 3031 met it.
    [("a100-sxm-80gb", "a10", ("8.0", "8.6")), ("h100-sxm-80gb", "l40s", ("9.0", "8.9"))],
)
def test_engine_for_another_gpu_is_neither_chosen_nor_loaded(built, found, capabilities):
    offered = record(target=Target.from_name(built))
    device = replace(DEVICE, target=Target.from_name(found), policy="compatible")
    expected, actual = capabilities

    choice = choose_engine([offered], device)
    assert choice.record is None
    assert f"compute capability: engine expects {expected}, found {actual}" in choice.refusals[0]
    with pytest.raises(PreconditionError) as caught:
        device.require(offered.manifest)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    said = caught.value.metadata
    assert (said["what"], said["expected"], said["actual"]) == ("compute capability", expected, actual)
