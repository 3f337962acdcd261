"""The TensorRT-LLM backend on the library's stand-in, which takes no argument that the contract lacks."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from infer_worker.backends.tensorrt_llm import TensorRtLlmBackend
from mesh.capabilities import GUIDED_DECODING
from tests.conditions import until
from tests.infer_worker.backends.driver import Driver, Result, add_command
from tests.stand_ins.paths import TENSORRT_LLM, TRTLLM_BUILD
from tests.stand_ins.tensorrt_llm_engine import EOS, TOKENS_PER_BLOCK, VERSIONS, make_engine

PROMPTS = [[65 + n, 66, 67, 68 + n] for n in range(6)]


@pytest.fixture
def library(monkeypatch):
    """The stand-in can be imported; another test gets a fresh one."""
    monkeypatch.syspath_prepend(str(TENSORRT_LLM))
    monkeypatch.setenv("TENSORRT_LLM_STAND_IN_STEP_MS", "1")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def start(library, tmp_path):
    """Loads and warms an engine; fields are the manifest's."""
    loaded = []

    def load(**fields) -> Driver:
        manifest = make_engine(tmp_path / f"engine{len(loaded)}", **fields)
        backend = TensorRtLlmBackend()
        backend.load(tmp_path / f"engine{len(loaded)}", manifest)
        loaded.append(backend)
        backend.warm_up()
        return Driver(backend)

    yield load
    for backend in loaded:
        backend._executor.shutdown()


@pytest.fixture
def driver(start):
    return start()


def given_configuration(monkeypatch, start, **fields):
    """The ExecutorConfig that an engine was loaded with."""
    from tensorrt_llm.bindings import executor

    seen = []
    whole = executor.Executor

    def note(path, kind, config):
        seen.append(config)
        return whole(path, kind, config)

    monkeypatch.setattr(executor, "Executor", note)
    start(**fields)
    return seen[0]


def test_versions_are_those_that_manifests_name(library):
    assert TensorRtLlmBackend.versions() == VERSIONS


def test_versions_without_the_library_match_no_engine():
    assert set(TensorRtLlmBackend.versions().values()) == {"none"}


def test_greedy_answers_in_a_batch_equal_those_alone(driver):
    alone = [driver.generate(prompt, max_tokens=20, ignore_eos=True).ids for prompt in PROMPTS]
    together = [driver.add(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    widest = 0
    while driver.backend.has_work():
        widest = max(widest, len(driver.step().ids))
    assert [driver.results[one].ids for one in together] == alone
    assert {driver.results[one].reason for one in together} == {"LENGTH"}
    assert widest == len(PROMPTS)  # a step's outputs come together


def test_resumed_answer_goes_on_as_undisturbed(driver):
    whole = driver.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).ids
    rest = driver.generate([*PROMPTS[0], *whole[:7]], resumed=7, max_tokens=13, ignore_eos=True)
    assert whole[:7] + rest.ids == whole


def test_token_that_ends_an_answer_comes_last(driver, start):
    whole = driver.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).ids
    stop = whole[5]
    expected = whole[: whole.index(stop) + 1]
    for ignore_eos in (False, True):
        result = driver.generate(PROMPTS[0], max_tokens=20, stop_token_ids=[stop], ignore_eos=ignore_eos)
        assert (result.ids, result.reason) == (expected, "STOP")


def test_any_of_several_end_tokens_ends_an_answer(start):
    driver = start()
    whole = driver.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).ids
    tokenizer = driver.backend._manifest.tokenizer.model_copy(update={"eos_token_ids": (EOS, whole[3])})
    other = start(tokenizer=tokenizer)
    result = other.generate(PROMPTS[0], max_tokens=20)
    assert (result.ids, result.reason) == (whole[: whole.index(whole[3]) + 1], "STOP")


def test_seed_gives_the_same_tokens_and_none_another_each_time(driver):
    sampling = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    seeded = [driver.generate(PROMPTS[0], seed=5, **sampling).ids for _ in range(2)]
    unset = {tuple(driver.generate(PROMPTS[0], **sampling).ids) for _ in range(4)}
    assert seeded[0] == seeded[1]
    assert len(unset) == 4


