"""A process of clients: `python -m benchmarks.gpu_client`.

Reads one JSON object per line: {"who": "mesh" or "http", "address": "host:port", "model": name, "prompts":
[[id, ...], ...], "max_tokens": n, "start": Unix seconds}. Starts one stream for each prompt at `start` and
answers with {"arrivals": [[[seconds since start, tokens], ...], ...]}, a list for each stream.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import uvloop

from enginemesh.v1 import inference_pb2, inference_pb2_grpc
from mesh.transport import channel_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MESSAGE_BYTES = 16 << 20


async def mesh_stream(
    channel: grpc.aio.Channel, job: dict[str, Any], prompt: list[int]
) -> AsyncIterator[int]:
    """Number of tokens of each message of one stream of the mesh."""
    request = inference_pb2.GenerateRequest(
        model=job["model"],
        token_ids={"ids": prompt},
        sampling={"max_tokens": job["max_tokens"], "temperature": 0, "ignore_eos": True},
        return_token_ids=True,
    )
    async for message in inference_pb2_grpc.InferenceStub(channel).Generate(request):
        if message.delta.token_ids:
            yield len(message.delta.token_ids)


async def http_stream(session: Any, job: dict[str, Any], prompt: list[int]) -> AsyncIterator[int]:
    """The same of vLLM's own front; an event that gives text counts as one token."""
    body = {
        "model": job["model"],
        "prompt": prompt,
        "max_tokens": job["max_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"http://{job['address']}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield 1


async def run(job: dict[str, Any]) -> list[list[tuple[float, int]]]:
    """All streams of a job."""
    if job["who"] == "mesh":
        async with grpc.aio.insecure_channel(
            job["address"], options=channel_options(MESSAGE_BYTES)
        ) as channel:
            return await _gather(channel, job)
    import aiohttp  # noqa: PLC0415 - comes with vLLM, and only its front needs it

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await _gather(session, job)


async def _gather(connection: Any, job: dict[str, Any]) -> list[list[tuple[float, int]]]:
    stream = mesh_stream if job["who"] == "mesh" else http_stream
    start = job["start"]
    await asyncio.sleep(max(0.0, start - time.time()))

    async def one(prompt: list[int]) -> list[tuple[float, int]]:
        return [(time.time() - start, count) async for count in stream(connection, job, prompt)]

    return list(await asyncio.gather(*(one(prompt) for prompt in job["prompts"])))


def main() -> None:
    """Answers line by line until the end of input."""
    for line in sys.stdin:
        print(json.dumps({"arrivals": uvloop.run(run(json.loads(line)))}), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
