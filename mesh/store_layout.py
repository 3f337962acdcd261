"""Where things lie in the bucket of engines.

blobs/sha256/<first two digits>/<sha256>   a file of one or more engines
manifests/<engine>.json                    canonical JSON; its sha256 is the engine's digest
signatures/<engine>/<key id>.json          a signature over the manifest
builds/<build key>                         text: the digest of the engine that the build made
models/<model>/<engine>                    empty: this model has this engine
publishing/<engine>/<publisher>            JSON list: blobs that somebody who publishes relies on
sweeps/<sweep>                             JSON list: blobs that a garbage collection is about to remove
logs/builds/<build id>.log                 what the tools of a build said
logs/engines/<engine>.log                  the same, of the build that made the engine
scratch/<build id>/...                     what a build that has not ended keeps for its next attempt
timing/<target>/<tool>-<version>....cache  kernel times of TensorRT on this target, for the next build
serving/<model>.json                       how the model is served, whatever its engines
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOBS = "blobs/sha256/"
MANIFESTS = "manifests/"
MANIFEST_SUFFIX = ".json"
SIGNATURES = "signatures/"
BUILDS = "builds/"
MODELS = "models/"
PUBLISHING = "publishing/"
SWEEPS = "sweeps/"
BUILD_LOGS = "logs/builds/"
ENGINE_LOGS = "logs/engines/"
SCRATCH = "scratch/"
SERVING = "serving/"
TIMING = "timing/"

MANIFEST_LIMIT_BYTES = 8 << 20


def blob_key(sha256: str) -> str:
    """Where the blob of this digest lies."""
    return f"{BLOBS}{sha256[:2]}/{sha256}"


def manifest_key(digest: str) -> str:
    """Where the manifest of an engine lies."""
    return f"{MANIFESTS}{digest}{MANIFEST_SUFFIX}"


def signatures_prefix(digest: str) -> str:
    """Below which the signatures of an engine lie."""
    return f"{SIGNATURES}{digest}/"


def signature_key(digest: str, key_id: str) -> str:
    """Where the signature of an engine by this key lies."""
    return f"{signatures_prefix(digest)}{key_id}.json"


def build_marker(build_key: str) -> str:
    """Where the name of the engine that a build made lies."""
    return f"{BUILDS}{build_key}"


def model_marker(model: str, digest: str) -> str:
    """What says that a model has an engine."""
    return f"{MODELS}{model}/{digest}"


def serving_key(model: str) -> str:
    """Where the serving settings of a model lie."""
    return f"{SERVING}{model}.json"


def build_log_key(build_id: str) -> str:
    """Where the log of a build lies."""
    return f"{BUILD_LOGS}{build_id}.log"


def engine_log_key(digest: str) -> str:
    """Where the log of an engine's build lies."""
    return f"{ENGINE_LOGS}{digest}.log"


def timing_cache_key(target: str, versions: Mapping[str, str]) -> str:
    """Where the timing cache of a target and of these versions lies."""
    tools = "_".join(f"{name}-{version}" for name, version in sorted(versions.items()))
    return f"{TIMING}{target}/{tools}.cache"
