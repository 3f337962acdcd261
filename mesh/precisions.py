"""Number formats of weights and KV caches: how wide they are, and which GPUs compute in them.

Widths of grouped formats count their scales: INT4 has a 16-bit scale for 128 weights (AWQ's default group),
NVFP4 an FP8 scale for 16. Formats by GPU: https://nvidia.github.io/TensorRT-LLM/reference/precision.html.
"""

from __future__ import annotations

from dataclasses import dataclass

AWQ_GROUP = 128
NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True)
class Precision:
    """A number format.

    Attributes:
        bits: Of one weight, with its share of the scales.
        compute_capability: Least that a GPU needs, as major and minor.
    """

    bits: float
    compute_capability: tuple[int, int]


_AMPERE, _ADA, _BLACKWELL = (8, 0), (8, 9), (10, 0)
_VOLTA = (7, 0)
_GROUPED_INT4_BITS = 4 + 16 / AWQ_GROUP

PRECISIONS = {
    "fp32": Precision(32, _VOLTA),
    "fp16": Precision(16, _VOLTA),
    "bf16": Precision(16, _AMPERE),
    "fp8": Precision(8, _ADA),
    "int8": Precision(8, _VOLTA),
    "int8_sq": Precision(8, _AMPERE),
    "int4": Precision(_GROUPED_INT4_BITS, _AMPERE),
    "int4_awq": Precision(_GROUPED_INT4_BITS, _AMPERE),
    "w4a8_awq": Precision(_GROUPED_INT4_BITS, _ADA),  # its activations are FP8
    "nvfp4": Precision(4 + 8 / NVFP4_GROUP, _BLACKWELL),
}


def supported_precisions(compute_capability: str) -> list[str]:
    """What a GPU computes in, such as of "8.9"; in the order of the table."""
    have = parse_capability(compute_capability)
    return [name for name, precision in PRECISIONS.items() if precision.compute_capability <= have]


def parse_capability(text: str) -> tuple[int, int]:
    """Major and minor of a compute capability, which compare as its text does not: 10.0 is after 9.0."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
