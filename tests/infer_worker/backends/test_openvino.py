"""The OpenVINO backend on a real model."""

from __future__ import annotations

import pytest

from infer_worker.backends.openvino import OpenVinoBackend, cache_blocks
from mesh.sizing import BLOCK_TOKENS, CPU_CACHE_BYTES
from tests import engines
from tests.infer_worker.backends.driver import Driver

pytestmark = [pytest.mark.openvino, pytest.mark.timeout(300)]

PROMPTS = [
    [504, 3575, 282, 4649, 314],
    [1, 4093, 198, 9906, 2, 198, 1, 520, 9531, 198],
    [504, 2988, 314, 42],
    [7042, 30, 198, 198, 504],
    *([100 + n, 200 + n, 300 + n] for n in range(12)),
]


@pytest.fixture(scope="module")
def manifest(smollm2_engine):
    return smollm2_engine.manifest


@pytest.fixture(scope="module")
def backend(smollm2_engine):
    """The sample model in the profile exact, warm."""
    loaded = OpenVinoBackend()
    loaded.load(smollm2_engine.folder, smollm2_engine.manifest)
    loaded.warm_up()
    return loaded


@pytest.fixture
def driver(backend):
    assert not backend.has_work()
    return Driver(backend)


@pytest.fixture(scope="module")
def undisturbed(backend):
    """The greedy answer of each prompt alone, 24 tokens past any end of sequence."""
    driver = Driver(backend)
    return [driver.generate(prompt, max_tokens=24, ignore_eos=True).ids for prompt in PROMPTS]


def test_installed_versions_are_those_of_the_manifest(manifest):
    assert OpenVinoBackend.versions().items() >= manifest.versions.items()


def test_greedy_answers_in_a_batch_equal_those_alone(driver, undisturbed):
    ids = [driver.add(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
    driver.run()
    assert [driver.results[identifier].ids for identifier in ids] == undisturbed
    assert {driver.results[identifier].reason for identifier in ids} == {"LENGTH"}


def test_sequences_run_in_flight_together(driver):
    ids = [driver.add(prompt, max_tokens=8, ignore_eos=True) for prompt in PROMPTS]
    widest = 0
    while driver.backend.has_work():
        widest = max(widest, len(driver.step().ids))
    assert widest == len(ids)


def test_resumed_answers_go_on_as_undisturbed(driver, undisturbed):
    ids = [
        driver.add([*prompt, *answer[:9]], resumed=9, max_tokens=15, ignore_eos=True)
        for prompt, answer in zip(PROMPTS, undisturbed, strict=True)
    ]
    driver.run()
    assert [driver.results[identifier].ids for identifier in ids] == [a[9:] for a in undisturbed]


def test_end_of_sequence_token_comes_last(driver, manifest):
    result = driver.generate(PROMPTS[1], max_tokens=200)
    assert result.reason == "STOP"
    assert result.ids[-1] in manifest.tokenizer.eos_token_ids


def test_stop_token_ends_the_sequence_also_when_the_end_is_ignored(driver, undisturbed):
    stop = undisturbed[0][3]
    expected = undisturbed[0][: undisturbed[0].index(stop) + 1]
    for ignore_eos in (False, True):
        result = driver.generate(PROMPTS[0], max_tokens=24, stop_token_ids=[stop], ignore_eos=ignore_eos)
        assert (result.ids, result.reason) == (expected, "STOP")


def test_seed_gives_the_same_tokens_alone_and_in_a_batch(driver):
    sampling = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    alone = driver.generate(PROMPTS[0], seed=5, **sampling).ids
    again = driver.add(PROMPTS[0], seed=5, **sampling)
    others = [driver.add(PROMPTS[0], seed=seed, **sampling) for seed in range(10, 15)]
    driver.run()
    assert driver.results[again].ids == alone
    assert all(driver.results[other].ids != alone for other in others)


def test_unset_seed_is_another_each_time(driver):
    sampling = {"max_tokens": 16, "temperature": 1.5, "ignore_eos": True}
    answers = {tuple(driver.generate(PROMPTS[0], **sampling).ids) for _ in range(4)}
    assert len(answers) > 1


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}])
def test_narrowest_choice_is_the_greedy_one(driver, undisturbed, sampling):
    result = driver.generate(PROMPTS[0], max_tokens=24, temperature=1.0, ignore_eos=True, **sampling)
    assert result.ids == undisturbed[0]


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
def test_penalties_lessen_repetition(driver, undisturbed, penalty):
    distinct = [
        len(set(driver.generate(prompt, max_tokens=24, ignore_eos=True, **penalty).ids))
        for prompt in PROMPTS[:4]
    ]
    assert sum(distinct) > sum(len(set(answer)) for answer in undisturbed[:4])


