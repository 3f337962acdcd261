"""The stand-in has the signatures of the contract, and the quirks that the mesh has to cope with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from cli import drift
from cli.checks import State
from tests.conditions import until
from tests.stand_ins.paths import TENSORRT_LLM
from tests.stand_ins.tensorrt_llm_engine import make_engine


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Folder of an engine; the stand-in can be imported."""
    monkeypatch.syspath_prepend(str(TENSORRT_LLM))
    monkeypatch.setenv("TENSORRT_LLM_STAND_IN_STEP_MS", "2")
    make_engine(tmp_path / "engine")
    yield tmp_path / "engine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
async def llm(engine):
    from tensorrt_llm._tensorrt_engine import LLM

    with LLM(engine, skip_tokenizer_init=True, enable_chunked_prefill=True) as opened:
        yield opened


def params(**fields):
    from tensorrt_llm.sampling_params import SamplingParams

    return SamplingParams(ignore_eos=True, **fields)


def test_it_has_all_that_the_contract_lists(engine, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    checks = drift.check_drift("tensorrt_llm")
    # Of what builds engines only the arguments are there: the mesh builds by the command line.
    left_out = ("trtllm-", "tensorrt_llm.builder.")
    wrong = [check for check in checks if check.state is not State.ok and not check.name.startswith(left_out)]
    assert wrong == []


async def test_same_object_is_given_at_every_step(llm):
    seen, copied = [], []
    async for output in llm.generate_async([1, 2, 3], params(max_tokens=5), streaming=True):
        seen.append(output)
        copied += output.outputs[0].token_ids_diff
    assert len({id(output) for output in seen}) == 1
    assert copied == seen[0].outputs[0].token_ids
    assert len(copied) == 5


async def test_leaving_the_loop_stops_nothing_and_abort_does(llm):
    output = llm.generate_async([1, 2, 3], params(max_tokens=400), streaming=True)
    async for _ in output:
        break
    runtime = llm._runtime
    given = len(next(iter(runtime._running.values())).answer)
    await until(lambda: len(next(iter(runtime._running.values())).answer) > given + 3)
    output.abort()
    await until(lambda: not runtime._running)
    assert output.aborted()


async def test_answers_have_32_tokens_unless_told(llm):
    output = await llm.generate_async([1, 2, 3], params())
    assert (output.outputs[0].length, output.outputs[0].finish_reason) == (32, "length")


async def test_statistics_end_when_idle_and_go_on_when_asked_again(llm):
    await llm.generate_async([1], params(max_tokens=2))
    first = [record async for record in llm.get_stats_async(timeout=0.05)]
    assert first[-1]["kvCacheStats"]["maxNumBlocks"] > 0
    assert [record async for record in llm.get_stats_async(timeout=0.05)] == []
    await llm.generate_async([1], params(max_tokens=2))
    assert [record async for record in llm.get_stats_async(timeout=0.05)] != []


async def test_sampling_parameters_are_changed_by_the_call(engine):
    from tensorrt_llm._tensorrt_engine import LLM

    with LLM(engine) as llm:
        sampling = params(max_tokens=1)
        await llm.generate_async([1], sampling)
        assert sampling.end_id is not None


async def test_wrong_names_are_refused_except_of_plug_ins(engine, llm):
    from tensorrt_llm._tensorrt_engine import LLM
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig
    from tensorrt_llm.plugin.plugin import PluginConfig

    with pytest.raises(ValueError, match="got invalid argument: max_output_len"):
        LLM(engine, max_output_len=3)
    with pytest.raises(AssertionError, match="dtype"):
        LLM(engine, kv_cache_config=KvCacheConfig(dtype="fp8"))
    with pytest.raises(ValueError, match="no argument 'free_memory_fraction'"):
        KvCacheConfig(free_memory_fraction=0.9)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stream'"):
        llm.generate_async([1], stream=True)
    assert PluginConfig(gemm_plugn="auto").gemm_plugin is None


async def test_after_shutdown_nothing_is_taken(llm):
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async([1], params())


def test_process_aborts_on_demand_without_an_exception(engine, tmp_path):
    told = tmp_path / "abort"
    told.touch()
    program = (
        "import sys; from tensorrt_llm.bindings import executor as e;"
        "x = e.Executor(sys.argv[1], e.ModelType.DECODER_ONLY, e.ExecutorConfig());"
        "x.enqueue_request(e.Request([1], 5, streaming=True)); x.await_responses(); print('alive')"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(TENSORRT_LLM),
        "TENSORRT_LLM_STAND_IN_ABORT": str(told),
    }
    command = [sys.executable, "-c", program, str(engine)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGABRT
    assert run.stdout == ""
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == "alive\n"


def test_engine_of_two_gpus_needs_both_ranks(engine, tmp_path):
    from tensorrt_llm.bindings import executor

    make_engine(tmp_path / "two", ranks=2)
    (tmp_path / "two" / "rank1.engine").unlink()
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["pretrained_config"]["mapping"]["world_size"] == 2
    with pytest.raises(RuntimeError, match=r"no rank1\.engine"):
        executor.Executor(tmp_path / "two", executor.ModelType.DECODER_ONLY, executor.ExecutorConfig())
