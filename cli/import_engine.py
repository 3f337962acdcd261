"""`enginemesh import`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import TYPE_CHECKING, Annotated

import typer

from cli.failures import EXIT_REFUSED, CommandError
from cli.options import local_settings
from cli.store_access import with_redis
from cli.tables import DIGEST_LENGTH
from cli.transfer_bar import transfer_bar
from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from mesh.engine_import import EngineFacts
    from mesh.engine_store import EngineStore
    from mesh.manifest import Manifest
    from mesh.settings import ClientSettings
    from mesh.target import Target

THIS_HOST = "this"


def import_engine(  # noqa: PLR0917 - typer makes an option of each
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The engine.")],
    model: Annotated[str, typer.Option(help="Model that clients ask for.")] = "",
    kind: Annotated[str, typer.Option(help="Who runs it: openvino, tensorrt_llm, vllm, fake.")] = "",
    target: Annotated[
        str, typer.Option(help="What it was compiled for: a name of `enginemesh targets`, or this (host).")
    ] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder with tokenizer.json, if not in FOLDER.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File with a chat template in place of its own.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Weight precision, such as int8.")] = "",
    max_batch_size: Annotated[int, typer.Option(min=0, help="Sequences in flight at most.")] = 0,
    max_seq_len: Annotated[int, typer.Option(min=0, help="Tokens of a sequence at most.")] = 0,
    max_num_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a step at most.")] = 0,
    version: Annotated[
        list[str] | None, typer.Option(metavar="TOOL=VERSION", help="What its runner must have; repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For its runner; repeatable.")
    ] = None,
    capability: Annotated[
        list[str] | None, typer.Option(help="What it can do, such as logprobs; repeatable.")
    ] = None,
) -> None:
    """Publish an engine that something else built, or that `export` wrote, signed with the key that is set.

    For an exported engine nothing else is to be given. Of a TensorRT-LLM engine most is in its config.json.
    """
    from mesh.engine_copy import is_exported  # noqa: PLC0415 - see cli/store_access.py
    from mesh.engine_import import EngineFacts  # noqa: PLC0415 - likewise

    if is_exported(folder):
        if model or kind or target:
            raise CommandError("an exported engine says itself what it is: give no options", EXIT_REFUSED)
        _import_exported(folder)
        return
    facts = EngineFacts(
        model=_required("--model", model),
        kind=_required("--kind", kind),
        target=_target(_required("--target", target), kind),
        precision=precision,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        chat_template=chat_template.read_text() if chat_template else "",
        versions=_pairs("--version", version),
        options=_pairs("--option", option),
        capabilities=tuple(capability or ()),
        tokenizer=tokenizer,
    )
    _import_folder(folder, facts)


def _import_folder(folder: Path, facts: EngineFacts) -> None:
    from mesh.engine_import import imported  # noqa: PLC0415 - see cli/store_access.py

    settings, store = _publisher()
    with imported(folder, facts) as (manifest, files):
        _publish(settings, store, manifest, files)


def _import_exported(folder: Path) -> None:
    from mesh.engine_copy import ENGINE_FOLDER, add_signatures, read_exported  # noqa: PLC0415 - likewise

    settings, store = _publisher()
    manifest, signatures = read_exported(folder)
    add_signatures(store, manifest, signatures)
    _publish(settings, store, manifest, folder / ENGINE_FOLDER)


def _publisher() -> tuple[ClientSettings, EngineStore]:
    from mesh.engine_store import EngineStore  # noqa: PLC0415 - see cli/store_access.py

    settings = local_settings()
    return settings, EngineStore.of_publisher(settings)


def _publish(settings: ClientSettings, store: EngineStore, manifest: Manifest, files: Path) -> None:
    from mesh.bus.index import EngineIndex  # noqa: PLC0415 - see cli/store_access.py

    with transfer_bar(manifest.size) as show:
        try:
            store.publish(manifest, files, lambda done, _total: show(done))
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}") from error
    record = store.record(manifest.digest)
    with_redis(settings, lambda redis: EngineIndex(redis).add(record))
    print(
        f"engine {manifest.digest[:DIGEST_LENGTH]} of model {manifest.model} for {manifest.target.key} "
        "is published"
    )


def _target(name: str, kind: str) -> Target:
    from mesh.hardware import detect_target  # noqa: PLC0415 - see cli/store_access.py
    from mesh.target import Target  # noqa: PLC0415 - likewise

    if name == THIS_HOST:
        return detect_target([kind])
    try:
        return Target.from_name(name)
    except ValueError as error:
        raise InvalidFieldError("--target", str(error)) from error


def _required(name: str, value: str) -> str:
    if not value:
        raise InvalidFieldError(name, "is required")
    return value


def _pairs(name: str, texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise InvalidFieldError(name, f"must look like NAME=VALUE, not {text!r}")
        pairs[key] = value
    return pairs
