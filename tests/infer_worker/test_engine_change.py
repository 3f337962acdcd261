"""Workers change engines while they serve: nothing is lost, and not all of them at once."""

from __future__ import annotations

import asyncio

import pytest

from enginemesh.v1 import workers_pb2
from infer_worker.next_engine import IDLE_PATIENCE_S, Demand
from infer_worker.turn import is_next
from mesh.bus import keys
from mesh.bus.leases import WORKER, Leases
from mesh.engine_store import blob_key
from mesh.object_store import ObjectStore
from mesh.settings import MeshSettings
from tests.conditions import until

READY, DRAINING = workers_pb2.WORKER_STATE_READY, workers_pb2.WORKER_STATE_DRAINING


async def serves(mesh, manifest, worker_id="w1") -> bool:
    worker = await mesh.worker(worker_id)
    return worker is not None and worker.state == READY and worker.engine == f"engines/{manifest.digest}"


async def test_newer_engine_is_taken_when_what_runs_has_ended(publish, start, gateway, mesh):
    old = await publish(step_ms=5)
    await start()
    await gateway.queue("r1", max_tokens=400)
    await gateway.tokens("r1", 3)
    new = await publish(step_ms=2)
    worker = await mesh.in_state("DRAINING")
    assert worker.engine == f"engines/{old.digest}"
    assert worker.next_engine == f"engines/{new.digest}"
    await gateway.queue("r2")
    answer = await gateway.answer("r1")
    assert (len(answer.ids), answer.reason) == (400, "LENGTH")
    assert (await gateway.answer("r2")).reason == "LENGTH"
    assert [link.hello.engine for link in gateway.links] == [old.digest, new.digest]
    await until(lambda: serves(mesh, new))
    assert (await mesh.worker()).next_engine == ""


async def test_newer_engine_is_fetched_while_the_present_one_serves(publish, start, gateway, mesh, proxy):
    await publish(step_ms=5)
    await start(ENGINEMESH_S3_ENDPOINT=f"127.0.0.1:{proxy.port}")
    await mesh.in_state("READY")
    proxy.stall_at = b"/blobs/"
    new = await publish(step_ms=6)
    await until(lambda: proxy.is_stalled)
    await gateway.queue("r1")
    assert (await gateway.answer("r1")).reason == "LENGTH"
    assert (await mesh.worker()).state == READY
    proxy.go_on()
    await until(lambda: serves(mesh, new))


async def test_older_engine_is_not_taken_when_the_newer_one_goes(publish, start, mesh, index, tmp_path):
    older = await publish()
    newer = await publish()
    await start()
    await until(lambda: serves(mesh, newer))
    (record,) = [record for record in await index.engines("m") if record.digest == newer.digest]
    await index.remove(record)
    newest = await publish(step_ms=2)
    await until(lambda: serves(mesh, newest))
    assert older.digest not in (tmp_path / "worker.log").read_text()


async def test_engine_that_does_not_load_gives_way_to_the_one_before(publish, start, gateway, mesh, tmp_path):
    old = await publish()
    process = await start()
    await until(lambda: serves(mesh, old))
    await publish(load_error="no such luck")
    await until(lambda: "back to the one before" in (tmp_path / "worker.log").read_text())
    await until(lambda: serves(mesh, old))
    await gateway.queue("r1")
    assert (await gateway.answer("r1")).reason == "LENGTH"
    assert process.returncode is None


async def test_engine_that_is_damaged_in_the_store_disturbs_nobody(publish, start, gateway, mesh, tmp_path):
    old = await publish()
    await start()
    await until(lambda: serves(mesh, old))
    await publish(before_index=_damage, step_ms=7)
    await until(lambda: "next engine given up" in (tmp_path / "worker.log").read_text())
    assert await serves(mesh, old)
    await gateway.queue("r1")
    assert (await gateway.answer("r1")).reason == "LENGTH"


async def test_stop_while_it_drains_for_another_engine_ends_it(publish, start, gateway, mesh):
    await publish(step_ms=5)
    process = await start(ENGINEMESH_DRAIN_TIMEOUT_S="0.3")
    await gateway.queue("r1", max_tokens=9_000)
    await gateway.tokens("r1", 3)
    await publish()
    await mesh.in_state("DRAINING")
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert (await gateway.answer("r1")).finish.error == "the worker is stopping"


