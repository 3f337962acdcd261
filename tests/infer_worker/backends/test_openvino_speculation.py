"""The OpenVINO backend with speculation: the same answers in fewer steps. On a tiny model, built here."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from infer_worker.backends.openvino import OpenVinoBackend
from infer_worker.backends.openvino_settings import cache_blocks
from infer_worker.backends.openvino_speculation import Room, Speculation
from mesh.model_fields import Speculation as SpeculationField
from mesh.model_file import ModelFile
from mesh.sizing import BLOCK_TOKENS
from tests import engines
from tests.build_worker import tiny_hub
from tests.build_worker.helpers import build_here
from tests.build_worker.tiny_gguf import CONTEXT
from tests.infer_worker.backends.driver import Driver

pytestmark = [pytest.mark.openvino, pytest.mark.timeout(300)]

LENGTH = 40
FEW_BLOCKS = 40
SPEC = ModelFile(model="tiny", kind="openvino", source="hub", precision="fp16", max_batch_size=8)
METHODS = {
    "prompt_lookup": SpeculationField(method="prompt_lookup", tokens=4, ngram_size=3),
    "draft_model": SpeculationField(method="draft_model", source="draft", precision="int4", tokens=3),
}


def make_prompts():
    source = random.Random(1)
    words = [[source.randrange(3, 260) for _ in range(source.randrange(2, 20))] for _ in range(4)]
    lengths = [1, 3, 20, 33, 64, 90, 200, 300]
    return [[*chain(*(source.choice(words) for _ in range(length)))][:length] for length in lengths]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    tiny_hub.write_tiny_hub(folder)
    return folder


def load(folder, manifest):
    backend = OpenVinoBackend()
    backend.load(folder, manifest)
    backend.warm_up()
    return backend


@pytest.fixture(scope="module")
def plain(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return load(folder / "engine", build_here(folder, SPEC, hub))


@pytest.fixture(scope="module", params=METHODS)
def engine(request, hub, tmp_path_factory):
    """The folder of an engine with speculation, its manifest, and the method."""
    folder = tmp_path_factory.mktemp(request.param)
    spec = SPEC.model_copy(update={"speculation": METHODS[request.param]})
    more = {"speculation.source": hub} if request.param == "draft_model" else {}
    return folder / "engine", build_here(folder, spec, hub, more), request.param


@pytest.fixture(scope="module")
def backend(engine):
    return load(*engine[:2])


@pytest.fixture
def driver(backend):
    assert not backend.has_work()
    return Driver(backend)


@pytest.fixture(scope="module")
def undisturbed(plain):
    """What the engine without speculation answers to each prompt alone."""
    driver = Driver(plain)
    return [driver.generate(prompt, max_tokens=LENGTH, ignore_eos=True) for prompt in PROMPTS]


def run_together(driver, prompts, **fields):
    ids = [driver.add(prompt, ignore_eos=True, **fields) for prompt in prompts]
    driver.run()
    return [driver.results[identifier] for identifier in ids]


def test_greedy_answers_are_those_without_speculation(driver, undisturbed):
    alone = [driver.generate(prompt, max_tokens=LENGTH, ignore_eos=True) for prompt in PROMPTS]
    together = run_together(driver, PROMPTS, max_tokens=LENGTH)
    expected = [result.ids for result in undisturbed]
    assert [result.ids for result in alone] == expected
    assert [result.ids for result in together] == expected
    assert {result.reason for result in together} == {"LENGTH"}


def test_answers_take_fewer_steps(driver, undisturbed):
    answers = run_together(driver, PROMPTS, max_tokens=LENGTH)
    assert sum(answer.steps for answer in answers) < 0.8 * sum(answer.steps for answer in undisturbed)


def test_resumed_answers_go_on_as_undisturbed(driver, undisturbed):
    ids = [
        driver.add([*prompt, *answer.ids[:9]], resumed=9, max_tokens=LENGTH - 9, ignore_eos=True)
        for prompt, answer in zip(PROMPTS, undisturbed, strict=True)
    ]
    driver.run()
    assert [driver.results[identifier].ids for identifier in ids] == [
        answer.ids[9:] for answer in undisturbed
    ]


def test_arrivals_at_any_time_change_no_token(driver, undisturbed):
    ids = []
    for prompt in PROMPTS:
        ids.append(driver.add(prompt, max_tokens=LENGTH, ignore_eos=True))
        driver.step()
        driver.step()
    driver.run()
    assert [driver.results[identifier].ids for identifier in ids] == [answer.ids for answer in undisturbed]


def test_sequences_wait_for_room_rather_than_be_preempted(engine, undisturbed, monkeypatch):
    monkeypatch.setattr("infer_worker.backends.openvino.cache_blocks", lambda _manifest: FEW_BLOCKS)
    backend = load(*engine[:2])
    driver = Driver(backend)
    ids = [driver.add(prompt, max_tokens=LENGTH, ignore_eos=True) for prompt in PROMPTS]
    driver.step()
    assert backend.stats().waiting > 0
    driver.run()
    assert [driver.results[identifier].ids for identifier in ids] == [answer.ids for answer in undisturbed]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_answers_end_at_their_length(driver, undisturbed, length):
    answers = run_together(driver, PROMPTS, max_tokens=length)
    assert [answer.ids for answer in answers] == [answer.ids[:length] for answer in undisturbed]


def test_a_sequence_may_fill_the_engine(driver):
    answer = driver.generate([7] * (CONTEXT - 5), ignore_eos=True)
    assert (len(answer.ids), answer.reason) == (5, "LENGTH")


def test_a_stop_token_ends_the_answer_also_amid_guesses(driver, undisturbed):
    for prompt, answer in zip(PROMPTS, undisturbed, strict=True):
        stop = answer.ids[7]
        result = driver.generate(prompt, max_tokens=LENGTH, stop_token_ids=[stop], ignore_eos=True)
        assert (result.ids, result.reason) == (answer.ids[: answer.ids.index(stop) + 1], "STOP")


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.7}])
def test_penalties_are_those_without_speculation(driver, plain, penalty):
    expected = run_together(Driver(plain), PROMPTS, max_tokens=LENGTH, **penalty)
    answers = run_together(driver, PROMPTS, max_tokens=LENGTH, **penalty)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]


def test_each_token_has_its_logprob(driver, plain):
    (expected,) = run_together(Driver(plain), PROMPTS[3:4], max_tokens=LENGTH, logprobs=0)
    (answer,) = run_together(driver, PROMPTS[3:4], max_tokens=LENGTH, logprobs=0)
    assert [entry.token_id for entry in answer.logprobs] == answer.ids
    values = [entry.logprob for entry in answer.logprobs]
    assert values == pytest.approx([entry.logprob for entry in expected.logprobs], abs=0.02)


def test_cancelled_sequences_give_their_room_back(driver, backend, undisturbed):
    ids = [driver.add(prompt, max_tokens=150, ignore_eos=True) for prompt in PROMPTS]
    driver.step()
    backend.cancel(ids[0])
    driver.step()
    for identifier in ids[1:]:
        backend.cancel(identifier)
    driver.step()
    assert not backend.has_work()
    assert backend.stats().running == backend.stats().waiting == 0
    answers = run_together(driver, PROMPTS, max_tokens=LENGTH)
    assert [answer.ids for answer in answers] == [answer.ids for answer in undisturbed]


def test_a_waiting_sequence_can_be_cancelled(engine, monkeypatch):
    monkeypatch.setattr("infer_worker.backends.openvino.cache_blocks", lambda _manifest: FEW_BLOCKS)
    backend = load(*engine[:2])
    driver = Driver(backend)
    ids = [driver.add(PROMPTS[-1], max_tokens=LENGTH, ignore_eos=True) for _ in range(6)]
    driver.step()
    assert backend.stats().waiting > 0
    backend.cancel(ids[-1])
    driver.run()
    assert not driver.results[ids[-1]].ids
    assert all(driver.results[identifier].reason == "LENGTH" for identifier in ids[:-1])


def test_sampling_follows_the_seed_or_is_refused(driver, plain, engine):
    sampling = {"max_tokens": LENGTH, "temperature": 0.8, "top_k": 5, "seed": 3}
    answers = run_together(driver, PROMPTS[:4], **sampling)
    if engine[2] == "draft_model":
        assert {answer.reason for answer in answers} == {"REFUSED"}
        assert all("sampling.temperature" in answer.error for answer in answers)
    else:
        expected = run_together(Driver(plain), PROMPTS[:4], **sampling)
        assert [answer.ids for answer in answers] == [answer.ids for answer in expected]


@pytest.mark.parametrize("precision", ["f16", "f32", "u8", "u4"])
def test_a_precision_of_the_cache_is_taken(engine, precision):
    folder, manifest, _ = engine
    options = {**manifest.options, "kv_cache_precision": precision}
    driver = Driver(load(folder, manifest.model_copy(update={"options": options})))
    assert len(driver.generate(PROMPTS[4], max_tokens=8, ignore_eos=True).ids) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "medusa", "speculation_tokens": "3"},
        {"speculation": "draft_model"},
        {"speculation": "prompt_lookup", "speculation_tokens": "3"},
        {"speculation": "draft_model", "speculation_tokens": "many"},
        {"kv_cache_precision": "f8"},
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(ValueError):
        OpenVinoBackend().load(tmp_path, engines.manifest(options=options))


def test_the_cache_has_room_for_guesses_beyond_the_longest_sequence():
    lookup = {"speculation": "prompt_lookup", "speculation_tokens": "4", "speculation_ngram_size": "3"}
    with_guesses = engines.manifest(max_seq_len=320, max_batch_size=1, options=lookup)
    room = Room(cache_blocks(with_guesses))
    assert room.take(1, 320 + Speculation.from_options(lookup).extra_tokens)
    assert not room.take(2, 1)
    room.give_back(1)
    room.give_back(1)
    assert room.take(2, BLOCK_TOKENS)
