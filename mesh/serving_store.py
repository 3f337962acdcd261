"""How each model is served: the store's record of what model files say under `serving`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from mesh.errors import NotFoundError, PreconditionError
from mesh.manifest import MODEL_NAME, canonical_json
from mesh.model_fields import ServingSettings
from mesh.store_layout import SERVING, serving_key

if TYPE_CHECKING:
    from mesh.object_store import ObjectStore

RECORD_LIMIT_BYTES = 64 << 10

_log = structlog.get_logger()


class ServingStore:
    """One object per model. Synchronous and thread-safe, with the errors of ObjectStore."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def put(self, model: str, settings: ServingSettings) -> None:
        """Keeps a model's settings in place of those it had."""
        self._objects.put_bytes(serving_key(model), encode(settings))

    def all(self) -> dict[str, ServingSettings]:
        """The settings of every model that has some. Records that cannot be read are left out."""
        found = {}
        for entry in self._objects.list(SERVING):
            model = entry.key.removeprefix(SERVING).removesuffix(".json")
            if MODEL_NAME.fullmatch(model):
                settings = self._read(entry.key, model)
                if settings is not None:
                    found[model] = settings
        return found

    def _read(self, key: str, model: str) -> ServingSettings | None:
        try:
            return decode(self._objects.get_bytes(key, RECORD_LIMIT_BYTES), model)
        except (NotFoundError, PreconditionError) as error:
            _log.warning("serving settings left out", model=model, reason=error.message)
            return None


def encode(settings: ServingSettings) -> bytes:
    """A record's bytes: what differs from the default, as canonical JSON."""
    return canonical_json(settings.model_dump(mode="json", exclude_defaults=True))


def decode(data: bytes, model: str) -> ServingSettings | None:
    """The inverse of `encode`; None, with a warning, for what is no such record."""
    try:
        return ServingSettings.model_validate_json(data)
    except ValidationError as error:  # as of another version of the mesh; one record must not hide all
        _log.warning("serving settings left out", model=model, reason=str(error)[:300])
        return None
