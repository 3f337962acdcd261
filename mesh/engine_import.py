"""Makes an engine of a directory that something else built, such as `trtllm-build`.

What a build worker knows of an engine that it made has to be told here, or to be in the directory.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mesh.engine_files import list_files
from mesh.errors import InvalidFieldError
from mesh.manifest import EngineFile, KeyParts, Manifest, canonical_json
from mesh.tokenizer_files import TOKENIZER, describe_tokenizer, read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mesh.target import Target

FOLDER = "FOLDER"
NEEDED_FILES: Mapping[str, tuple[str, ...]] = {
    "fake": ("script.json",),
    "openvino": ("openvino_model.xml", "openvino_model.bin"),
    "tensorrt_llm": ("config.json", "rank0.engine"),
    "vllm": ("checkpoint/config.json", "compile-cache.tar"),
}
"""What an engine of each kind cannot do without."""

TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


_NUMBERS = ("max_batch_size", "max_seq_len", "max_num_tokens")


@dataclass(frozen=True)
class EngineFacts:
    """What is told of an engine. 0 and "" mean: as the directory says.

    Attributes:
        versions: Of the tools that the one who runs it must have, by the names of the manifest.
        tokenizer: Folder with tokenizer.json, if that is not in the engine's.
    """

    model: str
    kind: str
    target: Target
    precision: str = ""
    max_batch_size: int = 0
    max_seq_len: int = 0
    max_num_tokens: int = 0
    chat_template: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    tokenizer: Path | None = None


@contextmanager
def imported(folder: Path, facts: EngineFacts) -> Iterator[tuple[Manifest, Path]]:
    """The engine in `folder`: its manifest, and a folder with exactly its files while the context lasts.

    Raises:
        InvalidFieldError: it is no engine of this kind, or something about it is not known.
    """
    _check_folder(folder, facts)
    with TemporaryDirectory(prefix="enginemesh-import-") as temporary:
        staged = Path(temporary)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                _link(path, staged / path.relative_to(folder))
        if facts.tokenizer is not None:
            for name in TOKENIZER_FILES:
                if (facts.tokenizer / name).is_file():
                    _link(facts.tokenizer / name, staged / name)
        yield _describe(staged, facts), staged


def _describe(folder: Path, facts: EngineFacts) -> Manifest:
    found = _tensorrt_llm_facts(folder) if facts.kind == "tensorrt_llm" else {}
    spec = {
        "imported": True,
        "kind": facts.kind,
        "precision": facts.precision or found.get("precision", ""),
        **{name: _number(name, getattr(facts, name) or found.get(name)) for name in _NUMBERS},
    }
    versions = {**found.get("versions", {}), **facts.versions}
    if not versions:
        raise InvalidFieldError(
            "--version", "is required: an engine runs only with the versions that it was made for"
        )
    files = list_files(folder)
    parts = KeyParts(source=_digest(files), spec=spec, target=facts.target.key, versions=versions)
    tokenizer = describe_tokenizer(facts.tokenizer or folder, "--tokenizer", facts.chat_template)
    try:
        return Manifest(
            model=facts.model,
            kind=facts.kind,
            target=facts.target,
            precision=spec["precision"],
            build_key=parts.key,
            key_parts=parts,
            versions=versions,
            tokenizer=tokenizer,
            capabilities=tuple(sorted(facts.capabilities)),
            options=dict(facts.options),
            files=files,
            **{name: spec[name] for name in _NUMBERS},
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidFieldError(place or FOLDER, first["msg"]) from error


def _check_folder(folder: Path, facts: EngineFacts) -> None:
    if facts.kind not in NEEDED_FILES:
        raise InvalidFieldError("--kind", f"must be one of {', '.join(NEEDED_FILES)}, not {facts.kind!r}")
    missing = [name for name in NEEDED_FILES[facts.kind] if not (folder / name).is_file()]
    if missing:
        raise InvalidFieldError(
            FOLDER, f"{folder} is no engine of kind {facts.kind}: it has no {', '.join(missing)}"
        )


def _tensorrt_llm_facts(folder: Path) -> dict[str, Any]:
    """What `trtllm-build` wrote into config.json beside the engine. It names no GPU."""
    config = read_json_object(folder / "config.json", FOLDER)
    build, model = (_object(config.get(name)) for name in ("build_config", "pretrained_config"))
    quantization = _object(model.get("quantization"))
    found = {name: build[name] for name in _NUMBERS if isinstance(build.get(name), int)}
    precision = str(quantization.get("quant_algo") or model.get("dtype") or "").lower()
    found["precision"] = {"float16": "fp16", "bfloat16": "bf16"}.get(precision, precision)
    if config.get("version"):
        found["versions"] = {"tensorrt_llm": str(config["version"])}
    ranks = _number("world_size", _object(model.get("mapping")).get("world_size", 1))
    missing = [rank for rank in range(ranks) if not (folder / f"rank{rank}.engine").is_file()]
    if missing:
        raise InvalidFieldError(FOLDER, f"{folder} is for {ranks} GPUs, and has no rank{missing[0]}.engine")
    return found


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or value <= 0:
        option = f"--{name.replace('_', '-')}"
        raise InvalidFieldError(option, "is required: the engine's files do not say it")
    return value


def _digest(files: tuple[EngineFile, ...]) -> str:
    return hashlib.sha256(canonical_json([file.model_dump(mode="json") for file in files])).hexdigest()


def _link(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(source.resolve())
