"""Builds of kind tensorrt_llm: a checkpoint as ModelOpt leaves it, and the stand-in of trtllm-build."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from dataclasses import replace

import pytest

from build_worker.backends.base import BuildInput
from build_worker.backends.tensorrt_llm import COLLECT, COMPILE, QUANTISE, TensorRtLlmBuilder
from build_worker.backends.tensorrt_llm_checkpoint import ALGORITHMS, Checkpoint
from build_worker.backends.tensorrt_llm_timing import TimingCache
from build_worker.backends.tensorrt_llm_tools import BuildOutput, _reason
from mesh import build_operation
from mesh.errors import BuildError, InvalidFieldError, PreconditionError
from mesh.model_file import ModelFile
from mesh.store_layout import timing_cache_key
from mesh.target import Target
from tests.stand_ins.paths import TENSORRT_LLM, TRTLLM_BUILD
from tests.stand_ins.tensorrt_llm_engine import VERSIONS, tokenizer

TARGET = Target.from_name("h100-sxm-80gb")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}

QUANTISER = """#!{python}
import json, pathlib, sys
if "-c" in sys.argv:
    print(json.dumps({{"nvidia-modelopt": "0.37.0", "torch": "2.13.0", "transformers": "4.56.2"}}))
    raise SystemExit
task = json.loads(pathlib.Path(sys.argv[2]).read_text())
pathlib.Path({seen!r}).write_text(json.dumps(task))
if {fails!r}:
    raise SystemExit("refused: " + {fails!r})
print("progress 0.500 halfway", flush=True)
ranks = task["tensor_parallel"] * task["pipeline_parallel"]
folder = pathlib.Path(task["output"])
algorithms = {algorithms!r}
(folder / "config.json").write_text(json.dumps({{
    "architecture": "LlamaForCausalLM", "dtype": "bfloat16",
    "quantization": {{"quant_algo": algorithms.get(task["precision"]),
                     "kv_cache_quant_algo": task["kv_cache_precision"].upper() or None}},
    "mapping": {{"world_size": ranks, "tp_size": task["tensor_parallel"],
                "pp_size": task["pipeline_parallel"]}}}}))
for rank in range(ranks):
    (folder / f"rank{{rank}}.safetensors").write_bytes(b"weights")
"""


def write_checkpoint(folder, architecture="LlamaForCausalLM", ranks=1, **more):
    folder.mkdir(parents=True)
    mapping = {"world_size": ranks, "tp_size": ranks, "pp_size": 1}
    config = {"architecture": architecture, "dtype": "bfloat16", "mapping": mapping, **more}
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (folder / f"rank{rank}.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "tokenizer.json").write_bytes(tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture
def quantiser(tmp_path, monkeypatch):
    """A Python that does as the quantiser does; returns what its task was, or makes it fail."""
    seen = tmp_path / "task.json"

    def install(fails=""):
        path = tmp_path / "python"
        path.write_text(
            QUANTISER.format(python=sys.executable, seen=str(seen), fails=fails, algorithms=ALGORITHMS)
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("ENGINEMESH_MODELOPT_PYTHON", str(path))

    install()
    install.task = lambda: json.loads(seen.read_text())
    return install


@pytest.fixture
def builder(environment, quantiser, monkeypatch):
    monkeypatch.setenv("ENGINEMESH_TRTLLM_BUILD", str(TRTLLM_BUILD))
    monkeypatch.syspath_prepend(str(TENSORRT_LLM))
    return TensorRtLlmBuilder()


@pytest.fixture
def run(builder, source, tmp_path):
    """Runs a build's parts; returns its traits, its folder and the progress that it told."""
    count = 0

    def call(more_sources=None, **fields):
        nonlocal count
        count += 1
        folder = tmp_path / f"build{count}"
        for name in ("work", "output"):
            (folder / name).mkdir(parents=True)
        spec = ModelFile(**{"model": "m", "kind": "tensorrt_llm", "source": "s", **fields})
        builder.validate(spec)
        job = BuildInput(spec, source, TARGET, folder / "work", folder / "output", more_sources or {})
        told = []

        def report(stage, fraction, detail=""):
            told.append((stage, fraction, detail))

        for part in builder.parts(spec):
            result = folder / part.name
            result.mkdir()
            builder.run_part(part, job, result, report)
            job = replace(job, previous=result)
        return builder.build(job, report), folder / "output", told

    return call


