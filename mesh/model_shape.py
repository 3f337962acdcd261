"""What a model's memory depends on: layers, heads, widths. From config.json, from GGUF, or known by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.errors import InvalidFieldError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FIELD = "source"
CONFIG = "config.json"
CONFIG_LIMIT_BYTES = 4 << 20
_UNGATED = frozenset({"gpt_neox", "phi", "starcoder2"})
"""Families whose MLP has two matrices; all others have a gate as well."""

_TIED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Families whose output matrix is the embedding unless their configuration says otherwise."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. Widths count numbers, not bytes.

    Attributes:
        hidden: Width between layers.
        intermediate: Width inside an MLP; of one expert, if there are experts.
        heads, kv_heads: Of attention, for queries and for keys and values.
        head_size: Width of one head.
        vocab: Tokens.
        context_length: Longest sequence, in tokens.
        is_tied: Whether the output matrix is the embedding.
        is_gated: Whether an MLP has three matrices instead of two.
        experts: MLPs of a layer beside each other.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    context_length: int
    is_tied: bool = False
    is_gated: bool = True
    experts: int = 1

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_size

    @property
    def matrix_parameters(self) -> int:
        """Weights in the matrices of all layers."""
        attention = 2 * self.hidden * (self.attention_width + self.kv_width)
        mlp = (3 if self.is_gated else 2) * self.hidden * self.intermediate * self.experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (attention + mlp + router)

    @property
    def matrix_rows(self) -> int:
        """Outputs of the matrices of all layers: what a scale per channel is counted by."""
        attention = self.attention_width + 2 * self.kv_width + self.hidden
        mlp = ((2 if self.is_gated else 1) * self.intermediate + self.hidden) * self.experts
        return self.layers * (attention + mlp)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding."""
        return self.vocab * self.hidden

    @property
    def output_parameters(self) -> int:
        """Weights of the output matrix; 0 if it is the embedding."""
        return 0 if self.is_tied else self.embedding_parameters

    @property
    def norm_parameters(self) -> int:
        """Weights of the norms: two a layer, and one at the end."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; biases are left out, as they are less than a thousandth."""
        embeddings = self.embedding_parameters + self.output_parameters
        return self.matrix_parameters + embeddings + self.norm_parameters


_LLAMA_3_8B = ModelShape(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_size=128,
    vocab=128_256,
    context_length=131_072,
)
KNOWN_SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49_152, 8192, is_tied=True),
    "tinyllama-1.1b": ModelShape(22, 2048, 5632, 32, 4, 64, 32_000, 2048),
    "llama-2-7b": ModelShape(32, 4096, 11_008, 32, 32, 128, 32_000, 4096),
    "llama-3.1-8b": _LLAMA_3_8B,
    "llama-3.1-70b": replace(_LLAMA_3_8B, layers=80, hidden=8192, intermediate=28_672, heads=64),
    "llama-3.3-70b": replace(_LLAMA_3_8B, layers=80, hidden=8192, intermediate=28_672, heads=64),
}
"""From the config.json of each. Names of their variants ("-instruct", "-chat") begin with these."""


def find_shape(source: str, model: str, folders: Iterable[Path] = ()) -> ModelShape:
    """The shape of a model file's model.

    Args:
        source: As in the model file: a path, or a place elsewhere that a known name may be in.
        model: The model's name, asked for a known one last.
        folders: Where a relative path is looked for.

    Raises:
        InvalidFieldError: nothing of this tells, or the model is of a form that is not reckoned with.
        PreconditionError: it is a GGUF file, and the library that reads them is not installed.
    """
    if "://" not in source and source:
        for path in (folder / source for folder in (Path(), *folders)):
            if path.exists():
                return read_shape(path)
    for name in (source.rstrip("/").rpartition("/")[2], model):
        known = [key for key in KNOWN_SHAPES if name.lower().removeprefix("meta-").startswith(key)]
        if known:
            return KNOWN_SHAPES[known[0]]
    raise InvalidFieldError(
        FIELD,
        f"{source or model!r} tells no shape: name a folder with {CONFIG} or a GGUF file on this machine, or "
        f"a model that is known: {', '.join(KNOWN_SHAPES)}",
    )


def read_shape(path: Path) -> ModelShape:
    """The shape of a model on disk: a GGUF file, a folder with one, or a folder with config.json.

    Raises:
        InvalidFieldError, PreconditionError: see find_shape.
    """
    config = path / CONFIG
    if config.exists():
        return shape_from_config(_read_json(config))
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise InvalidFieldError(FIELD, f"{path} has neither {CONFIG} nor exactly one GGUF file")
    return _read_gguf(files[0])


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config.json describes.

    Raises:
        InvalidFieldError: a number is missing, or the model is no plain decoder.
    """
    config = config.get("text_config") or config
    family = str(config.get("model_type", ""))
    for name, meaning in (
        ("kv_lora_rank", "multi-head latent attention"),
        ("is_encoder_decoder", "an encoder"),
        ("state_size", "state-space layers"),
    ):
        if config.get(name):
            raise InvalidFieldError(FIELD, f"models with {meaning} are not reckoned with ({family or name})")
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    experts = _number(config, "num_local_experts", config.get("num_experts") or 1)
    intermediate = _number(config, "intermediate_size")
    return ModelShape(
        layers=_number(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_number(config, "moe_intermediate_size", intermediate) if experts > 1 else intermediate,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", heads),
        head_size=_number(config, "head_dim", hidden // heads),
        vocab=_number(config, "vocab_size"),
        context_length=_number(config, "max_position_embeddings"),
        is_tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        is_gated=family not in _UNGATED,
        experts=experts,
    )


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise InvalidFieldError(FIELD, f"{CONFIG} has no positive number {name!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        data = stream.read(CONFIG_LIMIT_BYTES + 1)
    try:
        value = json.loads(data)
    except ValueError as error:
        raise InvalidFieldError(FIELD, f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidFieldError(FIELD, f"{path} is not a JSON object")
    return value


def _read_gguf(path: Path) -> ModelShape:
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PreconditionError(
            "NOT_INSTALLED", "enginemesh[local]", "reading GGUF files needs the extra `local`"
        ) from error
    try:
        reader = GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items() if _is_small(name)}
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise InvalidFieldError(FIELD, f"{path} is not a whole GGUF file: {error}") from error
    family = values.get("general.architecture")
    tensors = {tensor.name: tensor.shape for tensor in reader.tensors}
    numbers = {name.removeprefix(f"{family}."): value for name, value in values.items()}
    hidden, heads = _number(numbers, "embedding_length"), _number(numbers, "attention.head_count")
    return ModelShape(
        layers=_number(numbers, "block_count"),
        hidden=hidden,
        intermediate=_number(numbers, "feed_forward_length"),
        heads=heads,
        kv_heads=_number(numbers, "attention.head_count_kv", heads),
        head_size=_number(numbers, "attention.key_length", hidden // heads),
        vocab=int(tensors["token_embd.weight"][-1]),
        context_length=_number(numbers, "context_length"),
        is_tied="output.weight" not in tensors,
        is_gated=any(".ffn_gate" in name for name in tensors),
        experts=_number(numbers, "expert_count", 1),
    )


def _is_small(name: str) -> bool:
    """Whether metadata is a number or a word, and no list of all tokens."""
    return not name.startswith(("tokenizer.", "GGUF."))