async def test_workers_of_a_model_change_one_after_the_other(publish, start, gateway, mesh, redis):
    old = await publish()
    names = ("w1", "w2", "w3")
    for name in names:
        await start(ENGINEMESH_WORKER_ID=name)
    for name in names:
        await until(lambda name=name: serves(mesh, old, name))
    new = await publish(load_ms=300)
    leases = Leases(redis, WORKER)
    away = set()

    async def have_all_changed() -> bool:
        live = [workers_pb2.Worker.FromString(info) for info in (await leases.live()).values()]
        away.add(sum(worker.state != READY for worker in live))
        return all(worker.engine == f"engines/{new.digest}" and worker.state == READY for worker in live)

    await until(have_all_changed)
    assert away == {0, 1}


async def test_requests_for_the_present_engine_alone_are_served_before_it_goes(publish, start, gateway, mesh):
    old = await publish(step_ms=5, slots=1)
    await start()
    await gateway.queue("r1", max_tokens=200)
    await gateway.tokens("r1", 3)
    pinned = keys.engine_stream("m", old.digest, "normal")
    await gateway.queue("r2", stream=pinned)
    new = await publish(step_ms=5)
    assert (await gateway.answer("r2")).reason == "LENGTH"
    await until(lambda: serves(mesh, new))


async def test_worker_of_several_models_serves_the_one_with_requests(publish, start, gateway, mesh):
    first = await publish()
    second = await publish(model="m2")
    await start(ENGINEMESH_MODEL="m, m2")
    await until(lambda: serves(mesh, first))
    await gateway.queue("r1")
    assert (await gateway.answer("r1")).reason == "LENGTH"
    await gateway.queue("r2", stream=keys.model_stream("m2", "normal"))
    assert (await gateway.answer("r2")).reason == "LENGTH"
    await until(lambda: serves(mesh, second))
    assert (await mesh.worker()).model == "models/m2"


def test_worker_without_work_goes_where_most_wait_after_a_short_patience():
    demand, depths = Demand(30), {"a": 0, "b": 1, "c": 5}
    assert demand.choose("a", depths, 0, is_idle=True) == "a"
    assert demand.choose("a", depths, IDLE_PATIENCE_S, is_idle=True) == "c"


@pytest.mark.parametrize("work", [{"is_idle": False}, {"is_idle": True, "own": 1}])
def test_busy_worker_leaves_its_model_once_another_waited_too_long(work):
    demand, depths = Demand(30), {"a": work.get("own", 0), "b": 1}
    assert demand.choose("a", depths, 0, is_idle=work["is_idle"]) == "a"
    assert demand.choose("a", depths, 29, is_idle=work["is_idle"]) == "a"
    assert demand.choose("a", depths, 30, is_idle=work["is_idle"]) == "b"


def test_patience_begins_anew_when_nobody_waits():
    demand = Demand(30)
    assert demand.choose("a", {"a": 0, "b": 1}, 0, is_idle=True) == "a"
    assert demand.choose("a", {"a": 0, "b": 0}, 1, is_idle=True) == "a"
    assert demand.choose("a", {"a": 0, "b": 1}, 2, is_idle=True) == "a"
    assert demand.choose("a", {"a": 0, "b": 1}, 2 + IDLE_PATIENCE_S, is_idle=True) == "b"


def worker(name, state=READY, model="models/m", next_engine="engines/e"):
    return workers_pb2.Worker(name=name, state=state, model=model, next_engine=next_engine)


@pytest.mark.parametrize(
    ("others", "turn"),
    [
        ([], True),
        ([worker("w2")], True),  # itself
        ([worker("w3")], True),
        ([worker("w1")], False),
        ([worker("w3", DRAINING)], False),
        ([worker("w1", next_engine="")], True),
        ([worker("w1", DRAINING, next_engine="")], True),  # it stops
        ([worker("w1", model="models/other")], True),
    ],
)
def test_turn_goes_by_name_and_to_one_at_a_time(others, turn):
    assert is_next(worker("w2"), others) is turn


def _damage(manifest) -> None:
    entry = manifest.file("script.json")
    ObjectStore.from_settings(MeshSettings()).put_bytes(blob_key(entry.sha256), bytes(entry.size))
