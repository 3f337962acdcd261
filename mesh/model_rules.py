"""Rules between the fields of a model file, and those of its engine kind. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mesh.kinds import KINDS, nearest
from mesh.precisions import PRECISIONS, supported_precisions
from mesh.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mesh.kinds import Kind
    from mesh.model_fields import Speculation
    from mesh.model_file import ModelFile

    Problem = tuple[str, str]
    """Dotted name of the field at fault, and what is wrong with it."""

NEEDS_SOURCE = frozenset({"draft_model", "medusa", "eagle"})
_TARGET_KEY = re.compile(r"sm[0-9]+-")
LOOKS_UP = frozenset({"prompt_lookup", "lookahead"})


def problems(spec: ModelFile) -> Iterator[Problem]:
    """What is wrong with a model file whose single values are all in range; nothing if it is right."""
    kind = KINDS.get(spec.kind)
    if kind is None:
        yield "kind", f"no engine kind {spec.kind!r}; {nearest(spec.kind, KINDS)}there are {', '.join(KINDS)}"
        return
    rules: tuple[Callable[[ModelFile, Kind], Iterable[Problem]], ...] = (
        *(_source, _targets, _precisions, _calibration, _lengths, _parallel),
        *(_speculation, _lora, _options, _serving),
    )
    for rule in rules:
        yield from rule(spec, kind)


def _source(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    if kind.needs_source and not spec.source:
        yield "source", f"is required for kind {kind.name}"


def _targets(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    for at, name in enumerate(spec.targets):
        if name in spec.targets[:at]:
            yield f"targets[{at}]", f"{name} is there twice"
        elif not _TARGET_KEY.match(name):  # a key is of hardware that may have no name; its worker knows it
            for problem in _target_problems(spec, kind, name):
                yield f"targets[{at}]", problem


def _target_problems(spec: ModelFile, kind: Kind, name: str) -> Iterator[str]:
    try:
        target = Target.from_name(name)
    except ValueError as error:
        yield str(error)
        return
    if kind.device not in ("any", target.device_type):
        yield f"{name} is a {target.device_type}, and kind {kind.name} runs on a {kind.device}"
    elif target.device_type == "gpu":
        able = supported_precisions(target.compute_capability)
        for precision in (spec.precision or kind.default_precision, spec.kv_cache_precision):
            if precision in PRECISIONS and precision not in able:
                yield f"{name} does not compute in {precision}; it does in {', '.join(able)}"


def _precisions(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    named = {
        "precision": (spec.precision, kind.precisions, "weights"),
        "kv_cache_precision": (spec.kv_cache_precision, kind.kv_cache_precisions, "a KV cache"),
    }
    if spec.speculation:
        named["speculation.precision"] = (spec.speculation.precision, kind.precisions, "weights")
    for field, (value, known, what) in named.items():
        if value and value not in known:
            yield field, _not_among(value, known, f"kind {kind.name}", what)


def _not_among(value: str, known: Iterable[str], who: str, what: str) -> str:
    names = list(known)
    if not names:
        return f"{who} has no choice of precision for {what}, so not {value!r}"
    return f"{who} has no {value!r} for {what}; {nearest(value, names)}there are {', '.join(names)}"


def _calibration(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    precision = spec.precision or kind.default_precision
    if spec.calibration and precision not in kind.calibrated:
        able = ", ".join(name for name in kind.precisions if name in kind.calibrated) or "none"
        yield (
            "calibration",
            f"precision {precision} of kind {kind.name} is made without; with calibration: {able}",
        )


def _lengths(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    if spec.max_seq_len and spec.max_input_len > spec.max_seq_len:
        yield "max_input_len", f"{spec.max_input_len} is over max_seq_len, {spec.max_seq_len}"
    if kind.steps_need_room and spec.max_num_tokens and spec.max_batch_size > spec.max_num_tokens:
        few = f"{spec.max_num_tokens} is less than max_batch_size, {spec.max_batch_size}"
        yield "max_num_tokens", f"{few}: a step takes a token of each sequence"


def _parallel(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    for field, limit in (
        ("tensor_parallel", kind.max_tensor_parallel),
        ("pipeline_parallel", kind.max_pipeline_parallel),
    ):
        if getattr(spec, field) > limit:
            yield field, f"kind {kind.name} takes {limit} at most, not {getattr(spec, field)}"


def _speculation(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    if spec.speculation is None:
        return
    method = spec.speculation.method
    if method not in kind.speculation:
        able = f"only {', '.join(kind.speculation)}" if kind.speculation else "nor any other method"
        yield "speculation.method", f"kind {kind.name} cannot do {method}, {able}"
    yield from _fields_of_method(spec.speculation)


def _fields_of_method(speculation: Speculation) -> Iterator[Problem]:
    method = speculation.method
    if method in NEEDS_SOURCE and not speculation.source:
        yield "speculation.source", f"is required for {method}"
    has_no = {
        "source": method not in NEEDS_SOURCE,
        "precision": method not in NEEDS_SOURCE,
        "tokens": method == "lookahead",
        "ngram_size": method not in LOOKS_UP,
    }
    for field, is_refused in has_no.items():
        if is_refused and getattr(speculation, field):
            yield f"speculation.{field}", f"{method} has no such field"


def _lora(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    if len(spec.lora) > kind.max_lora:
        yield (
            f"lora[{kind.max_lora}]",
            f"kind {kind.name} takes {kind.max_lora} at most, not {len(spec.lora)}",
        )
    names = [adapter.name for adapter in spec.lora]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield f"lora[{at}].name", f"{name} is there twice"


def _options(spec: ModelFile, kind: Kind) -> Iterator[Problem]:
    for name, text in spec.options.items():
        if name not in kind.options:
            known = ", ".join(kind.options)
            yield (
                f"options.{name}",
                f"kind {kind.name} has no such option; {nearest(name, kind.options)}there are {known}",
            )
            continue
        try:
            kind.options[name].value(text)
        except ValueError as error:
            yield f"options.{name}", str(error)


def _serving(spec: ModelFile, _: Kind) -> Iterator[Problem]:
    serving = spec.serving
    if serving and serving.max_workers and serving.min_workers > serving.max_workers:
        yield "serving.min_workers", f"{serving.min_workers} is over max_workers, {serving.max_workers}"