def test_engine_has_its_ranks_its_tokenizer_and_its_configuration(run):
    traits, folder, _ = run(precision="fp8", kv_cache_precision="fp8", tensor_parallel=2, max_batch_size=4)

    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "rank0.engine", "rank1.engine", "tokenizer.json", "tokenizer_config.json"}
    config = json.loads((folder / "config.json").read_text())
    assert {"version", "pretrained_config", "build_config"} == set(config)
    assert (traits.precision, traits.max_batch_size, traits.max_seq_len) == ("fp8", 4, 512)
    assert traits.tokenizer.eos_token_ids == (2,)
    assert traits.tokenizer.chat_template == "{{ messages }}"
    assert traits.options["kv_cache_precision"] == "fp8"
    assert traits.options["tensor_parallel"] == "2"
    # One head of keys and values per GPU, two layers, heads of 16 numbers, 8 bits each.
    assert traits.kv_bytes_per_token == 2 * 2 * 16


def test_chat_template_of_the_model_file_wins(run):
    traits, _, _ = run(chat_template="mine")

    assert traits.tokenizer.chat_template == "mine"


def test_log_probabilities_are_offered_only_with_their_logits(run):
    without, _, _ = run()
    with_logits, _, _ = run(options={"gather_generation_logits": "true"})

    assert "logprobs" not in without.capabilities
    assert "logprobs" in with_logits.capabilities


def test_quantiser_is_told_what_the_model_file_says(run, quantiser, tmp_path):
    data = tmp_path / "lines.txt"
    run(
        {"calibration.data": data},
        precision="int4_awq",
        kv_cache_precision="int8",
        calibration={"data": "lines.txt", "samples": 3, "seq_len": 7},
        pipeline_parallel=2,
    )

    task = quantiser.task()
    assert (task["precision"], task["kv_cache_precision"]) == ("int4_awq", "int8")
    assert (task["data"], task["samples"], task["seq_len"]) == (str(data), 3, 7)
    assert (task["tensor_parallel"], task["pipeline_parallel"]) == (1, 2)


def test_refusal_of_the_quantiser_fails_the_build_with_its_reason(run, quantiser):
    quantiser(fails="no such model")

    with pytest.raises(BuildError, match="no such model"):
        run()


def test_error_of_the_compiler_fails_the_build_with_its_reason(run, monkeypatch):
    monkeypatch.setenv("TRTLLM_BUILD_STAND_IN_FAIL", "Could not find any implementation for node X")

    with pytest.raises(BuildError, match=r"Could not find any implementation.*exit status 1"):
        run()


def test_output_becomes_progress_that_never_falls(run):
    _, _, told = run(tensor_parallel=2)

    compiling = [fraction for stage, fraction, _ in told if stage is COMPILE.stage]
    assert compiling == sorted(compiling)
    assert 0.5 in compiling  # the first of two engines is written
    assert [fraction for stage, fraction, _ in told if stage is QUANTISE.stage] == [0.5]


def test_timing_cache_comes_from_the_store_and_goes_back(run, store):
    key = timing_cache_key(TARGET.key, VERSIONS)
    run()
    assert store.objects.get_bytes(key, 100) == b"measured"

    store.objects.put_bytes(key, b"from another build")
    run()

    assert store.objects.get_bytes(key, 100) == b"from another build"


def test_measured_times_of_a_failed_build_are_kept(run, store, monkeypatch):
    monkeypatch.setenv("TRTLLM_BUILD_STAND_IN_FAIL", "no")
    with pytest.raises(BuildError):
        run()

    assert store.objects.get_bytes(timing_cache_key(TARGET.key, VERSIONS), 100) == b"measured"


def test_timing_caches_of_gpus_and_versions_are_kept_apart(store):
    other_gpu = TimingCache(store.objects, Target.from_name("a10"), VERSIONS)
    other_version = TimingCache(store.objects, TARGET, {**VERSIONS, "tensorrt": "10.15"})

    assert len({TimingCache(store.objects, TARGET, VERSIONS).key, other_gpu.key, other_version.key}) == 3


def test_adapters_are_built_in_under_their_numbers(run, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")

    traits, output, _ = run({"lora[0].source": folder}, lora=[{"name": "a", "source": "adapter"}])

    assert (output / "lora" / "0" / "adapter_config.json").exists()
    config = json.loads((output / "config.json").read_text())
    assert config["build_config"]["plugin_config"]["lora_plugin"] == "auto"
    assert json.loads(traits.options["lora"]) == ["a"]


@pytest.mark.parametrize(
    ("method", "architecture"), [("medusa", "MedusaForCausalLM"), ("eagle", "EagleForCausalLM")]
)
def test_checkpoint_with_heads_is_taken_as_it_is(run, tmp_path, method, architecture):
    heads = write_checkpoint(tmp_path / "heads", architecture, max_draft_len=63)

    traits, output, _ = run({"speculation.source": heads}, speculation={"method": method, "source": "heads"})

    config = json.loads((output / "config.json").read_text())
    assert config["pretrained_config"]["architecture"] == architecture
    assert config["build_config"]["max_draft_len"] == 63
    assert traits.options["speculation"] == method


@pytest.mark.parametrize(
    ("checkpoint", "fields", "problem"),
    [
        ({}, {}, "medusa needs MedusaForCausalLM"),
        ({"architecture": "MedusaForCausalLM"}, {}, "has none"),
        ({"architecture": "MedusaForCausalLM", "max_draft_len": 4}, {"precision": "fp8"}, "not FP8"),
        ({"architecture": "MedusaForCausalLM", "max_draft_len": 4, "ranks": 2}, {}, "parallelism is 2"),
    ],
)
def test_checkpoint_of_another_form_is_refused(run, tmp_path, checkpoint, fields, problem):
    heads = write_checkpoint(tmp_path / "heads", **checkpoint)

    with pytest.raises(InvalidFieldError, match=problem):
        run({"speculation.source": heads}, speculation={"method": "medusa", "source": "heads"}, **fields)


def test_checkpoint_without_a_rank_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "c", ranks=2)
    (folder / "rank1.safetensors").unlink()

    with pytest.raises(InvalidFieldError, match=r"no rank1\.safetensors"):
        Checkpoint(folder)


