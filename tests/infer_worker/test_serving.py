"""A worker's serving against a real queue and a gateway driven by hand."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from infer_worker import intake
from mesh.bus import keys
from mesh.bus.leases import WORKER, Leases
from tests.conditions import until
from tests.infer_worker.scripted_gateway import MODEL, ScriptedGateway

STREAM = keys.model_stream(MODEL, "normal")
LONG = {"max_tokens": 9_000}


async def is_queue_empty(redis) -> bool:
    """Whether no entry is left in any stream of the model."""
    names = [name async for name in redis.scan_iter(match=f"em:{{m:{MODEL}}}:*", _type="stream")]
    return not any([await redis.xlen(name) for name in names])


async def test_request_streams_to_its_end_and_leaves_nothing(serve, gateway, redis):
    running = await serve()
    await gateway.queue("r1", max_tokens=7)
    answer = await gateway.answer("r1")
    assert (len(answer.ids), answer.reason) == (7, "LENGTH")
    assert running.serving.slots_used == 0
    await until(lambda: is_queue_empty(redis))


async def test_requests_queued_before_the_worker_started_are_served(serve, gateway):
    # Seen in taskiq-redis: a group that starts at "$" skips them.
    await gateway.queue("r1")
    await serve()
    assert len((await gateway.answer("r1")).ids) == 5


async def test_many_requests_share_steps_and_frames(serve, gateway):
    await serve(slots=16, step_ms=5)
    for number in range(16):
        await gateway.queue(f"r{number}", prompt=[number + 1], max_tokens=40)
    for number in range(16):
        assert len((await gateway.answer(f"r{number}")).ids) == 40
    (link,) = gateway.links
    assert max(len(frame.ids) for frame in link.frames) == 16
    assert len(link.frames) < 16 * 40 / 4


@pytest.mark.timeout(300)
async def test_ten_thousand_requests_leave_nothing(serve, gateway, redis):
    # Seen as safe-decoder 329: acknowledged entries were never removed.
    total = 10_000
    running = await serve(slots=64, step_ms=0, settings={"take_bite": 16})
    for number in range(total):
        await gateway.queue(f"r{number}", max_tokens=1)
    await until(lambda: sum(answer.finish is not None for answer in gateway.answers.values()) == total)
    await until(lambda: is_queue_empty(redis))
    assert running.serving.slots_used == 0
    assert len(running.serving._intake) == 0
    assert running.serving._intake._settled == []


async def test_no_more_is_taken_than_slots_are_free(serve, gateway, redis):
    await serve(slots=2)
    for number in range(5):
        await gateway.queue(f"r{number}", **LONG)
    await until(lambda: len(gateway.answers) == 2)
    await until(lambda: _xlen_is(redis, 3))
    assert (await redis.xpending(STREAM, keys.REQUEST_GROUP))["pending"] == 0
    link = gateway.links[0]
    link.send(cancels=[1])
    await until(lambda: len(gateway.answers) == 3)


async def test_refused_claim_is_dropped_and_its_slot_is_free(serve, gateway, redis):
    await serve(slots=1)
    gateway.grant = lambda key: key[0] != "unwanted"
    await gateway.queue("unwanted")
    await gateway.queue("wanted")
    await gateway.answer("wanted")
    await until(lambda: is_queue_empty(redis))


async def test_what_was_begun_is_stopped_when_its_claim_is_refused(serve, gateway):
    running = await serve(slots=1, step_ms=5)
    unanswered = []
    gateway.grant = unanswered.append
    await gateway.queue("r1", max_tokens=9_000)
    await until(lambda: gateway.unwanted_rows)  # it runs while its gateway has not answered
    gateway.links[0].send(refusals=[1])
    await until(lambda: running.serving.slots_used == 0, limit_s=1)
    assert unanswered == [("r1", 1)]


async def test_tokens_from_before_the_grant_are_not_lost(serve, gateway):
    await serve(step_ms=5)
    await gateway.queue("whole", max_tokens=40)
    whole = await gateway.answer("whole")
    gateway.grant = lambda _key: None
    await gateway.queue("late", max_tokens=40)
    await until(lambda: gateway.unwanted_rows > 3)
    gateway.take(gateway.links[0], ("late", 1), 2)
    assert (await gateway.answer("late")).ids == whole.ids


async def test_cancel_reaches_the_engine_within_a_step(serve, gateway):
    running = await serve(slots=1, step_ms=20)
    await gateway.queue("r1", max_tokens=9_000)
    answer = await gateway.tokens("r1", 3)
    gateway.links[0].send(cancels=[answer.handle])
    await until(lambda: running.serving.slots_used == 0, limit_s=1)
    await gateway.queue("r2", max_tokens=3)
    await gateway.answer("r2")
    assert answer.finish is None
    assert len(answer.ids) < 100


async def test_lost_tokens_are_sent_again(serve, gateway):
    await serve(step_ms=5)
    await gateway.queue("whole", max_tokens=100)
    whole = await gateway.answer("whole")
    await gateway.queue("lossy", max_tokens=100)
    lossy = await gateway.tokens("lossy", 50)
    del lossy.ids[20:]
    await gateway.tokens("lossy", 100)
    assert lossy.ids == whole.ids


async def test_refusal_of_the_engine_reaches_the_gateway(serve, gateway):
    await serve(max_seq_len=10)
    await gateway.queue("r1", prompt=[1] * 20)
    answer = await gateway.answer("r1")
    assert answer.reason == "REFUSED"
    assert "10" in answer.finish.error


async def test_moved_request_goes_on_where_it_was(serve, gateway):
    await serve()
    await gateway.queue("whole", prompt=[1, 2], max_tokens=20)
    whole = await gateway.answer("whole")
    await gateway.queue("moved", prompt=[1, 2], attempt=2, generated=whole.ids[:8], max_tokens=20)
    moved = await gateway.answer("moved", attempt=2)
    assert whole.ids[:8] + moved.ids == whole.ids


async def test_moved_request_that_is_complete_ends_at_once(serve, gateway):
    await serve()
    await gateway.queue("r1", attempt=2, generated=[4, 5], max_tokens=2)
    answer = await gateway.answer("r1", attempt=2)
    assert (answer.ids, answer.reason) == ([], "LENGTH")


async def test_logprobs_reach_the_gateway(serve, gateway):
    await serve()
    await gateway.queue("r1", logprobs=2)
    answer = await gateway.answer("r1")
    assert [logprob.token_id for logprob in answer.logprobs] == answer.ids


async def test_entry_that_is_no_request_is_dropped_and_others_go_on(serve, gateway, redis):
    await serve()
    await gateway._producer.add(STREAM, b"\xff\xff not a request", 60)
    await gateway._producer.add(STREAM, b"", 60)
    await gateway.queue("r1")
    await gateway.answer("r1")
    await until(lambda: is_queue_empty(redis))


async def test_quiet_link_still_beats(serve, gateway):
    await serve()
    await gateway.queue("r1")
    await gateway.answer("r1")
    (link,) = gateway.links
    await until(lambda: link.heartbeats >= 5)


async def test_hello_names_worker_and_engine(serve, gateway):
    running = await serve()
    await gateway.queue("r1")
    await gateway.answer("r1")
    hello = gateway.links[0].hello
    assert hello.worker_id == "w1"
    assert hello.engine == running.serving._manifest.digest


async def test_lost_link_stops_its_sequences_and_the_next_request_opens_another(serve, gateway):
    running = await serve(slots=2)
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 2)
    gateway.links[0].drop()
    await until(lambda: running.serving.slots_used == 0, limit_s=2)
    await gateway.queue("r2")
    await gateway.answer("r2")
    assert len(gateway.links) == 2


async def test_dead_gateway_does_not_disturb_another(serve, gateway, redis):
    other = await ScriptedGateway(redis, "gw2").start()
    running = await serve(slots=2)
    await gateway.queue("r1", **LONG)
    await other.queue("r2", **LONG)
    await gateway.tokens("r1", 2)
    await other.tokens("r2", 2)
    await other.stop()
    await until(lambda: running.serving.slots_used == 1)
    await gateway.tokens("r1", len(gateway.answers["r1", 1].ids) + 20)


async def test_requests_of_a_gateway_that_is_gone_are_dropped(serve, gateway, redis):
    gone = await ScriptedGateway(redis, "gone").start()
    await gone.stop()
    await gone.queue("r1")
    await gone.release_lease()
    await serve()
    await gateway.queue("r2")
    await gateway.answer("r2")
    await until(lambda: is_queue_empty(redis))


async def test_request_of_a_gateway_that_cannot_be_reached_waits_for_it(serve, redis):
    gateway = await ScriptedGateway(redis).start()
    await gateway.stop()
    await gateway.queue("r1")
    await serve(slots=1)
    await until(lambda: _pending_is(redis, 1))
    again = ScriptedGateway(redis)
    await again.start(gateway.address)
    assert len((await again.answer("r1")).ids) == 5
    await until(lambda: is_queue_empty(redis))
    await again.stop()


async def test_gateway_whose_lease_ran_out_loses_its_link(serve, gateway, redis):
    running = await serve(settings={"lease_ttl_s": 0.2})
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 2)
    workers = Leases(redis, WORKER)
    await workers.renew("w1", b"", 60)
    await gateway.release_lease()
    await until(lambda: gateway.links[0].is_closed)
    assert running.serving.slots_used == 0


async def test_missing_leases_say_nothing_while_none_can_be_renewed(serve, gateway):
    await serve(settings={"lease_ttl_s": 0.02}, step_ms=5)  # the worker's own is missing as well
    await gateway.release_lease()
    await gateway.queue("r1", max_tokens=100)
    assert len((await gateway.answer("r1")).ids) == 100


async def test_silent_gateway_does_not_hold_slots(serve, gateway, redis, monkeypatch):
    monkeypatch.setattr(intake, "ANSWER_LIMIT_S", 0.2)
    silent = await ScriptedGateway(redis, "silent").start()
    silent.grant = lambda _key: None
    await serve(slots=2)
    for number in range(6):
        await silent.queue(f"s{number}")
    await until(lambda: len(silent.claims) >= 2)
    await gateway.queue("r1")
    await gateway.answer("r1")
    # An answer that comes too late is answered, so that the request goes on elsewhere.
    silent.take(silent.links[0], silent.claims[0], 1)
    answer = await silent.answer(silent.claims[0][0])
    assert answer.reason == "ERROR"
    await silent.stop()


async def test_slow_gateway_gets_merged_frames_and_holds_up_no_other(serve, gateway, redis):
    slow = await ScriptedGateway(redis, "slow").start()
    await serve(slots=2, step_ms=0)
    await slow.queue("s1", max_tokens=9_000, logprobs=20)
    await slow.tokens("s1", 1)
    slow.links[0].is_reading.clear()
    await gateway.queue("r1", max_tokens=9_000)
    assert len((await gateway.answer("r1")).ids) == 9_000
    slow.links[0].is_reading.set()
    answer = await slow.answer("s1")
    assert len(answer.ids) == 9_000
    assert answer.frames < 9_000
    await slow.stop()


async def test_dead_engine_is_told_to_every_gateway(serve, gateway):
    running = await serve(slots=2)
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 2)
    os.kill(running.serving.engine.process_id, signal.SIGKILL)
    assert await asyncio.wait_for(running.running, 5) == "signal SIGKILL"
    await running.serving.close("the engine died")
    answer = await gateway.answer("r1")
    assert (answer.reason, answer.finish.error) == ("ERROR", "the engine died")


async def test_hung_engine_is_killed(serve, gateway):
    running = await serve(hang_after_tokens=3, settings={"engine_stall_limit_s": 0.5})
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 3)
    assert await asyncio.wait_for(running.running, 10) == "signal SIGKILL"


async def test_long_prefill_is_no_hang(serve, gateway):
    await serve(prefill_ms=4_000, step_ms=50, settings={"engine_stall_limit_s": 1.5})
    await gateway.queue("r1")
    assert len((await gateway.answer("r1")).ids) == 5


async def test_draining_takes_nothing_more_and_ends_what_runs(serve, gateway, redis):
    running = await serve(slots=2, step_ms=5)
    await gateway.queue("r1", max_tokens=60)
    await gateway.tokens("r1", 2)
    draining = asyncio.ensure_future(running.serving.drain())
    await asyncio.sleep(0)
    await gateway.queue("r2")
    await asyncio.wait_for(draining, 20)
    assert len(gateway.answers["r1", 1].ids) <= 60
    await running.close()
    assert gateway.answers["r1", 1].reason == "LENGTH"
    assert ("r2", 1) not in gateway.answers
    await until(lambda: _xlen_is(redis, 1))
    assert (await redis.xpending(STREAM, keys.REQUEST_GROUP))["pending"] == 0


async def test_closing_hands_over_what_still_runs(serve, gateway):
    running = await serve()
    await gateway.queue("r1", **LONG)
    await gateway.tokens("r1", 2)
    await running.close("the worker is stopping")
    answer = await gateway.answer("r1")
    assert (answer.reason, answer.finish.error) == ("ERROR", "the worker is stopping")


async def test_unconfirmed_request_goes_back_to_the_queue_on_closing(serve, gateway, redis):
    gateway.grant = lambda _key: None
    running = await serve()
    await gateway.queue("r1")
    await until(lambda: gateway.claims)
    await running.close()
    await until(lambda: _xlen_is(redis, 1))
    assert (await redis.xinfo_consumers(STREAM, keys.REQUEST_GROUP)) == []


async def test_request_that_another_worker_left_unconfirmed_is_claimed(serve, gateway, redis):
    # Seen as ragflow 15805: pending entries of a dead consumer were orphaned.
    await gateway.queue("r1")
    await redis.xgroup_create(STREAM, keys.REQUEST_GROUP, id="0")
    await redis.xreadgroup(keys.REQUEST_GROUP, "dead", {STREAM: ">"}, count=1)
    await serve()
    assert len((await gateway.answer("r1")).ids) == 5
    await until(lambda: is_queue_empty(redis))


@pytest.mark.parametrize("stream", [keys.model_stream(MODEL, "low"), keys.model_stream(MODEL, "high")])
async def test_every_stream_of_the_worker_is_read(serve, gateway, stream):
    await serve()
    await gateway.queue("r1", stream=stream)
    assert len((await gateway.answer("r1")).ids) == 5


async def _xlen_is(redis, count: int) -> bool:
    return await redis.xlen(STREAM) == count


async def _pending_is(redis, count: int) -> bool:
    try:
        return (await redis.xpending(STREAM, keys.REQUEST_GROUP))["pending"] == count
    except Exception:  # noqa: BLE001 - no group yet
        return False
