"""`enginemesh gc`."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import JsonOption, local_settings
from cli.store_access import open_store, with_redis
from cli.tables import DIGEST_LENGTH, size

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from mesh.engine_store import EngineRecord
    from mesh.garbage import Garbage

_AGE = re.compile(r"(\d{1,6})(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def _age(text: str) -> timedelta:
    found = _AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"must look like 90s, 30m, 24h or 7d, not {text!r}")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def gc(
    keep: Annotated[int, typer.Option(min=0, help="Engines of each model, kind and target to keep.")] = 3,
    min_age: Annotated[
        timedelta, typer.Option(parser=_age, metavar="AGE", help="Remove nothing younger.")
    ] = "24h",  # type: ignore[assignment]  # typer parses it
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old engines, and blobs that no engine needs; what is in use stays.

    Safe beside builds, imports and other runs.
    """
    from mesh.engine_removal import EngineRemover  # noqa: PLC0415 - see cli/store_access.py
    from mesh.garbage import GarbageCollector, Retention  # noqa: PLC0415 - likewise

    settings = local_settings()
    store = open_store(settings)

    async def run(redis: Redis) -> Garbage:
        remover = EngineRemover(store, redis, settings.lease_ttl_s)
        collector = GarbageCollector(remover, Retention(keep, min_age))
        return await (collector.find() if dry_run else collector.collect())

    garbage = with_redis(settings, run)
    if as_json:
        print(json.dumps(_to_json(garbage), indent=2))
        return
    verb = "would remove" if dry_run else "removed"
    for record in garbage.engines.removed:
        print(f"{verb} engine {_describe(record)}")
    for record, why in garbage.engines.kept:
        print(f"kept engine {_describe(record)}: {why}")
    print(
        f"{verb} {len(garbage.engines.removed)} engines, {len(garbage.blobs)} blobs with "
        f"{size(sum(garbage.blobs.values()))}, {len(garbage.leftovers)} leftovers"
    )


def _describe(record: EngineRecord) -> str:
    manifest = record.manifest
    return f"{record.digest[:DIGEST_LENGTH]} ({manifest.model}, {manifest.kind}, {manifest.target.key})"


def _to_json(garbage: Garbage) -> dict[str, Any]:
    return {
        "engines": [record.digest for record in garbage.engines.removed],
        "kept": {record.digest: why for record, why in garbage.engines.kept},
        "blobs": garbage.blobs,
        "bytes": sum(garbage.blobs.values()),
        "leftovers": garbage.leftovers,
    }
