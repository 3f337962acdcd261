"""A gateway in this process, on a real Valkey and S3, with one model whose tokens are bytes."""

from __future__ import annotations

import hashlib
import uuid

import grpc
import pytest

from gateway.server import Gateway
from mesh import capabilities, transport
from mesh.bus.index import EngineIndex
from mesh.engine_store import EngineRecord, EngineStore
from mesh.manifest import EngineFile, Manifest, TokenizerInfo
from mesh.object_store import ObjectStore
from mesh.settings import GatewaySettings
from mesh.target import detect_cpu
from tests.gateway.helpers import byte_level_tokenizer
from tests.gateway.scripted_worker import ScriptedWorker

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def gateway_settings(valkey, store_settings, monkeypatch):
    """Settings of a gateway that takes any free ports."""
    for name, value in {**valkey.settings, **store_settings}.items():
        monkeypatch.setenv(name, value)
    return GatewaySettings(port=0, silence_limit_s=0.6, max_message_bytes=8 << 20)


@pytest.fixture
async def engine(redis, gateway_settings, tmp_path):
    """A published engine of model "m"; its manifest."""
    data = byte_level_tokenizer().to_str().encode()
    (tmp_path / "tokenizer.json").write_bytes(data)
    manifest = Manifest(
        model="m",
        kind="fake",
        target=detect_cpu(),
        precision="none",
        build_key=hashlib.sha256(uuid.uuid4().bytes).hexdigest(),
        versions={},
        max_batch_size=4,
        max_seq_len=1 << 20,
        max_num_tokens=64,
        tokenizer=TokenizerInfo(vocab_size=256, chat_template=TEMPLATE, eos_token_ids=(0,)),
        capabilities=(capabilities.SEED,),
        files=(EngineFile(path="tokenizer.json", size=len(data), sha256=hashlib.sha256(data).hexdigest()),),
    )
    store = EngineStore(ObjectStore.from_settings(gateway_settings))
    store.publish(manifest, tmp_path)
    await EngineIndex(redis).add(EngineRecord(manifest, store.engines("m")[0].create_time))
    return manifest


@pytest.fixture
async def gateway(engine, gateway_settings):
    """A running gateway."""
    process = Gateway(gateway_settings)
    await process.start()
    yield process
    await process.stop()


@pytest.fixture
async def channel(gateway):
    """A client's channel to it."""
    options = transport.channel_options(8 << 20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=options) as opened:
        yield opened


@pytest.fixture
async def worker(redis, engine):
    """A worker for the model."""
    made = ScriptedWorker(redis, "w1", engine=engine.digest)
    yield made
    await made.close()


@pytest.fixture
async def second_worker(redis, engine):
    """Another worker for the model."""
    made = ScriptedWorker(redis, "w2", engine=engine.digest)
    yield made
    await made.close()
