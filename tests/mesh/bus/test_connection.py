"""A server that does not answer shows as an error, not as a wait without end."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from cli.embedded import start_valkey
from mesh.bus import connection
from mesh.bus.connection import UNREACHABLE, connect


async def test_values_are_bytes(redis):
    await redis.set("k", b"\xff\x00")

    assert await redis.get("k") == b"\xff\x00"


async def test_refused_connection_is_unreachable():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        client = connect(f"redis://127.0.0.1:{taken.getsockname()[1]}/0")
        with pytest.raises(UNREACHABLE):
            await client.ping()
        await client.aclose()


async def test_stopped_server_is_unreachable_within_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "BLOCK_LIMIT_S", -4.5)  # leaves half a second for an answer
    service = start_valkey(tmp_path)
    client = connect(service.settings["ENGINEMESH_REDIS_URL"])
    try:
        await client.ping()
        service.process.send_signal(signal.SIGSTOP)
        with pytest.raises(UNREACHABLE):
            await asyncio.wait_for(client.ping(), 30)
        service.process.send_signal(signal.SIGCONT)
        assert await client.ping()
    finally:
        service.process.send_signal(signal.SIGCONT)
        await client.aclose()
        service.stop()


async def test_restarted_server_is_reached_again(tmp_path):
    first = start_valkey(tmp_path)
    port = int(first.settings["ENGINEMESH_REDIS_URL"].rsplit(":", 1)[1].removesuffix("/0"))
    client = connect(first.settings["ENGINEMESH_REDIS_URL"])
    try:
        await client.set("k", b"kept")
        first.stop()
        second = start_valkey(tmp_path, port)
        try:
            assert await client.get("k") == b"kept"
        finally:
            second.stop()
    finally:
        await client.aclose()
        first.stop()