def test_logprobs_are_given_to_those_who_asked(driver):
    asked = driver.add(PROMPTS[0], max_tokens=6, logprobs=0)
    not_asked = driver.add(PROMPTS[2], max_tokens=6)
    driver.run()
    result = driver.results[asked]
    assert [logprob.token_id for logprob in result.logprobs] == result.ids
    assert all(-20 < logprob.logprob < 0 for logprob in result.logprobs)
    assert all(logprob.logprob == 0 for logprob in driver.results[not_asked].logprobs)


def test_rival_tokens_are_refused_rather_than_left_out(driver):
    result = driver.generate(PROMPTS[0], max_tokens=6, logprobs=3)
    assert result.reason == "REFUSED"
    assert "sampling.logprobs" in result.error


def test_prompt_that_is_too_long_is_refused(driver, manifest):
    result = driver.generate([1] * manifest.max_seq_len, max_tokens=1)
    assert result.reason == "REFUSED"
    assert f"a sequence of {manifest.max_seq_len}" in result.error


def test_id_outside_the_vocabulary_is_refused(driver, manifest):
    result = driver.generate([1, manifest.tokenizer.vocab_size], max_tokens=1)
    assert result.reason == "REFUSED"


def test_setting_that_openvino_rejects_is_refused_with_its_reason(driver):
    result = driver.generate(PROMPTS[0], max_tokens=1, repetition_penalty=-1.0)
    assert result.reason == "REFUSED"
    assert "repetition_penalty" in result.error


def test_cancelled_sequence_frees_its_slot_within_a_step(driver, backend):
    identifier = driver.add(PROMPTS[0], max_tokens=1000, ignore_eos=True)
    driver.step()
    backend.cancel(identifier)
    backend.cancel(12345)
    given = len(driver.results[identifier].ids)
    driver.step()
    assert not backend.has_work()
    assert len(driver.results[identifier].ids) == given
    assert backend.stats().running == 0


def test_shared_prefix_is_not_computed_again(driver):
    prompt = [(7 * n) % 40_000 + 100 for n in range(1500)]
    first = driver.generate(prompt, max_tokens=2, ignore_eos=True)
    driver.add([*prompt, 5], max_tokens=2, ignore_eos=True)
    steps = 0
    while driver.backend.has_work():
        driver.step()
        steps += 1
    # 1,500 tokens are six steps of 256 when computed in full.
    assert steps <= 3
    assert len(first.ids) == 2


def test_usage_of_the_cache_is_told(driver, backend):
    driver.add([100 + n for n in range(200)], max_tokens=4, ignore_eos=True)
    driver.step()
    assert 0 < backend.stats().kv_cache_usage < 0.5
    assert backend.stats().running == 1
    driver.run()


def test_sequence_that_outgrows_the_cache_is_refused(smollm2_engine, monkeypatch):
    monkeypatch.setattr("infer_worker.backends.openvino.cache_blocks", lambda _manifest: 8)
    backend = OpenVinoBackend()
    backend.load(smollm2_engine.folder, smollm2_engine.manifest)
    driver = Driver(backend)
    result = driver.generate([100 + n for n in range(600)], max_tokens=4)
    assert result.reason == "REFUSED"
    assert "KV cache" in result.error
    assert driver.generate(PROMPTS[0], max_tokens=4, ignore_eos=True).reason == "LENGTH"


def test_unknown_profile_is_refused(smollm2_engine):
    manifest = smollm2_engine.manifest.model_copy(update={"options": {"profile": "sloppy"}})
    with pytest.raises(ValueError, match="sloppy"):
        OpenVinoBackend().load(smollm2_engine.folder, manifest)


@pytest.mark.parametrize(
    ("seq_len", "slots", "kv_bytes", "blocks"),
    [
        (320, 4, 1000, 11 * 4),
        (8192, 64, 23_040, CPU_CACHE_BYTES // (23_040 * BLOCK_TOKENS)),
        (131_072, 64, 100_000, 131_072 // BLOCK_TOKENS + 1),
        (320, 4, 0, 11 * 4),
    ],
)
def test_cache_holds_all_slots_or_its_limit_but_at_least_one_sequence(seq_len, slots, kv_bytes, blocks):
    manifest = engines.manifest(max_seq_len=seq_len, max_batch_size=slots, kv_bytes_per_token=kv_bytes)
    assert cache_blocks(manifest) == blocks
