"""The parts of a model file: its types of values, and the sections that hold fields of their own."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mesh.manifest import MODEL_NAME

TEXT_LIMIT = 256 << 10
PLACE_LIMIT = 1024
LENGTH_LIMIT = 1 << 24
OPTIONS_LIMIT = 64
TARGETS_LIMIT = 64
LORA_LIMIT = 64
PARALLEL_LIMIT = 64
SAMPLES_LIMIT = 1 << 16
SPECULATED_LIMIT = 64
WORKERS_LIMIT = 10_000
SECONDS_LIMIT = 7 * 24 * 3600.0
BUILTIN_DATA = "builtin"

_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_PRECISION = re.compile(r"[a-z0-9_]{0,31}")
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TARGET = re.compile(r"[a-z0-9][a-z0-9._:+-]{0,127}")


def _matching(pattern: re.Pattern[str], allowed: str) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"must be {allowed}, not {value!r}"[:300])
        return value

    return BeforeValidator(check)


def _plain_text(value: object) -> object:
    """YAML reads `true` and `5` as other types than text; options are text until their kind reads them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return value


def _options(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > OPTIONS_LIMIT:
            raise ValueError(f"at most {OPTIONS_LIMIT}, not {len(value)}")
        for name in value:
            if not isinstance(name, str) or not _OPTION.fullmatch(name):
                raise ValueError(f"option names are of a-z, 0-9 and '_', not {name!r}"[:300])
    return value


Name = Annotated[
    str,
    _matching(MODEL_NAME, "1 to 63 characters of a-z, 0-9, '.' and '-'"),
    Field(json_schema_extra={"pattern": MODEL_NAME.pattern}),
]
KindName = Annotated[str, _matching(_KIND, "an engine kind, such as openvino")]
Precision = Annotated[str, _matching(_PRECISION, "a precision, such as int8")]
TargetName = Annotated[
    str,
    _matching(_TARGET, "a target, such as h100-sxm-80gb or cpu-x86_64-avx512"),
    Field(json_schema_extra={"pattern": f"^{_TARGET.pattern}$"}),
]
Place = Annotated[str, Field(max_length=PLACE_LIMIT)]
Length = Annotated[int, Field(ge=0, le=LENGTH_LIMIT, strict=True)]
Parallel = Annotated[int, Field(ge=0, le=PARALLEL_LIMIT, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_LIMIT, allow_inf_nan=False)]
Options = Annotated[
    dict[str, Annotated[str, BeforeValidator(_plain_text), Field(max_length=TEXT_LIMIT)]],
    BeforeValidator(_options),
]


class Section(BaseModel):
    """Fields of a model file; 0 and "" mean the default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Calibration(Section):
    """What a precision is calibrated with."""

    data: Place = Field(
        BUILTIN_DATA,
        description='"builtin", or a text file on the build worker with one sample a line',
    )
    samples: int = Field(0, ge=0, le=SAMPLES_LIMIT, strict=True, description="Samples that are used")
    seq_len: Length = Field(0, description="Tokens of each sample at most")


class Speculation(Section):
    """Speculative decoding: how more than one token per step is tried."""

    method: Literal["draft_model", "prompt_lookup", "medusa", "eagle", "lookahead"] = Field(
        description="What guesses the tokens ahead"
    )
    source: Place = Field("", description="The draft model or the heads; given as the model's own source")
    precision: Precision = Field("", description="Weight precision of what `source` names")
    tokens: int = Field(
        0, ge=0, le=SPECULATED_LIMIT, strict=True, description="Tokens that are guessed ahead"
    )
    ngram_size: int = Field(
        0, ge=0, le=SPECULATED_LIMIT, strict=True, description="Longest run of tokens that is looked up"
    )


class LoraAdapter(Section):
    """A LoRA adapter that is built into the engine."""

    name: Name = Field(description="Its name among those of the model")
    source: Annotated[str, Field(min_length=1, max_length=PLACE_LIMIT)] = Field(
        description="Where it is; given as the model's own source"
    )


class ServingSettings(Section):
    """How one model is served, whatever its engines. Counts are those of each gateway process."""

    max_waiting_requests: Length = Field(0, description="Requests that may wait for a worker")
    max_waiting_tokens: int = Field(
        0, ge=0, le=(1 << 32) - 1, strict=True, description="Prompt tokens that may wait"
    )
    max_waiting_s: Seconds = Field(0.0, description="Seconds that a request may wait for a worker")
    default_max_tokens: Length = Field(
        0, description="Longest answer to a request that sets no max_tokens, in tokens"
    )
    min_workers: int = Field(
        0, ge=0, le=WORKERS_LIMIT, strict=True, description="Workers that run even when nothing is asked for"
    )
    max_workers: int = Field(0, ge=0, le=WORKERS_LIMIT, strict=True, description="Workers at most")
    scale_down_after_s: Seconds = Field(
        0.0, description="Seconds without a request after which a worker more than min_workers stops"
    )
