"""Which engine is chosen, and what is said of the others."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone

import pytest

from infer_worker.engine_choice import Device, choose_engine, wait_for_engine
from mesh.bus.index import EngineIndex
from mesh.engine_store import EngineRecord
from mesh.errors import PreconditionError
from tests import engines
from tests.conditions import until

DEVICE = Device(engines.TARGET, ["fake"], "exact")


def record(**fields) -> EngineRecord:
    manifest = engines.manifest(**{"versions": {"fake": "1"}, **fields})
    return EngineRecord(manifest, datetime.now(timezone.utc))


def test_first_engine_that_fits_is_taken():
    records = [record(versions={"fake": "2"}), record(kind="openvino"), record(), record()]
    choice = choose_engine(records, DEVICE)
    assert choice.manifest == records[2].manifest
    assert choice.refusals == (
        f"{records[0].digest[:12]}: fake version: engine expects 2, found 1",
        f"{records[1].digest[:12]}: kind openvino, this worker handles fake",
    )


def test_engine_for_other_hardware_is_passed_over():
    wider = engines.TARGET.model_copy(update={"instruction_set": "amx"})
    choice = choose_engine([record(target=wider)], DEVICE)
    assert choice.manifest is None
    assert "instruction set: engine expects amx, found avx2" in choice.refusals[0]


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
    waiting = asyncio.ensure_future(wait_for_engine(index, "m", DEVICE, reasons.append))
    await until(lambda: reasons == ["model m has no engine"])
    await index.add(record(versions={"fake": "2"}))
    await until(lambda: "fake version" in reasons[-1])
    fitting = record()
    await index.add(fitting)
    choice = await asyncio.wait_for(waiting, 10)
    assert choice.manifest == fitting.manifest
