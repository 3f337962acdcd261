"""The key that signs the engines of a mesh on this machine; all its processes trust it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.settings import ClientSettings

KEYS_FOLDER = "keys"
KEY_NAME = "local"


def local_keys(settings: ClientSettings) -> dict[str, str]:
    """Environment that names the keys of a mesh: those in the settings, else its own.

    Its own key is made at the first start and kept in the data folder. Further public keys (*.pub) that are
    put beside it are trusted too.
    """
    folder = settings.data_dir / KEYS_FOLDER
    if settings.signing_key is None:
        _make_once(folder / KEY_NAME)
    folder.mkdir(exist_ok=True)
    # The processes run in another folder than this one.
    return {
        "ENGINEMESH_SIGNING_KEY": str((settings.signing_key or folder / KEY_NAME).resolve()),
        "ENGINEMESH_TRUSTED_KEYS": str((settings.trusted_keys or folder).resolve()),
    }


def _make_once(path: Path) -> None:
    from mesh.signing import PUBLIC_KEY_SUFFIX, SigningKey  # noqa: PLC0415 - see cli/store_access.py

    if not path.exists():
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.with_name(path.name + PUBLIC_KEY_SUFFIX).unlink(missing_ok=True)
        SigningKey.generate().save(path)
