"""Every Redis key. All keys of a model share a hash tag, so that one script may touch them in a cluster."""

from __future__ import annotations

REQUEST_GROUP = "workers"
BUILD_GROUP = "builders"
PRIORITIES = ("high", "normal", "low")


def model_stream(model: str, priority: str) -> str:
    """Requests that any worker of the model may take."""
    return f"em:{{m:{model}}}:requests:{priority}"


def engine_stream(model: str, engine: str, priority: str) -> str:
    """Requests for one engine: pinned by the client, or only this engine can hold them."""
    return f"em:{{m:{model}}}:engine:{engine}:{priority}"


def model_engines(model: str) -> str:
    """Hash: engine digest to index record; the index of the store."""
    return f"em:{{m:{model}}}:engines"


MODEL_SERVING = "em:{index}:serving"
"""Hash: model to how it is served, as JSON; the index of the store."""

MODELS = "em:{index}:models"
"""Set: every model with an engine."""

INDEX_WHOLE = "em:{index}:whole"
"""There since the index was made from the store; gone when Redis has lost its data."""

INDEX_EVENTS = "em:{index}:events"
"""Stream: one entry each time that the index gains or loses an engine."""


def lease_clock(role: str) -> str:
    """Sorted set: process id to expiry in milliseconds of the Redis server's clock."""
    return f"em:{{{role}}}:leases"


def lease_info(role: str) -> str:
    """Hash: process id to what it says of itself."""
    return f"em:{{{role}}}:info"


# Builds share one hash tag: they are few, and making or ending one touches several keys at once.


def build_stream(target_key: str, kind: str) -> str:
    """Stream of build jobs for one target and engine kind."""
    return f"em:{{builds}}:jobs:{target_key}:{kind}"


OPERATION_LOG_PREFIX = "em:{builds}:log:"


def operation_log(build_id: str) -> str:
    """Stream: states of one build's operation; the last entry is the present state."""
    return OPERATION_LOG_PREFIX + build_id


def operation_cancel(build_id: str) -> str:
    """String: there while a build's worker is asked to stop it."""
    return f"em:{{builds}}:cancel:{build_id}"


BUILDS = "em:{builds}:all"
"""Sorted set: build id to creation time in Unix milliseconds."""


def build_request(request_id: str) -> str:
    """String: build id that a client's request id gave, and digest of what it asked for, while remembered."""
    return f"em:{{builds}}:request:{request_id}"


def build_in_flight(digest: str) -> str:
    """String: build id that runs for this spec and target."""
    return f"em:{{builds}}:inflight:{digest}"


def build_key_claim(build_key: str) -> str:
    """String: build id that makes the engine of this key, while it renews its claim."""
    return f"em:{{builds}}:key:{build_key}"
