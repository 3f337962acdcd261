"""The gateway says who signed an engine, uses none that it does not trust, and removes those not in use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from enginemesh.v1 import engines_pb2, engines_pb2_grpc, workers_pb2
from gateway.catalogue import Catalogue
from gateway.server import Gateway
from mesh.bus.index import EngineIndex, rebuild_index
from mesh.bus.leases import WORKER, Leases
from mesh.engine_store import EngineStore
from mesh.errors import NotFoundError
from mesh.object_store import ObjectStore
from mesh.signing import SigningKey, Trust, load_public_keys


@pytest.fixture
def key(tmp_path):
    made = SigningKey.generate()
    made.save(tmp_path / "key")
    return made


@pytest.fixture
async def store(gateway_settings):
    return EngineStore(ObjectStore.from_settings(gateway_settings))


@pytest.fixture
def gateway_settings(gateway_settings, key, tmp_path):
    # Half a second is what a removal waits.
    return gateway_settings.model_copy(
        update={"trusted_keys": tmp_path / "key.pub", "lease_ttl_s": 0.5, "signature_policy": "off"}
    )


@pytest.fixture
def sign(engine, store, redis):
    """Signs the engine that is in the store, and tells the index."""

    async def make(by: SigningKey, key_id: str = "") -> None:
        signature = by.sign(engine.to_bytes())
        signature = signature.model_copy(update={"key_id": key_id or by.key_id})
        place = f"signatures/{engine.digest}/{signature.key_id}.json"
        await asyncio.to_thread(store.objects.put_bytes, place, signature.to_bytes())
        await rebuild_index(store, EngineIndex(redis))

    return make


@pytest.fixture
def stub(channel):
    return engines_pb2_grpc.EnginesStub(channel)


async def state(stub, engine) -> tuple[str, list[str]]:
    shown = await stub.GetEngine(engines_pb2.GetEngineRequest(name=f"engines/{engine.digest}"))
    return engines_pb2.SignatureState.Name(shown.signature_state), list(shown.signature_key_ids)


async def test_listing_says_who_signed(stub, engine, sign, key):
    assert await state(stub, engine) == ("SIGNATURE_STATE_UNSIGNED", [])
    other = SigningKey.generate()
    await sign(other)
    assert await state(stub, engine) == ("SIGNATURE_STATE_UNTRUSTED", [other.key_id])
    await sign(other, key_id=key.key_id)
    assert (await state(stub, engine))[0] == "SIGNATURE_STATE_INVALID"
    await sign(key)
    assert await state(stub, engine) == (
        "SIGNATURE_STATE_VERIFIED",
        sorted([key.key_id, other.key_id]),
    )


@pytest.fixture
def catalogue(redis, store, key, tmp_path):
    """What a gateway knows that requires signatures."""
    trust = Trust(load_public_keys(tmp_path / "key.pub"), "require")
    return Catalogue(EngineIndex(redis), store, trust)


async def test_model_whose_engines_are_not_trusted_does_not_exist(engine, catalogue, sign, key):
    with pytest.raises(NotFoundError, match="no engine that may be used"):
        await catalogue.model("m")
    await sign(key)
    assert list((await catalogue.model("m")).engines) == [engine.digest]


async def test_planted_engine_hides_no_trusted_one(engine, store, catalogue, sign, key):
    # The newest engine's tokenizer is the model's, so it must not be anybody's.
    planted = engine.model_copy(update={"build_key": "0" * 64, "max_seq_len": 7})
    await asyncio.to_thread(store.publish, planted, Path("nowhere"))  # its blobs are there
    await sign(key)

    assert list((await catalogue.model("m")).engines) == [engine.digest]


async def test_deleted_engine_is_gone_from_store_and_listing(stub, engine, store):
    await stub.DeleteEngine(engines_pb2.DeleteEngineRequest(name=f"engines/{engine.digest}"))

    assert not (await stub.ListEngines(engines_pb2.ListEnginesRequest())).engines
    assert await asyncio.to_thread(store.engines) == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.DeleteEngine(engines_pb2.DeleteEngineRequest(name=f"engines/{engine.digest}"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_engine_of_a_worker_is_not_deleted(stub, engine, redis, store):
    info = workers_pb2.Worker(name="workers/w1", engine=f"engines/{engine.digest}")
    await Leases(redis, WORKER).renew("w1", info.SerializeToString(), 60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.DeleteEngine(engines_pb2.DeleteEngineRequest(name=f"engines/{engine.digest}"))

    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "worker w1 uses it" in caught.value.details()
    assert len(await asyncio.to_thread(store.engines)) == 1


@pytest.mark.parametrize("name", ["", "models/m", "engines/", "engines/nothing"])
async def test_name_of_no_engine_is_refused(stub, name):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.DeleteEngine(engines_pb2.DeleteEngineRequest(name=name))
    is_id = name == "engines/nothing"
    expected = grpc.StatusCode.NOT_FOUND if is_id else grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.code() == expected


def test_gateway_with_a_wrong_key_file_says_which(gateway_settings, tmp_path):
    (tmp_path / "key.pub").write_text("nothing")
    with pytest.raises(Exception, match=r"key\.pub holds no public key"):
        Gateway(gateway_settings)
