"""The fake engine does what its script says."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from infer_worker.backends.fake import FakeBackend, read_script
from tests import engines
from tests.infer_worker.backends.driver import Driver
from tests.infer_worker.conftest import make_fake_engine

EOS = 255


@pytest.fixture
def load(tmp_path):
    """Makes a driver of a loaded fake engine."""

    def make(**fields) -> Driver:
        folder, manifest = make_fake_engine(tmp_path, **{"step_ms": 0, **fields})
        backend = FakeBackend()
        backend.load(folder, manifest)
        return Driver(backend)

    return make


def test_made_up_answer_depends_on_the_prompt_alone(load):
    driver = load()
    alone = driver.generate([1, 2, 3], max_tokens=20)
    first = driver.add([1, 2, 3], max_tokens=20)
    other = driver.add([1, 2, 4], max_tokens=20)
    driver.run()
    assert driver.results[first].ids == alone.ids
    assert driver.results[other].ids != alone.ids
    assert alone.reason == "LENGTH"
    assert len(set(alone.ids)) > 10


def test_resumed_answer_goes_on_as_undisturbed(load):
    whole = load().generate([1, 2, 3], max_tokens=20).ids
    rest = load().generate([1, 2, 3, *whole[:8]], resumed=8, max_tokens=12).ids
    assert whole[:8] + rest == whole


def test_scripted_answer_comes_in_its_chunks_and_then_ends(load):
    driver = load(answer=[[10], [], [11, 12]])
    result = driver.generate([1], max_tokens=50)
    assert result.ids == [10, 11, 12]
    assert result.steps == 2
    assert result.reason == "STOP"


def test_scripted_answer_is_resumed_inside_a_chunk(load):
    driver = load(answer=[[10], [11, 12], [13]])
    assert driver.generate([1, 10, 11], resumed=2, max_tokens=50).ids == [12, 13]
    assert driver.generate([1, 10, 11, 12, 13], resumed=4, max_tokens=50).ids == []


def test_end_of_sequence_token_ends_unless_ignored(load):
    driver = load(answer=[[10, EOS, 11]], eos_token_ids=(EOS,))
    assert driver.generate([1], max_tokens=50).ids == [10, EOS]
    ignoring = driver.generate([1], max_tokens=50, ignore_eos=True)
    assert ignoring.ids == [10, EOS, 11]


def test_made_up_answer_never_ends_by_itself(load):
    driver = load(eos_token_ids=(EOS,))
    result = driver.generate([1], max_tokens=2000)
    assert len(result.ids) == 2000
    assert EOS not in result.ids


def test_stop_token_is_the_last_one_given(load):
    driver = load(answer=[[10, 11, 12]])
    result = driver.generate([1], max_tokens=50, stop_token_ids=[11])
    assert (result.ids, result.reason) == ([10, 11], "STOP")


def test_sequence_ends_where_the_engine_has_no_more_room(load):
    driver = load(max_seq_len=10)
    result = driver.generate([1, 2, 3])
    assert (len(result.ids), result.reason) == (7, "LENGTH")


@pytest.mark.parametrize(
    ("prompt", "fields", "why"),
    [
        ([], {}, "empty"),
        ([1] * 10, {}, "leave no room in a sequence of 10"),
        ([256], {}, "256 is no token; the vocabulary has 256"),
    ],
)
def test_sequence_that_can_never_run_is_refused(load, prompt, fields, why):
    driver = load(max_seq_len=10)
    result = driver.generate(prompt, **fields)
    assert result.reason == "REFUSED"
    assert why in result.error


def test_resumed_sequence_that_is_full_has_reached_its_length(load):
    driver = load(max_seq_len=10)
    result = driver.generate([1] * 10, resumed=3)
    assert (result.ids, result.reason) == ([], "LENGTH")


def test_cancelled_sequence_gives_nothing_more(load):
    driver = load()
    identifier = driver.add([1], max_tokens=1000)
    driver.step()
    driver.backend.cancel(identifier)
    driver.backend.cancel(999)
    assert not driver.backend.has_work()
    assert len(driver.results[identifier].ids) == 1


def test_logprobs_come_for_those_who_asked(load):
    driver = load()
    with_top = driver.add([1], max_tokens=3, logprobs=2)
    without = driver.add([2], max_tokens=3)
    driver.run()
    assert [len(logprob.top) for logprob in driver.results[with_top].logprobs] == [2, 2, 2]
    ids = [logprob.token_id for logprob in driver.results[with_top].logprobs]
    assert ids == driver.results[with_top].ids
    assert all(not logprob.top for logprob in driver.results[without].logprobs)


def test_one_step_gives_every_running_sequence_a_token(load):
    driver = load(slots=64, step_ms=5)
    for prompt in range(64):
        driver.add([prompt], max_tokens=3)
    assert [len(driver.step().ids) for _ in range(3)] == [64, 64, 64]


def test_sequences_beyond_the_slots_wait(load):
    driver = load(slots=2)
    for prompt in range(3):
        driver.add([prompt], max_tokens=2)
    stats = driver.backend.stats()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (2, 1, 1)
    assert [list(driver.step().ids) for _ in range(4)] == [[1, 2], [1, 2], [3], [3]]


def test_steps_and_prefill_take_their_time(load):
    driver = load(step_ms=20, prefill_ms=30)
    began = time.monotonic()
    driver.generate([1], max_tokens=4)
    # Steps at 0, 20, 40, 60, 80, 100 ms; the first after 30 ms gives the first token.
    assert time.monotonic() - began >= 0.099


def test_options_of_the_manifest_override_the_script(tmp_path):
    folder, manifest = make_fake_engine(tmp_path, options={"step_ms": "7", "profile": "x"}, step_ms=3)
    assert read_script(folder, manifest).step_ms == 7


def test_absent_script_gives_the_defaults(tmp_path):
    assert read_script(tmp_path, engines.manifest()).step_ms == 10


def test_unknown_field_of_the_script_is_refused(tmp_path):
    folder, manifest = make_fake_engine(tmp_path, tokens_per_second=3)
    with pytest.raises(ValidationError, match="tokens_per_second"):
        read_script(folder, manifest)


def test_scripted_load_error_is_raised(load):
    with pytest.raises(ValueError, match="no such luck"):
        load(load_error="no such luck")