def test_seed_after_a_move_is_the_seed_and_the_tokens_sent(driver):
    sampling = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    prompt = [*PROMPTS[0], 9, 9]
    moved = driver.generate(prompt, resumed=2, seed=2**64 - 1, **sampling).ids
    assert moved == driver.generate(prompt, seed=1, **sampling).ids


def test_every_way_of_sampling_passes_the_contract(driver):
    for sampling in (
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_k": 5, "top_p": 0.5, "seed": 2**40},
        {"top_k": 2**31},
        {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0},
    ):
        result = driver.generate(PROMPTS[0], max_tokens=3, temperature=0.7, ignore_eos=True, **sampling)
        assert result.reason == "LENGTH", result.error


def test_logprobs_are_given_to_those_who_asked(driver):
    asked = driver.add(PROMPTS[0], max_tokens=6, logprobs=0, ignore_eos=True)
    not_asked = driver.add(PROMPTS[1], max_tokens=6, ignore_eos=True)
    driver.run()
    result = driver.results[asked]
    assert [one.token_id for one in result.logprobs] == result.ids
    assert [round(one.logprob, 3) for one in result.logprobs] == [
        round(-0.5 - token % 7 / 10, 3) for token in result.ids
    ]
    assert all(one.logprob == 0 for one in driver.results[not_asked].logprobs)


