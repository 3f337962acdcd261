"""The logs of builds in the store: what the tools said, of each build and with each engine that one made.

logs/builds/<build id>.log     kept as long as the build's operation is shown
logs/engines/<engine>.log      kept with the engine
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from mesh.build_operation import COLLECTION
from mesh.errors import InvalidFieldError, NotFoundError
from mesh.store_layout import BUILD_LOGS, build_log_key, engine_log_key

if TYPE_CHECKING:
    from mesh.object_store import ObjectStore

READ_LIMIT_BYTES = 9 << 20
"""Above what a worker may be told to keep."""

_NAME = re.compile(rf"({COLLECTION}|engines)/([0-9a-zA-Z_-]{{1,128}})")


class BuildLogs:
    """Reads and writes logs. Synchronous and thread-safe, with the errors of ObjectStore."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def read(self, name: str) -> str:
        """The log of "operations/<build id>" or "engines/<digest>".

        Raises:
            InvalidFieldError: the name is neither.
            NotFoundError: no log is kept for it.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidFieldError(
                "name", f"must look like {COLLECTION}/<build id> or engines/<digest>, not {name!r}"
            )
        key = build_log_key(match[2]) if match[1] == COLLECTION else engine_log_key(match[2])
        try:
            return self._objects.get_bytes(key, READ_LIMIT_BYTES).decode(errors="replace")
        except NotFoundError:
            raise NotFoundError("log", name, f"no log of {name} is kept") from None

    def write(self, build_id: str, data: bytes, engine: str = "") -> None:
        """Stores the log of a build, also with the engine of this digest if one is given."""
        self._objects.put_bytes(build_log_key(build_id), data)
        if engine:
            self._objects.put_bytes(engine_log_key(engine), data)

    def delete(self, build_id: str) -> None:
        """Removes the log of a build; that of its engine stays."""
        self._objects.delete(build_log_key(build_id))

    def delete_older(self, age: timedelta) -> int:
        """Removes the logs of builds that were last written so long ago; returns how many."""
        limit = datetime.now(timezone.utc) - age
        old = [entry.key for entry in self._objects.list(BUILD_LOGS) if entry.last_modified < limit]
        for key in old:
            self._objects.delete(key)
        return len(old)
