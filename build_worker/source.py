"""Where source models come from: a folder of this host, a bucket, a hub. And the digest of what came."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mesh.errors import ExhaustedError, InvalidFieldError, NotFoundError, UnavailableError
from mesh.manifest import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.object_store import ObjectInfo, ObjectStore
    from mesh.settings import BuildWorkerSettings

    OnFraction = Callable[[float], None]

FIELD = "spec.source"
FILES_LIMIT = 10_000
HASH_BYTES = 1 << 20
HUB_RETRY_S = 60.0

# Never a format that runs code when it is read, such as the pickles in pytorch_model.bin.
_HUB_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "*.txt", "openvino_*.xml", "openvino_*.bin")


def fetch(source: str, settings: BuildWorkerSettings, folder: Path, on_fraction: OnFraction) -> Path:
    """Makes a source model readable on this host; returns its file or folder.

    Args:
        source: As in enginemesh.v1.ModelSpec. Empty: an empty folder is returned.
        settings: Which folders may be read, and how to reach the store.
        folder: An empty folder for what must be downloaded.
        on_fraction: Told how much of a download is done, 0 to 1.

    Raises:
        InvalidFieldError: there is no such source, or it may not be read.
        UnavailableError: store or hub cannot be reached.
        ExhaustedError: it does not fit this disk.
    """
    if not source:
        return folder
    scheme, separator, rest = source.partition("://")
    if not separator:
        return _local(source, settings.source_root_list)
    if scheme == "s3":
        return _from_bucket(rest, settings, folder, on_fraction)
    if scheme == "hf":
        return _from_hub(rest, folder)
    raise InvalidFieldError(FIELD, f"must be a path, s3://bucket/prefix or hf://owner/name, not {source!r}")


def digest(path: Path, roots: Sequence[Path], on_fraction: OnFraction) -> str:
    """The sha256 of a model's files and of their places in its folder.

    Every byte is read: sizes and times would not show each change. Names that start with a dot don't count.

    Args:
        path: File or folder.
        roots: Folders that links inside may lead to, beside `path` itself.
        on_fraction: Told how much is read, 0 to 1.

    Raises:
        InvalidFieldError: a link leads elsewhere, or there are too many files.
    """
    files = {"": path} if path.is_file() else _files(path, [path.resolve(), *roots])
    total = sum(file.stat().st_size for file in files.values())
    done = 0
    digests = {}
    for name, file in files.items():
        sha256 = hashlib.sha256()
        with file.open("rb") as stream:
            while data := stream.read(HASH_BYTES):
                sha256.update(data)
                done += len(data)
                on_fraction(done / total)
        digests[name] = sha256.hexdigest()
    return hashlib.sha256(canonical_json(digests)).hexdigest()


def _local(source: str, roots: list[Path]) -> Path:
    """The path that a source names, with all links followed; it must lie in one of the allowed folders."""
    candidates = [Path(source)] if Path(source).is_absolute() else [root / source for root in roots]
    for candidate in candidates:
        try:
            resolved = candidate.resolve()
            is_there = resolved.exists()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, or links in a circle
            continue
        if is_there and any(resolved.is_relative_to(root) for root in roots):
            return resolved
    # One answer for what is not there and for what may not be read: nothing is told of other folders.
    raise InvalidFieldError(
        FIELD,
        f"{source!r} is not in a folder that this build worker may read (ENGINEMESH_SOURCE_ROOTS); "
        f"it has {len(roots)}",
    )


def _files(folder: Path, roots: list[Path]) -> dict[str, Path]:
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise InvalidFieldError(FIELD, f"{name} is a link to a place that may not be read")
        files[name.as_posix()] = path
        if len(files) > FILES_LIMIT:
            raise InvalidFieldError(FIELD, f"the folder has more than {FILES_LIMIT} files")
    return files


def _from_bucket(place: str, settings: BuildWorkerSettings, folder: Path, on_fraction: OnFraction) -> Path:
    from mesh.object_store import ObjectStore  # noqa: PLC0415 - half of this process's time to start

    bucket, _, prefix = place.partition("/")
    if not bucket or not prefix:
        raise InvalidFieldError(FIELD, f"must look like s3://bucket/prefix, not 's3://{place}'")
    store = ObjectStore.from_settings(settings.model_copy(update={"s3_bucket": bucket}), create_bucket=False)
    objects = _objects(store, prefix)
    if not objects:
        raise InvalidFieldError(FIELD, f"there is nothing at s3://{place}")
    if len(objects) > FILES_LIMIT:
        raise InvalidFieldError(FIELD, f"there are more than {FILES_LIMIT} objects at s3://{place}")
    _require_room(objects, folder)
    total = sum(entry.size for entry in objects)
    done = 0
    for entry in objects:
        path = folder / _relative(entry.key, prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(entry.key, path)
        done += entry.size
        on_fraction(done / total if total else 1.0)
    is_one_object = [entry.key for entry in objects] == [prefix]
    return folder / _relative(prefix, prefix) if is_one_object else folder


def _objects(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    try:
        found = list(store.list(prefix))
    except NotFoundError:  # no such bucket
        return []
    return [entry for entry in found if _is_below(entry.key, prefix) and not entry.key.endswith("/")]


def _is_below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(prefix if prefix.endswith("/") else f"{prefix}/")


def _relative(key: str, prefix: str) -> PurePosixPath:
    """Where an object goes in the download folder; never outside of it."""
    path = PurePosixPath(PurePosixPath(key).name if key == prefix else key[len(prefix) :].lstrip("/"))
    if ".." in path.parts or path.is_absolute() or not path.parts:
        raise InvalidFieldError(FIELD, f"object {key!r} has a name that is no path")
    return path


def _require_room(objects: list[ObjectInfo], folder: Path) -> None:
    needed = sum(entry.size for entry in objects)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExhaustedError(
            f"the source has {needed} bytes, and the build worker's disk has {free} left",
            HUB_RETRY_S,
            needed=needed,
            free=free,
        )


def _from_hub(place: str, folder: Path) -> Path:
    """Downloads `owner/name[@revision][/file]` from the hub that the environment names."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, and seldom needed
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    repository, file = _split_hub_place(place)
    name, _, revision = repository.partition("@")
    try:
        snapshot_download(
            name,
            revision=revision or None,
            local_dir=folder,
            allow_patterns=[file] if file else list(_HUB_PATTERNS),
        )
    except HFValidationError as error:
        raise InvalidFieldError(FIELD, f"no hub id: {place!r}") from error
    except (HfHubHTTPError, OSError) as error:  # the library's other errors are OSErrors
        raise UnavailableError(
            f"spec.source: hf://{place} cannot be fetched ({type(error).__name__}); is the hub reachable "
            "from the build worker, the id right, and HF_TOKEN set if the model asks for it?",
            HUB_RETRY_S,
        ) from error
    if not file:
        return folder
    if not (folder / file).is_file():
        raise InvalidFieldError(FIELD, f"{name} has no file {file!r}")
    return folder / file


def _split_hub_place(place: str) -> tuple[str, str]:
    owner, _, rest = place.partition("/")
    name, _, file = rest.partition("/")
    if not owner or not name or ".." in file.split("/"):
        raise InvalidFieldError(FIELD, f"must look like hf://owner/name, not 'hf://{place}'")
    return f"{owner}/{name}", file
