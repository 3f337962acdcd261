"""What an engine tells of itself reaches the metrics."""

from __future__ import annotations

import pytest

from enginemesh.internal.v1 import engine_process_pb2
from mesh import metrics


class Recorder:
    """An instrument that keeps what it is given."""

    def __init__(self) -> None:
        self.values = []

    def set(self, value, _attributes) -> None:
        self.values.append(value)

    def record(self, value, _attributes) -> None:
        self.values.append(value)


@pytest.fixture
def recorders(monkeypatch):
    """In place of the engine's instruments, by the fields of EngineStats."""
    gauges = {name: Recorder() for name in metrics.ENGINE_GAUGES}
    monkeypatch.setattr(metrics, "ENGINE_GAUGES", gauges)
    histogram = Recorder()
    monkeypatch.setattr(metrics, "ENGINE_FIRST_TOKEN", histogram)
    return {**gauges, "first_token_us": histogram}


async def test_told_statistics_become_metrics_and_untold_ones_do_not(serve, recorders):
    serving = (await serve()).serving
    stats = engine_process_pb2.EngineStats(
        kv_blocks=100, kv_blocks_used=0, kv_cache_hit_rate=0.25, first_token_us=[1500, 20_000]
    )
    serving._take_stats(stats)
    assert {name: recorder.values for name, recorder in recorders.items()} == {
        "kv_blocks": [100],
        "kv_blocks_used": [0],  # none in use is something told
        "kv_cache_hit_rate": [0.25],
        "batch_size": [],
        "first_token_us": [0.0015, 0.02],
    }
