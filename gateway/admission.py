"""What may enter: every limit on a request, checked before it costs anything. Pure."""

from __future__ import annotations

import math
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginemesh.v1 import inference_pb2, sampling_pb2
from mesh import capabilities
from mesh.errors import ExhaustedError, InvalidFieldError, UnsupportedError
from mesh.manifest import MODEL_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.manifest import Manifest

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
ENGINE_NAME = re.compile(r"(?:engines/)?([0-9a-f]{64})")
ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""No punctuation, so that no role can end its own turn in a template."""
MAX_MESSAGES = 1024
TOKEN_ID_BYTES = 4
"""What an id counts against the limit on a prompt's bytes: about what a token has as text."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_GUIDE_CHARACTERS = 65_536
MAX_LORA_CHARACTERS = 256
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
NO_PENALTY = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
CAPACITY_RETRY_S = 1.0

_PRIORITIES = {
    inference_pb2.PRIORITY_UNSPECIFIED: "normal",
    inference_pb2.PRIORITY_HIGH: "high",
    inference_pb2.PRIORITY_NORMAL: "normal",
    inference_pb2.PRIORITY_LOW: "low",
}


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose fields are all in range; nothing is known of its model yet."""

    request_id: str
    model: str
    engine: str
    """Digest, or empty for any."""
    priority: str
    sampling: sampling_pb2.SamplingParams
    input_field: str
    """The field that holds the input, for errors: "prompt", "chat" or "token_ids"."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that some engine can run.

    Attributes:
        sampling: With max_tokens resolved.
        engines: Digests of those that can run it.
        engine: The one in whose queue it must wait, as others would take it in vain; or empty.
    """

    sampling: sampling_pb2.SamplingParams
    engines: frozenset[str]
    engine: str


def check_capacity(in_flight: int, limit: int) -> None:
    """Refuses what the gateway has no room for."""
    if in_flight >= limit:
        raise ExhaustedError(
            f"max_requests: {in_flight} requests are in this gateway, the limit is {limit}",
            retry_after_s=CAPACITY_RETRY_S,
            limit=limit,
        )


def check(request: inference_pb2.GenerateRequest, max_prompt_bytes: int) -> CheckedRequest:
    """Checks every field that can be checked without knowing the model.

    Raises:
        InvalidFieldError: names the field and its limit.
    """
    model = request.model.removeprefix("models/")
    if not MODEL_NAME.fullmatch(model):
        raise InvalidFieldError("model", "is required: 1 to 63 characters of [a-z0-9.-]")
    if request.request_id and not REQUEST_ID.fullmatch(request.request_id):
        raise InvalidFieldError("request_id", "must be 1 to 128 characters of [A-Za-z0-9._-]")
    engine = ENGINE_NAME.fullmatch(request.engine)
    if request.engine and engine is None:
        raise InvalidFieldError("engine", 'must look like "engines/<64 hex digits>"')
    if request.priority not in _PRIORITIES:
        raise InvalidFieldError("priority", f"{request.priority} is no known priority")
    input_field = _check_input(request, max_prompt_bytes)
    _check_sampling(request.sampling)
    return CheckedRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        model=model,
        engine=engine.group(1) if engine else "",
        priority=_PRIORITIES[request.priority],
        sampling=request.sampling,
        input_field=input_field,
    )


def admit(
    checked: CheckedRequest,
    prompt_ids: Sequence[int],
    engines: Sequence[Manifest],
    default_max_tokens: int = 0,
) -> AdmittedRequest:
    """Checks a request against the engines that it may run on, and settles how long it may become.

    If only some engines can run it, it waits for the one that holds the longest sequences. Without
    max_tokens the answer may fill the shortest engine that takes the prompt, so that any of them may run it.

    Args:
        checked: From `check`.
        prompt_ids: The input's tokens.
        engines: Those of the model that the request may run on, all of one vocabulary; at least one.
        default_max_tokens: The longest answer to a request without max_tokens; 0: as long as fits.

    Raises:
        InvalidFieldError: the prompt, or prompt and max_tokens together, are longer than every engine takes;
            or a stop token is not of the vocabulary.
        UnsupportedError: no engine has a feature that it asks for.
    """
    _check_stop_tokens(checked.sampling.stop_token_ids, engines[0].tokenizer.vocab_size)
    needed = _needed_capabilities(checked.sampling)
    able = [engine for engine in engines if _has_all(engine, needed)]
    if not able:
        missing = min((needed.keys() - capabilities.offered(e.capabilities) for e in engines), key=len)
        capability = min(missing)
        raise UnsupportedError(
            f"sampling.{needed[capability]}: no engine of {checked.model!r} can do this",
            field=f"sampling.{needed[capability]}",
            capability=capability,
        )
    able = _taking_prompt(checked.input_field, len(prompt_ids), able)
    longest = max(able, key=lambda engine: engine.max_seq_len)
    limit = longest.max_seq_len
    if not checked.sampling.HasField("max_tokens"):
        limit = min((e.max_seq_len for e in able if e.max_seq_len > len(prompt_ids)), default=limit)
    sampling = _resolve_length(checked, len(prompt_ids), limit, default_max_tokens)
    total = len(prompt_ids) + sampling.max_tokens
    fitting = frozenset(engine.digest for engine in able if engine.max_seq_len >= total)
    pinned = checked.engine
    if not pinned and len(fitting) < len(engines):
        pinned = longest.digest
    return AdmittedRequest(sampling, fitting, pinned)


def can_run(engine: Manifest, prompt_tokens: int, sampling: sampling_pb2.SamplingParams) -> bool:
    """Whether an engine of the right vocabulary can run a request whose max_tokens is settled."""
    return (
        _has_all(engine, _needed_capabilities(sampling))
        and _takes_prompt(engine, prompt_tokens)
        and prompt_tokens + sampling.max_tokens <= engine.max_seq_len
    )


def _has_all(engine: Manifest, needed: Mapping[str, str]) -> bool:
    return needed.keys() <= capabilities.offered(engine.capabilities)


def _takes_prompt(engine: Manifest, prompt_tokens: int) -> bool:
    """Whether the engine has no limit on prompts alone, or one that this prompt keeps."""
    return engine.max_input_len is None or prompt_tokens <= engine.max_input_len


def _taking_prompt(field: str, prompt_tokens: int, engines: list[Manifest]) -> list[Manifest]:
    taking = [engine for engine in engines if _takes_prompt(engine, prompt_tokens)]
    if not taking:
        limit = max(engine.max_input_len or 0 for engine in engines)
        problem = f"has {prompt_tokens} tokens; the engine takes a prompt of {limit}"
        raise InvalidFieldError(field, problem, limit=limit, actual=prompt_tokens)
    return taking


def _resolve_length(
    checked: CheckedRequest, prompt_tokens: int, limit: int, default_max_tokens: int
) -> sampling_pb2.SamplingParams:
    sampling = checked.sampling
    if prompt_tokens >= limit:
        raise InvalidFieldError(
            checked.input_field,
            f"has {prompt_tokens} tokens; the engine takes {limit} for prompt and answer together",
            limit=limit,
            actual=prompt_tokens,
        )
    room = limit - prompt_tokens
    if sampling.HasField("max_tokens") and sampling.max_tokens > room:
        raise InvalidFieldError(
            "sampling.max_tokens",
            f"{sampling.max_tokens} after a prompt of {prompt_tokens} tokens is over the engine's {limit}",
            limit=room,
            actual=sampling.max_tokens,
        )
    resolved = sampling_pb2.SamplingParams()
    resolved.CopyFrom(sampling)
    if not resolved.HasField("max_tokens"):
        resolved.max_tokens = min(room, default_max_tokens or room)
    return resolved


def _needed_capabilities(sampling: sampling_pb2.SamplingParams) -> dict[str, str]:
    """What an engine must be able to do, and the field that asks for it."""
    needed = {}
    if not sampling.HasField("temperature") or sampling.temperature > 0:
        needed[capabilities.SAMPLING] = "temperature"
    if sampling.HasField("logprobs"):
        needed[capabilities.TOP_LOGPROBS if sampling.logprobs else capabilities.LOGPROBS] = "logprobs"
    if sampling.HasField("seed"):
        needed[capabilities.SEED] = "seed"
    if sampling.lora:
        needed[capabilities.lora(sampling.lora)] = "lora"
    if sampling.HasField("guided"):
        needed[capabilities.GUIDED_DECODING] = "guided"
    for field, neutral in NO_PENALTY.items():
        if sampling.HasField(field) and getattr(sampling, field) != neutral:  # type: ignore[arg-type]
            needed[capabilities.PENALTIES] = field
    return needed


def _check_input(request: inference_pb2.GenerateRequest, max_prompt_bytes: int) -> str:
    """Checks the input; the name of the field that holds it."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError("input", "one of prompt, chat, token_ids is required")
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise InvalidFieldError("token_ids.ids", "may not be empty")
        size = TOKEN_ID_BYTES * len(request.token_ids.ids)
    elif kind == "chat":
        _check_messages(request.chat.messages)
        size = request.chat.ByteSize()
    else:
        if not request.prompt:
            raise InvalidFieldError("prompt", "may not be empty")
        size = len(request.prompt.encode())
    if size > max_prompt_bytes:
        raise InvalidFieldError(
            kind, f"has {size} bytes, the limit is {max_prompt_bytes}", limit=max_prompt_bytes, actual=size
        )
    return kind