@pytest.mark.parametrize(
    ("prompt", "sampling", "why"),
    [
        ([1], {"logprobs": 3}, "sampling.logprobs"),
        ([1] * 512, {}, "a sequence of 512"),
        ([1, 256], {}, "vocabulary has 256"),
        ([1], {"repetition_penalty": -1.0}, "repetitionPenalty > 0"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(driver, prompt, sampling, why):
    result = driver.generate(prompt, max_tokens=1, **sampling)
    assert result.reason == "REFUSED"
    assert why in result.error
    assert "\n" not in result.error  # the library's errors come with the C++ stack


def test_top_k_that_the_library_would_cut_is_refused(start):
    driver = start()
    tokenizer = driver.backend._manifest.tokenizer.model_copy(update={"vocab_size": 32_000})
    driver.backend._manifest = driver.backend._manifest.model_copy(update={"tokenizer": tokenizer})
    result = driver.generate(PROMPTS[0], max_tokens=1, temperature=1.0, top_k=2000)
    assert result.reason == "REFUSED"
    assert "1024" in result.error


def test_long_prompt_is_taken_in_chunks_unless_turned_off(start):
    prompt = [7] * 300  # max_num_tokens is 128
    assert start().generate(prompt, max_tokens=2, ignore_eos=True).reason == "LENGTH"
    whole = start(options={"enable_chunked_prefill": "false"})
    result = whole.generate(prompt, max_tokens=2)
    assert result.reason == "REFUSED"
    assert "exceeds maximum input length (128)" in result.error


def test_prompt_beyond_the_engines_input_length_is_refused_but_not_a_resumed_one(start):
    driver = start(max_input_len=10)
    assert driver.generate([1] * 11, max_tokens=1).reason == "REFUSED"
    assert driver.generate([1] * 11, resumed=1, max_tokens=1, ignore_eos=True).reason == "LENGTH"


async def test_cancelled_sequence_is_aborted_in_the_engine_too(driver):
    backend = driver.backend
    identifier = driver.add(PROMPTS[0], max_tokens=400, ignore_eos=True)
    while not driver.results[identifier].ids:
        driver.step()
    backend.cancel(identifier)
    backend.cancel(12345)
    assert not backend.has_work()
    assert driver.step().ids == []
    runtime = backend._executor._runtime
    await until(lambda: not runtime._running)
    assert driver.generate(PROMPTS[1], max_tokens=3, ignore_eos=True).reason == "LENGTH"


def test_statistics_tell_of_blocks_batch_and_first_tokens(driver):
    backend = driver.backend
    backend.stats()  # those of the warm-up
    prompt = [9] * (3 * TOKENS_PER_BLOCK)
    running = [driver.add(prompt, max_tokens=200, ignore_eos=True) for _ in range(3)]
    while not all(driver.results[one].ids for one in running):
        driver.step()
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.batch_size) == (3, 0, 3)
    assert stats.kv_blocks_used >= 3 * 3
    assert stats.kv_cache_usage == pytest.approx(stats.kv_blocks_used / stats.kv_blocks)
    assert stats.kv_cache_hit_rate > 0
    driver.run()
    idle = backend.stats()
    assert (idle.running, idle.batch_size, idle.kv_blocks_used, idle.kv_cache_usage) == (0, 0, 0, 0)
    assert len(idle.first_token_us) == 3
    assert all(0 < microseconds < 10**7 for microseconds in idle.first_token_us)
    assert not backend.stats().first_token_us


def test_prefix_found_in_the_cache_is_told(driver):
    prompt = [11] * (2 * TOKENS_PER_BLOCK) + [12]
    driver.generate(prompt, max_tokens=1, ignore_eos=True)
    driver.add(prompt, max_tokens=1, ignore_eos=True)
    finishes = []
    while not finishes:
        finishes = list(driver.step().finishes)
    assert finishes[0].cached_prompt_tokens == 2 * TOKENS_PER_BLOCK


def test_a_step_without_news_ends_soon(start, monkeypatch):
    monkeypatch.setenv("TENSORRT_LLM_STAND_IN_STEP_MS", "200")
    driver = start()
    driver.add(PROMPTS[0], max_tokens=1, ignore_eos=True)
    began = time.monotonic()
    driver.step()
    assert time.monotonic() - began < 0.15


def test_options_reach_the_executor(monkeypatch, start):
    options = {
        "free_gpu_memory_fraction": "0.5",
        "enable_block_reuse": "false",
        "enable_chunked_prefill": "false",
        "capacity_scheduler_policy": "MAX_UTILIZATION",
    }
    config = given_configuration(monkeypatch, start, options=options)
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert config.kv_cache_config.enable_block_reuse is False
    assert config.enable_chunked_context is False
    assert config.scheduler_config.capacity_scheduler_policy.name == "MAX_UTILIZATION"
    assert (config.max_batch_size, config.max_num_tokens) == (8, 128)
    assert config.parallel_config is None


def test_several_gpus_are_orchestrated(monkeypatch, start):
    config = given_configuration(monkeypatch, start, ranks=2)
    assert config.parallel_config.communication_mode.name == "ORCHESTRATOR"
    program = config.parallel_config.orchestrator_config.worker_executable_path
    assert program.endswith("tensorrt_llm/bin/executorWorker")


def test_speculation_is_told_to_the_executor(monkeypatch, start):
    config = given_configuration(monkeypatch, start, options={"speculation": "lookahead"})
    assert config.decoding_config.lookahead_decoding_config.max_ngram_size == 3


def test_adapters_answer_by_request(start):
    driver = start(options={"lora": '["polite", "terse"]'})
    answers = {}
    for name in ("", "polite", "terse"):
        identifier = driver.add(PROMPTS[0], max_tokens=10, ignore_eos=True, lora=name)
        driver.run()
        assert driver.results[identifier].reason == "LENGTH", driver.results[identifier].error
        answers[name] = driver.results[identifier].ids
    assert len({tuple(answer) for answer in answers.values()}) == 3
    plain = driver.generate(PROMPTS[0], max_tokens=10, ignore_eos=True)
    assert plain.ids == answers[""]
    rude = driver.generate(PROMPTS[0], max_tokens=10, lora="rude")
    assert (rude.reason, rude.error) == ("REFUSED", "sampling.lora: this engine has no adapter 'rude'")


def test_engine_that_lost_an_adapter_fails_to_load(library, tmp_path):
    manifest = make_engine(tmp_path / "engine", options={"lora": '["polite"]'})
    (tmp_path / "engine" / "lora" / "0" / "adapter_config.json").unlink()
    (tmp_path / "engine" / "lora" / "0").rmdir()
    with pytest.raises(ValueError, match="no lora/0, which ought to be adapter polite"):
        TensorRtLlmBackend().load(tmp_path / "engine", manifest)


GUIDES = {"json_schema": '{"type": "object"}', "json": True, "regex": "[0-9]+", "grammar": 'root ::= "a"'}


def guided(driver, kind, **fields):
    command = add_command(77, PROMPTS[0], max_tokens=10, ignore_eos=True, **fields)
    setattr(command.sampling.guided, kind, GUIDES[kind])
    driver.results[77] = Result()
    driver.backend.add(command)
    driver.run()
    return driver.results[77]


def test_every_sort_of_guide_reaches_the_executor(start):
    driver = start(capabilities=(GUIDED_DECODING,))
    plain = driver.generate(PROMPTS[0], max_tokens=10, ignore_eos=True).ids
    answers = [guided(driver, kind) for kind in GUIDES]
    assert {answer.reason for answer in answers} == {"LENGTH"}
    assert len({tuple(answer.ids) for answer in answers} | {tuple(plain)}) == len(GUIDES) + 1


def test_guided_answer_does_not_go_on_after_a_move(start):
    result = guided(start(capabilities=(GUIDED_DECODING,)), "json", resumed=1)
    assert result.reason == "REFUSED"
    assert "cannot go on after a move" in result.error


def test_vocabulary_for_guides_is_in_the_order_of_the_ids(monkeypatch, start):
    from tokenizers import Tokenizer

    config = given_configuration(monkeypatch, start, capabilities=(GUIDED_DECODING,))
    guides = config.guided_decoding_config
    tokenizer = Tokenizer.from_str(guides.tokenizer_str)
    assert guides.encoded_vocab == [tokenizer.id_to_token(number) for number in range(256)]
    assert guides.stop_token_ids == [EOS]


def test_option_without_sense_fails_to_load(start):
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        start(options={"free_gpu_memory_fraction": "7"})


def test_folder_without_an_engine_fails_to_load(library, tmp_path):
    manifest = make_engine(tmp_path / "engine")
    (tmp_path / "engine" / "rank0.engine").unlink()
    with pytest.raises(RuntimeError, match=r"no rank0\.engine"):
        TensorRtLlmBackend().load(tmp_path / "engine", manifest)
    (tmp_path / "engine" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json describes no engine"):
        TensorRtLlmBackend().load(tmp_path / "engine", manifest)


def test_executor_that_has_ended_ends_the_process(driver):
    driver.backend._executor.shutdown()
    with pytest.raises(RuntimeError, match="takes no requests any more"):
        driver.add(PROMPTS[0], max_tokens=1)


def test_what_the_builder_leaves_is_served(library, tmp_path):
    checkpoint, adapter, output = tmp_path / "checkpoint", tmp_path / "adapter", tmp_path / "built"
    for folder in (checkpoint, adapter):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (checkpoint / "rank0.safetensors").write_bytes(b"weights")
    model = {"architecture": "LlamaForCausalLM", "vocab_size": 256, "mapping": {"world_size": 1}}
    (checkpoint / "config.json").write_text(json.dumps(model))
    flags = {
        "checkpoint_dir": checkpoint,
        "output_dir": output,
        "output_timing_cache": tmp_path / "timing",
        "lora_dir": adapter,
        "max_batch_size": 4,
        "max_input_len": 63,
        "max_seq_len": 64,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, TRTLLM_BUILD, *words], check=True, capture_output=True)
    manifest = make_engine(tmp_path / "described", options={"lora": '["polite"]'})
    backend = TensorRtLlmBackend()
    limits = backend.load(output, manifest)
    assert (limits.slots, limits.max_seq_len) == (4, 64)
    driver = Driver(backend)
    assert driver.generate(PROMPTS[0], ignore_eos=True, lora="polite").reason == "LENGTH"
    assert len(driver.results[1].ids) == 60
    backend._executor.shutdown()
