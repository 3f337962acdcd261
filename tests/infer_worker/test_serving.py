"""A worker's serving against a real queue and a gateway driven by hand."""

from __future__ import annotations


async def test_request_streams_to_its_end(serve, gateway):
    await serve()
    await gateway.queue("r1", max_tokens=7)
    answer = await gateway.answer("r1")
    assert len(answer.ids) == 7
    assert answer.reason == "LENGTH"