def test_compiler_that_leaves_no_engine_fails_the_build(run, monkeypatch):
    monkeypatch.setenv("ENGINEMESH_TRTLLM_BUILD", shutil.which("true"))

    with pytest.raises(BuildError, match=r"left no config\.json, rank0\.engine"):
        run()


def test_longer_than_the_model_is_refused(run):
    with pytest.raises(InvalidFieldError, match="context of 512"):
        run(max_seq_len=600)


@pytest.mark.parametrize("name", ["ENGINEMESH_TRTLLM_BUILD", "ENGINEMESH_MODELOPT_PYTHON"])
def test_missing_tool_is_told_before_anything_is_fetched(builder, monkeypatch, name):
    monkeypatch.setenv(name, "/nowhere/tool")

    with pytest.raises(PreconditionError, match="/nowhere/tool"):
        builder.validate(ModelFile(model="m", kind="tensorrt_llm", source="s"))


def test_versions_of_all_tools_are_in_the_build_key(builder):
    assert builder.runtime_versions() == VERSIONS
    assert builder.tool_versions() == {
        **VERSIONS,
        "nvidia-modelopt": "0.37.0",
        "torch": "2.13.0",
        "transformers": "4.56.2",
        "recipe": "1",
    }


def test_parts_are_in_order(builder):
    assert builder.parts(ModelFile(model="m", kind="tensorrt_llm", source="s")) == (
        QUANTISE,
        COMPILE,
        COLLECT,
    )


def test_lines_of_engines_made_at_once_keep_progress_within_its_bounds():
    output = BuildOutput(2)
    lines = [
        *("Build TensorRT engine Unnamed Network 0", "Build TensorRT engine Unnamed Network 0"),
        *("Engine generation completed in 3 seconds.", "Serializing engine to e/rank1.engine..."),
        *("Engine serialized. Total time", "Serializing engine to e/rank0.engine...", "Engine serialized."),
        *(
            "Engine serialized.",
            "Serializing engine to e/rank7.engine...",
            "Total time of building all engines",
        ),
    ]

    told = [fraction for fraction in map(output.read, lines) if fraction is not None]

    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (["a", "[TRT] [E] bad", "b"], 1, "[TRT] [E] bad (exit status 1)"),
        (["a", "b"], -9, "b (signal 9)"),
        ([], 3, "exit status 3"),
        (["refused: no", "Exception ignored"], 1, "no"),
    ],
)
def test_reason_of_a_failure_is_the_line_that_tells_most(lines, status, reason):
    assert _reason(lines, status) == reason


@pytest.mark.usefixtures("builder", "source")
async def test_worker_publishes_an_engine_that_says_what_it_needs(
    run_worker, create, queue, store, monkeypatch
):
    path = os.pathsep.join([str(TENSORRT_LLM), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    monkeypatch.setenv("PYTHONPATH", path)
    run_worker(target=TARGET, kinds="tensorrt_llm")

    build = await create(
        target=TARGET,
        kind="tensorrt_llm",
        source="source",
        precision="int4_awq",
        tensor_parallel=2,
        options={"gemm_plugin": "auto"},
    )
    ended = await queue.wait(build)

    manifest = store.record(build_operation.result_of(ended).engine.removeprefix("engines/")).manifest
    assert (manifest.target, manifest.versions) == (TARGET, VERSIONS)
    assert manifest.key_parts.versions["nvidia-modelopt"] == "0.37.0"
    assert {"rank0.engine", "rank1.engine", "config.json"} < {file.path for file in manifest.files}
    config = json.loads(store.read_file(manifest, "config.json", 1 << 20))
    assert config["build_config"]["plugin_config"]["gemm_plugin"] == "auto"
    assert store.objects.exists(timing_cache_key(TARGET.key, VERSIONS))