def _check_messages(messages: Sequence[inference_pb2.ChatMessage]) -> None:
    if not messages:
        raise InvalidFieldError("chat.messages", "may not be empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidFieldError("chat.messages", f"at most {MAX_MESSAGES} messages, not {len(messages)}")
    for place, message in enumerate(messages):
        if not ROLE.fullmatch(message.role):
            raise InvalidFieldError(
                f"chat.messages[{place}].role", "is required: 1 to 64 characters of [A-Za-z0-9_-]"
            )


def _check_sampling(sampling: sampling_pb2.SamplingParams) -> None:
    if sampling.HasField("max_tokens") and not 1 <= sampling.max_tokens < 2**31:
        # A client whose type is signed sends -1 as 2**32 - 1.
        raise InvalidFieldError("sampling.max_tokens", f"must be at least 1, not {sampling.max_tokens}")
    if sampling.HasField("n") and sampling.n != 1:
        raise InvalidFieldError("sampling.n", f"only 1 is served, not {sampling.n}", limit=1)
    if sampling.HasField("top_k") and sampling.top_k < 1:
        raise InvalidFieldError("sampling.top_k", "must be at least 1")
    if sampling.HasField("logprobs") and sampling.logprobs > MAX_LOGPROBS:
        raise InvalidFieldError("sampling.logprobs", f"at most {MAX_LOGPROBS}, not {sampling.logprobs}")
    _check_range(sampling, "temperature", 0, MAX_TEMPERATURE)
    _check_range(sampling, "top_p", 0, 1, is_open_below=True)
    _check_range(sampling, "repetition_penalty", 0, MAX_PENALTY, is_open_below=True)
    _check_range(sampling, "presence_penalty", -MAX_PENALTY, MAX_PENALTY)
    _check_range(sampling, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
    _check_stops(sampling)
    _check_guide(sampling)


def _check_stops(sampling: sampling_pb2.SamplingParams) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidFieldError(
            "sampling.stop", f"at most {MAX_STOP_STRINGS} strings, not {len(sampling.stop)}"
        )
    for place, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidFieldError(
                f"sampling.stop[{place}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}"
            )
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidFieldError(
            "sampling.stop_token_ids", f"at most {MAX_STOP_TOKENS}, not {len(sampling.stop_token_ids)}"
        )


def _check_guide(sampling: sampling_pb2.SamplingParams) -> None:
    if len(sampling.lora) > MAX_LORA_CHARACTERS:
        raise InvalidFieldError("sampling.lora", f"at most {MAX_LORA_CHARACTERS} characters")
    if not sampling.HasField("guided"):
        return
    kind = sampling.guided.WhichOneof("guide")
    if kind is None:
        raise InvalidFieldError("sampling.guided", "one of json_schema, json, regex, grammar is required")
    guide = getattr(sampling.guided, kind)
    if not guide:
        raise InvalidFieldError(f"sampling.guided.{kind}", "must not be empty or false")
    if kind != "json" and len(guide) > MAX_GUIDE_CHARACTERS:
        raise InvalidFieldError(f"sampling.guided.{kind}", f"at most {MAX_GUIDE_CHARACTERS} characters")


def _check_stop_tokens(ids: Sequence[int], vocab_size: int) -> None:
    for place, token in enumerate(ids):
        if token >= vocab_size:
            raise InvalidFieldError(
                f"sampling.stop_token_ids[{place}]",
                f"{token} is not below the vocabulary's size {vocab_size}",
                limit=vocab_size,
            )


def _check_range(
    sampling: sampling_pb2.SamplingParams, field: str, low: float, high: float, *, is_open_below: bool = False
) -> None:
    if not sampling.HasField(field):  # type: ignore[arg-type]
        return
    value: float = getattr(sampling, field)
    is_in = (low < value if is_open_below else low <= value) and value <= high
    if not math.isfinite(value) or not is_in:
        bounds = f"above {low:g} and up to {high:g}" if is_open_below else f"{low:g} to {high:g}"
        raise InvalidFieldError(
            f"sampling.{field}", f"must be {bounds}, not {value:g}", limit=bounds, actual=value
        )
