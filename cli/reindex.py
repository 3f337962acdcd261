"""`enginemesh reindex`."""

from __future__ import annotations

from cli.options import local_settings
from cli.store_access import open_store, with_redis
from cli.tables import DIGEST_LENGTH


def reindex() -> None:
    """Make the index in Redis anew from the store. Harmless at any time."""
    from mesh.bus.index import EngineIndex, rebuild_index  # noqa: PLC0415 - see cli/store_access.py

    settings = local_settings()
    store = open_store(settings)
    rebuilt = with_redis(settings, lambda redis: rebuild_index(store, EngineIndex(redis)))
    for record in rebuilt.added:
        print(f"added {record.digest[:DIGEST_LENGTH]} of model {record.manifest.model}")
    for record in rebuilt.forgotten:
        print(f"forgot {record.digest[:DIGEST_LENGTH]} of model {record.manifest.model}: not in the store")
    print(f"{rebuilt.engines} engines in the store and in the index")
