"""`enginemesh plan`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.failures import EXIT_FAILED
from cli.options import JsonOption  # noqa: TC001 - likewise
from cli.tables import print_table, size
from mesh.errors import InvalidFieldError
from mesh.gpus import target_names
from mesh.kinds import KINDS
from mesh.model_file import ModelFile
from mesh.model_shape import find_shape
from mesh.plan import make_plan
from mesh.settings import BuildWorkerSettings
from mesh.target import Target, detect_cpu

if TYPE_CHECKING:
    from mesh.model_shape import ModelShape
    from mesh.plan import Plan

COLUMNS = (
    *("TARGET", "MEMORY>", "FITS", "WEIGHTS>", "STEP>", "KV CACHE>", "TOKENS>", "SEQUENCES>"),
    *("BATCH>", "STEP TOKENS>"),
)
DEFAULT_NETWORK_GBIT = 10.0
_BYTES_PER_GBIT = 125_000_000


def plan(
    file: Annotated[Path, typer.Argument(help="Model file.", exists=True, dir_okay=False)],
    gpu: Annotated[
        str,
        typer.Option(help="A target, or the beginning of several, such as h100; else all that are known."),
    ] = "",
    length: Annotated[
        int, typer.Option(min=0, help="Tokens of a usual sequence, prompt and answer; 0: the longest.")
    ] = 0,
    network_gbit: Annotated[
        float, typer.Option(min=0.001, help="Speed of the network that engines come over, in Gbit/s.")
    ] = DEFAULT_NETWORK_GBIT,
    as_json: JsonOption = False,
) -> None:
    """Reckon whether a model fits a device, and how many sequences run at once; nothing is built or fetched.

    Kinds that run on CPUs are planned for this host. Ends with status 1 if it fits nowhere.
    """
    spec = ModelFile.load(file)
    shape = find_shape(spec.source, spec.model, [file.parent, *BuildWorkerSettings().source_root_list])
    bytes_per_s = network_gbit * _BYTES_PER_GBIT
    plans = [make_plan(spec, shape, target, bytes_per_s, length) for target in _targets(spec, gpu)]
    if as_json:
        print(json.dumps([_numbers(each, shape) for each in plans], indent=2))
    elif len(plans) == 1:
        _print_one(plans[0], shape)
    else:
        _print_all(plans, shape)
    if not any(each.fits for each in plans):
        raise typer.Exit(EXIT_FAILED)


def _targets(spec: ModelFile, gpu: str) -> list[Target]:
    if KINDS[spec.kind].device == "cpu":
        if gpu:
            raise InvalidFieldError(
                "--gpu", f"kind {spec.kind} runs on CPUs; without --gpu it is this host's"
            )
        return [detect_cpu()]
    known = target_names()
    wanted = gpu.lower()
    names = [wanted] if wanted in known else [name for name in known if name.startswith(wanted)]
    if not names:
        raise InvalidFieldError("--gpu", f"none is named {gpu!r}; `enginemesh targets` lists them")
    return [Target.from_name(name) for name in names]


def _numbers(each: Plan, shape: ModelShape) -> dict[str, Any]:
    return {**dataclasses.asdict(each), "fits": each.fits, "parameters": shape.parameters}


def _print_all(plans: list[Plan], shape: ModelShape) -> None:
    first = plans[0]
    print(f"{_model(first, shape)}; sequences of {first.sequence_length} tokens\n")
    print_table(COLUMNS, map(_row, plans), "no target")


def _row(each: Plan) -> tuple[str, ...]:
    if each.problem:
        return (each.target, size(each.memory_bytes), each.problem, *[""] * (len(COLUMNS) - 3))
    return (
        each.target,
        size(each.memory_bytes),
        "yes",
        size(each.weight_bytes_per_gpu),
        size(each.activation_bytes),
        size(each.kv_cache_bytes),
        str(each.kv_cache_tokens),
        str(each.sequences),
        str(each.suggested_max_batch_size),
        str(each.suggested_max_num_tokens),
    )


def _model(each: Plan, shape: ModelShape) -> str:
    parts = (
        f"{shape.parameters / 1e9:.2f} billion parameters",
        f"weights {size(each.weight_bytes)} in {each.precision}",
        f"KV cache {size(each.kv_bytes_per_token)} a token",
        f"engine {size(each.engine_bytes)}, {each.fetch_s:.1f} s to fetch",
        *([f"on {each.gpus} GPUs, of which what follows is one"] if each.gpus > 1 else []),
    )
    return "; ".join(parts)


def _print_one(each: Plan, shape: ModelShape) -> None:
    print(f"{each.target}: {each.problem or 'fits'}\n")
    rows = (
        ("parameters", f"{shape.parameters:,}"),
        (
            "memory",
            f"{size(each.memory_bytes)}, {each.gpus} of it" if each.gpus > 1 else size(each.memory_bytes),
        ),
        (f"weights ({each.precision})", f"{size(each.weight_bytes_per_gpu)} of {size(each.weight_bytes)}"),
        ("driver, context, libraries", size(each.reserved_bytes)),
        (f"a step of {each.max_num_tokens} tokens", size(each.activation_bytes)),
        (
            f"KV cache ({each.kv_cache_precision})",
            f"{size(each.kv_cache_bytes)}, {each.kv_cache_tokens} tokens",
        ),
        ("KV cache of a token", f"{each.kv_bytes_per_token_per_gpu} B of {each.kv_bytes_per_token} B"),
        (f"sequences of {each.max_seq_len} tokens", str(each.full_sequences)),
        (f"sequences of {each.sequence_length} tokens", str(each.sequences)),
        ("suggested max_batch_size", str(each.suggested_max_batch_size)),
        ("suggested max_num_tokens", str(each.suggested_max_num_tokens)),
        ("engine", f"{size(each.engine_bytes)}, {each.fetch_s:.1f} s to fetch"),
    )
    print_table(("PER DEVICE", ""), dict(rows).items(), "")
