"""Every metric instrument. Durations are in seconds; attributes are named in mesh/semconv.py.

The instruments do nothing until `mesh.telemetry.configure` finds somewhere to send them.
"""

from __future__ import annotations

from opentelemetry import metrics

TOKEN_BOUNDARIES_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
"""1 ms to 60 s, each at most 2 times the one before, so that a percentile read from them is near."""

TASK_BOUNDARIES_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
"""100 ms to 2 h, for builds, downloads and loads."""

_meter = metrics.get_meter("enginemesh")

REQUEST_DURATION = _meter.create_histogram(
    "gen_ai.server.request.duration",
    "s",
    "Call's arrival to its last message",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
TIME_TO_FIRST_TOKEN = _meter.create_histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Call's arrival to its first token",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
TIME_PER_OUTPUT_TOKEN = _meter.create_histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time of each token after the first, of one request",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
TOKENS = _meter.create_counter(
    "enginemesh.tokens", "{token}", "Tokens taken in and generated, by gen_ai.token.type"
)
REQUESTS_ACTIVE = _meter.create_up_down_counter(
    "enginemesh.requests.active", "{request}", "Requests in this gateway that have not ended"
)
REQUESTS_MOVED = _meter.create_counter(
    "enginemesh.requests.moved", "{request}", "Attempts that were given up for another worker"
)
QUEUE_TIME = _meter.create_histogram(
    "enginemesh.queue.time",
    "s",
    "Queue to the worker that runs the attempt",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
QUEUE_DEPTH = _meter.create_gauge(
    "enginemesh.queue.depth", "{request}", "Requests of a model in this gateway that no worker has started"
)
QUEUE_OLDEST_WAIT = _meter.create_gauge(
    "enginemesh.queue.oldest_wait",
    "s",
    "Wait so far of the request of a model in this gateway that has waited longest; 0: none waits",
)
WORKERS = _meter.create_gauge(
    "enginemesh.workers", "{worker}", "Workers of a model that take work; every gateway tells the same"
)
SLOTS = _meter.create_gauge("enginemesh.slots", "{slot}", "Sequences that the engine runs at most")
SLOTS_USED = _meter.create_gauge("enginemesh.slots.used", "{slot}", "Sequences that the engine runs now")
KV_CACHE_USAGE = _meter.create_gauge("enginemesh.kv_cache.usage", "1", "KV cache in use, 0 to 1")
KV_BLOCKS = _meter.create_gauge("enginemesh.kv_cache.blocks", "{block}", "KV blocks that the engine has")
KV_BLOCKS_USED = _meter.create_gauge("enginemesh.kv_cache.blocks.used", "{block}", "KV blocks in use")
KV_CACHE_HIT_RATE = _meter.create_gauge(
    "enginemesh.kv_cache.hit_rate", "1", "Share of looked-for blocks that the prefix cache held, 0 to 1"
)
ENGINE_BATCH_SIZE = _meter.create_gauge(
    "enginemesh.engine.batch_size", "{sequence}", "Sequences in the engine's last step"
)
ENGINE_GAUGES = {
    "kv_blocks": KV_BLOCKS,
    "kv_blocks_used": KV_BLOCKS_USED,
    "kv_cache_hit_rate": KV_CACHE_HIT_RATE,
    "batch_size": ENGINE_BATCH_SIZE,
}
"""What engines that say so tell of themselves, by the fields of EngineStats."""

ENGINE_FIRST_TOKEN = _meter.create_histogram(
    "enginemesh.engine.time_to_first_token",
    "s",
    "Arrival in the engine to first token, by the engine's own clock",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
LINKS_ACTIVE = _meter.create_up_down_counter(
    "enginemesh.links.active", "{link}", "Links between this gateway and workers"
)
ENGINE_STEP_DURATION = _meter.create_histogram(
    "enginemesh.engine.step.duration",
    "s",
    "One engine step, all its sequences together",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
ENGINE_PREFILL_DURATION = _meter.create_histogram(
    "enginemesh.engine.prefill.duration",
    "s",
    "Sequence's start in the engine to its first token",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
ENGINE_DECODE_DURATION = _meter.create_histogram(
    "enginemesh.engine.decode.duration",
    "s",
    "Sequence's first token to its end in the engine",
    explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
)
ENTRIES_UNREADABLE = _meter.create_counter(
    "enginemesh.queue.entries.unreadable", "{entry}", "Queue entries that were no requests and were dropped"
)
ENGINE_FETCH_DURATION = _meter.create_histogram(
    "enginemesh.engine.fetch.duration",
    "s",
    "Download and check of an engine's files",
    explicit_bucket_boundaries_advisory=TASK_BOUNDARIES_S,
)
ENGINE_LOAD_DURATION = _meter.create_histogram(
    "enginemesh.engine.load.duration",
    "s",
    "Load and warm-up of an engine",
    explicit_bucket_boundaries_advisory=TASK_BOUNDARIES_S,
)
BUILD_STAGE_DURATION = _meter.create_histogram(
    "enginemesh.build.stage.duration",
    "s",
    "One stage of a build, by enginemesh.build.stage",
    explicit_bucket_boundaries_advisory=TASK_BOUNDARIES_S,
)
