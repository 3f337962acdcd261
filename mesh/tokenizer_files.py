"""Reads what a manifest says of a tokenizer from a folder that is laid out as on the Hugging Face hub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mesh.errors import InvalidFieldError
from mesh.manifest import TokenizerInfo

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER = "tokenizer.json"
JSON_LIMIT_BYTES = 64 << 20


def read_json_object(path: Path, field: str) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file.

    Raises:
        InvalidFieldError: it is no JSON object, or too large; blames `field`.
    """
    if not path.exists():
        return {}
    if path.stat().st_size > JSON_LIMIT_BYTES:
        raise InvalidFieldError(field, f"{path.name} has more than {JSON_LIMIT_BYTES} bytes")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidFieldError(field, f"{path.name} is not JSON") from error
    if not isinstance(content, dict):
        raise InvalidFieldError(field, f"{path.name} is not a JSON object")
    return content


def describe_tokenizer(folder: Path, field: str, chat_template: str = "") -> TokenizerInfo:
    """What tokenizer.json, tokenizer_config.json, generation_config.json and config.json say.

    Args:
        folder: Where they are; only the first must be there.
        field: What errors blame.
        chat_template: Takes the place of the folder's own, unless empty.

    Raises:
        InvalidFieldError: there is no tokenizer.json, or no end-of-sequence token is named.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - most of mesh's users need none

    if not (folder / TOKENIZER).exists():
        raise InvalidFieldError(field, f"the folder has no {TOKENIZER}")
    config = read_json_object(folder / "tokenizer_config.json", field)
    generation = read_json_object(folder / "generation_config.json", field)
    model = read_json_object(folder / "config.json", field)
    eos = generation.get("eos_token_id", model.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [eos] if isinstance(eos, int) else []
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises bare ones
        raise InvalidFieldError(field, f"{TOKENIZER} cannot be read: {error}") from error
    eos_token = _text(config.get("eos_token"))
    if eos is None and (found := tokenizer.token_to_id(eos_token)) is not None:
        eos_ids = [found]
    if not eos_ids:
        raise InvalidFieldError(field, "the folder names no eos_token_id")
    return TokenizerInfo(
        chat_template=chat_template or _own_template(folder, config),
        bos_token=_text(config.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=tuple(eos_ids),
        vocab_size=tokenizer.get_vocab_size(),
    )


def _own_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    template = file.read_text() if file.exists() else config.get("chat_template")
    return template if isinstance(template, str) else ""


def _text(token: object) -> str:
    """A special token, which stands there as text or as an object with its text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
