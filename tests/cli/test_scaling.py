"""How many workers: the decision alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.scaling import GROW_AFTER_S, SCALE_DOWN_AFTER_S, Demand, Limits, Load, desired_workers, load_of
from enginemesh.v1 import builds_pb2, models_pb2

LIMITS = Limits(min_workers=0, max_workers=3, scale_down_after_s=10)
BUSY = Load(workers=1, taking=1, slots=4, slots_used=4, waiting=5, oldest_wait_s=GROW_AFTER_S)


def desired(load, recently_needed=0, limits=LIMITS):
    return desired_workers(load, recently_needed, limits)


def test_a_model_without_work_has_no_worker():
    assert desired(Load(workers=0)) == 0
    assert desired(Load(workers=2, taking=2, slots=8)) == 0


def test_the_first_request_starts_a_worker_at_once():
    assert desired(Load(workers=0, waiting=1, oldest_wait_s=0.0)) == 1


def test_while_a_worker_starts_no_other_does():
    assert desired(Load(workers=1, starting=1, waiting=99, oldest_wait_s=60.0), recently_needed=1) == 1
    assert desired(replace(BUSY, workers=2, starting=1), recently_needed=3) == 2


def test_one_more_when_all_slots_are_in_use_for_a_moment():
    assert desired(BUSY, recently_needed=1) == 2
    assert desired(replace(BUSY, oldest_wait_s=GROW_AFTER_S / 2), recently_needed=1) == 1
    assert desired(replace(BUSY, slots_used=3), recently_needed=1) == 1


def test_workers_stay_as_long_as_they_were_needed_lately():
    quiet = Load(workers=3, taking=3, slots=12, slots_used=1)
    assert desired(quiet, recently_needed=3) == 3
    assert desired(quiet, recently_needed=1) == 1
    assert desired(quiet, recently_needed=7) == 3


def test_limits_hold():
    assert desired(replace(BUSY, workers=3, taking=3, slots=12, slots_used=12), recently_needed=9) == 3
    assert desired(Load(workers=0), limits=replace(LIMITS, min_workers=2)) == 2
    assert desired(Load(workers=0, waiting=5), limits=replace(LIMITS, max_workers=0)) == 0
    assert desired(Load(workers=3, taking=3, slots=12, slots_used=12), 3, replace(LIMITS, max_workers=1)) == 1


def test_a_worker_that_another_started_has_room_too():
    others = Load(workers=0, taking=1, slots=4, slots_used=1, waiting=1, oldest_wait_s=GROW_AFTER_S)
    assert desired(others) == 0
    assert desired(replace(others, slots_used=4)) == 1


@pytest.mark.parametrize(
    ("load", "needed"),
    [
        (Load(workers=2, taking=2, slots=8), 0),
        (Load(workers=2, taking=2, slots=8, slots_used=4), 1),
        (Load(workers=2, taking=2, slots=8, slots_used=4, waiting=1), 2),
        (Load(workers=0, waiting=50), 1),
        (Load(workers=1, starting=1), 0),
    ],
)
def test_needed_are_the_fewest_that_have_room_for_all(load, needed):
    assert load.needed == needed


def test_demand_is_forgotten_after_the_time_without_work():
    demand, idle = Demand(), Load(workers=2, taking=2, slots=8)
    assert demand.recent(replace(idle, slots_used=8), 10, now=0.0) == 2
    assert demand.recent(replace(idle, slots_used=1), 10, now=5.0) == 2
    assert demand.recent(idle, 10, now=9.9) == 2
    assert demand.recent(idle, 10, now=10.0) == 1
    assert demand.recent(idle, 10, now=15.0) == 0


def test_what_a_model_does_not_say_the_scaler_does():
    assert Limits.of(builds_pb2.ServingSettings(), 4) == Limits(0, 4, SCALE_DOWN_AFTER_S)
    assert Limits.of(builds_pb2.ServingSettings(min_workers=6), 4).max_workers == 6
    said = builds_pb2.ServingSettings(min_workers=1, max_workers=2, scale_down_after_s=7.5)
    assert Limits.of(said, 4) == Limits(1, 2, 7.5)


def test_a_load_is_what_the_gateway_tells_of_a_model():
    model = models_pb2.Model(workers=2, slots=8, slots_used=3, queued_requests=5)
    model.oldest_wait.FromMilliseconds(1500)
    assert load_of(model, workers=3, starting=1) == Load(3, 1, 2, 8, 3, 5, 1.5)
    assert load_of(models_pb2.Model(), workers=0, starting=0) == Load(0)
