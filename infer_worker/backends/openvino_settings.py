"""How an OpenVINO pipeline is set up for what a manifest says. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infer_worker.backends.openvino_speculation import Speculation, blocks_of
from mesh.sizing import BLOCK_TOKENS, CPU_CACHE_BYTES

if TYPE_CHECKING:
    from mesh.manifest import Manifest

EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f16",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
"""With these a sequence's tokens are computed alike whatever else is in the batch and wherever its prompt
ends, so that it can be moved. What is left are roundings: docs/openvino.md, "Reproducible answers"."""

CACHE_PRECISIONS = ("f16", "f32", "u8", "u4")


def cache_blocks(manifest: Manifest) -> int:
    """Blocks of the KV cache: room for every slot at full length, within a limit, but at least for one.

    Blocks must be counted: without a limit the pipeline's cache usage always reads 100 %.
    """
    speculation = Speculation.from_options(manifest.options)
    one = blocks_of(manifest.max_seq_len + (speculation.extra_tokens if speculation else 0))
    every = one * manifest.max_batch_size
    if not manifest.kv_bytes_per_token:
        return every
    within_limit = CPU_CACHE_BYTES // (manifest.kv_bytes_per_token * BLOCK_TOKENS)
    return max(one, min(every, within_limit))


def plugin_properties(manifest: Manifest) -> dict[str, Any]:
    """What the plugin is told: the profile's settings, and the precision of the KV cache if one is named.

    Raises:
        ValueError: an option makes no sense.
    """
    profile = manifest.options.get("profile", "exact")
    if profile not in ("exact", "fast"):
        raise ValueError(f"profile {profile!r} is neither exact nor fast")
    properties: dict[str, Any] = dict(EXACT) if profile == "exact" else {}
    cache = manifest.options.get("kv_cache_precision")
    if cache is not None:
        if cache not in CACHE_PRECISIONS:
            raise ValueError(f"kv_cache_precision {cache!r} is none of {', '.join(CACHE_PRECISIONS)}")
        properties["KV_CACHE_PRECISION"] = cache
    return properties
