"""What vLLM's caches are looked up by, and how they travel. No vLLM is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mesh import vllm_core


@dataclass
class Settings:
    precision: str = "bf16"
    max_batch_size: int = 8
    max_seq_len: int = 128
    max_num_tokens: int = 64
    options: dict[str, str] = field(default_factory=dict)


def test_inherited_variables_that_change_cache_keys_are_dropped():
    inherited = {"PATH": "/bin", "VLLM_USE_AOT_COMPILE": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    made = vllm_core.environment(inherited, {})
    assert made["PATH"] == "/bin"
    assert made["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "VLLM_USE_AOT_COMPILE" not in made


def test_caches_are_named_by_relative_paths():
    made = vllm_core.environment({}, {})
    assert not made["VLLM_CACHE_ROOT"].startswith("/")
    assert not made["TRITON_CACHE_DIR"].startswith("/")
    assert vllm_core.engine_arguments(Settings())["model"] == vllm_core.CHECKPOINT


def test_packed_cache_is_restored_without_locks_and_alike_each_time(tmp_path):
    first, engine, second = (tmp_path / name for name in ("first", "engine", "second"))
    (first / "cache" / "vllm").mkdir(parents=True)
    engine.mkdir()
    (first / "cache" / "vllm" / "graph").write_bytes(b"compiled")
    (first / "cache" / "vllm" / "graph.lock").touch()
    vllm_core.pack_cache(first, engine)
    packed = (engine / vllm_core.CACHE).read_bytes()
    vllm_core.pack_cache(first, engine)
    assert (engine / vllm_core.CACHE).read_bytes() == packed
    vllm_core.restore_cache(engine, second)
    assert (second / "cache" / "vllm" / "graph").read_bytes() == b"compiled"
    assert not (second / "cache" / "vllm" / "graph.lock").exists()


@pytest.mark.parametrize(("options", "size"), [({}, 8), ({"speculation_tokens": "3"}, 32)])
def test_graphs_are_captured_for_the_batches_the_engine_takes(options, size):
    assert vllm_core.engine_arguments(Settings(options=options))["max_cudagraph_capture_size"] == size
