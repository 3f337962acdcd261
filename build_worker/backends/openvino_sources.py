"""Source models of kind `openvino`: each becomes OpenVINO IR in half precision and a tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from build_worker.stages import Stage
from mesh.errors import BuildError, InvalidFieldError, PreconditionError
from mesh.tokenizer_files import TOKENIZER, describe_tokenizer, read_json_object

if TYPE_CHECKING:
    from pathlib import Path

    from build_worker.backends.base import Report
    from mesh.manifest import TokenizerInfo

MODEL = "openvino_model.xml"
_F16_BYTES = 2

# What tokenisers get wrong: spaces, digits, contractions, joined emoji, scripts, and their own specials.
_PROBES = (
    *("Hello world", "  two spaces", "It's 12345 o'clock, isn't it?", "\t\tTab  ends  ", "x" * 40 + " " * 9),
    *("\n\ndef f(x):\n    return x+1", "café 日本語 😀👩‍👩‍👧 emoji", "नमस्ते دنيا ", "e\u0301 “quotes”…"),
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the manifest needs to know of a source model.

    Attributes:
        context_length: Longest sequence, in tokens.
        kv_bytes_per_token: KV cache of all layers in f16, in bytes.
        widths: Inner sizes of the weight matrices; groups of quantised weights must divide them.
    """

    context_length: int
    kv_bytes_per_token: int
    widths: tuple[int, ...]
    tokenizer: TokenizerInfo


class Source(Protocol):
    """A source model."""

    def convert(self, work: Path, output: Path, report: Report) -> Path:
        """Puts tokenizers into `output`; returns a folder with the model's IR."""

    def facts(self, chat_template: str) -> ModelFacts:
        """What it is; `chat_template` replaces its own unless empty."""

    def check_tokenizer(self, output: Path) -> None:
        """Raises BuildError if the tokenizers in `output` disagree."""


def open_source(path: Path) -> Source:
    """The source model at `path`: a GGUF file, a folder with one, or a Hugging Face style folder.

    Raises:
        InvalidFieldError: it is none of these.
    """
    if path.is_file():
        return GgufSource(path)
    if (path / "config.json").exists():
        return FolderSource(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise InvalidFieldError(
            "spec.source", f"the folder has neither config.json nor exactly one GGUF file, but {len(found)}"
        )
    return GgufSource(found[0])


class GgufSource:
    """A GGUF file of an architecture that OpenVINO GenAI reads."""

    ARCHITECTURES = ("llama", "qwen2", "qwen3")

    def __init__(self, path: Path) -> None:
        from build_worker.gguf_model import GgufModel

        self._model = GgufModel(path)
        if self._model.architecture not in self.ARCHITECTURES:
            raise InvalidFieldError(
                "spec.source",
                f"architecture {self._model.architecture!r} is not supported; there are "
                + ", ".join(self.ARCHITECTURES),
            )
        # OpenVINO's reader would leave these out in silence, and long texts would come out wrong.
        scaling = self._model.get(f"{self._model.architecture}.rope.scaling.type", "none")
        if scaling != "none" or self._model.has_tensor("rope_freqs.weight"):
            raise InvalidFieldError("spec.source", "GGUF models with scaled RoPE are not supported")

    def convert(self, work: Path, output: Path, report: Report) -> Path:
        """See Source."""
        import openvino_genai

        from build_worker.gguf_tokenizer import make_tokenizer

        make_tokenizer(self._model).save(str(output / TOKENIZER), pretty=False)
        # OpenVINO rounds the zero points of asymmetric GGUF types, which costs a third of the answers; it
        # reads F16 exactly.
        half = work / "model.gguf"
        self._model.write_half_precision(
            half, lambda fraction: report(Stage.CONVERT, 0.6 * fraction, "reading weights")
        )
        report(Stage.CONVERT, 0.6, "making OpenVINO IR")
        openvino_genai.LLMPipeline(str(half), "CPU", enable_save_ov_model=True)
        half.unlink()
        for part in ("tokenizer", "detokenizer"):
            for suffix in ("xml", "bin"):
                name = f"openvino_{part}.{suffix}"
                shutil.move(work / name, output / name)
        return work

    def facts(self, chat_template: str) -> ModelFacts:
        """See Source."""
        from build_worker.gguf_tokenizer import describe_tokenizer

        model = self._model
        heads = model.shape("attention.head_count")
        hidden = model.shape("embedding_length")
        return ModelFacts(
            context_length=model.shape("context_length", 2048),
            kv_bytes_per_token=_kv_bytes(
                model.shape("block_count"),
                model.shape("attention.head_count_kv", heads),
                model.shape("attention.key_length", hidden // heads),
            ),
            widths=(hidden, model.shape("feed_forward_length")),
            tokenizer=describe_tokenizer(model, chat_template),
        )

    def check_tokenizer(self, output: Path) -> None:
        """See Source. Both were made from the file's vocabulary, by different code."""
        import openvino_genai

        ours = Tokenizer.from_file(str(output / TOKENIZER))
        theirs = openvino_genai.Tokenizer(str(output))
        for text in _PROBES:
            expected = theirs.encode(text).input_ids.data[0].tolist()
            if ours.encode(text).ids != expected:
                raise BuildError(f"the tokenizer made from the GGUF file is wrong for {text!r}")


class FolderSource:
    """A folder as on the Hugging Face hub: config.json, tokenizer.json, and safetensors or OpenVINO IR."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_json_object(path / "config.json", "spec.source")
        if not (path / TOKENIZER).exists():
            raise InvalidFieldError("spec.source", f"the folder has no {TOKENIZER}")

    def convert(self, work: Path, output: Path, report: Report) -> Path:
        """See Source."""
        report(Stage.CONVERT, 0.0, "making OpenVINO IR")
        shutil.copyfile(self._path / TOKENIZER, output / TOKENIZER)
        exported = self._path if (self._path / MODEL).exists() else self._export(work)
        for part in sorted(exported.glob("openvino_*tokenizer.*")):
            shutil.copyfile(part, output / part.name)
        return exported

    def facts(self, chat_template: str) -> ModelFacts:
        """See Source."""
        heads = self._number("num_attention_heads")
        hidden = self._number("hidden_size")
        return ModelFacts(
            context_length=self._number("max_position_embeddings"),
            kv_bytes_per_token=_kv_bytes(
                self._number("num_hidden_layers"),
                self._number("num_key_value_heads", heads),
                self._number("head_dim", hidden // heads),
            ),
            widths=(hidden, self._number("intermediate_size", hidden)),
            tokenizer=describe_tokenizer(self._path, "spec.source", chat_template),
        )

    def check_tokenizer(self, output: Path) -> None:
        """See Source. The folder's own tokenizer.json is the truth, so there is nothing to compare."""

    def _export(self, work: Path) -> Path:
        if not any(self._path.glob("*.safetensors")):
            # Other formats of weights are pickles, which run code when they are read.
            raise InvalidFieldError("spec.source", "the folder has neither OpenVINO IR nor safetensors")
        try:
            from optimum.exporters.openvino import main_export
            from optimum.intel.openvino import OVConfig
        except ImportError as error:
            raise PreconditionError(
                "NOT_INSTALLED",
                "enginemesh[openvino-export]",
                "the source is a Hugging Face folder, and this build worker has no optimum-intel: install "
                f"the extra `openvino-export` ({error})",
            ) from error
        exported = work / "exported"
        main_export(
            str(self._path),
            exported,
            task="text-generation-with-past",
            framework="pt",
            library_name="transformers",
            trust_remote_code=False,
            local_files_only=True,
            convert_tokenizer=True,
            ov_config=OVConfig(dtype="fp16"),
        )
        return exported

    def _number(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None:
            value = default
        if not isinstance(value, int):
            raise InvalidFieldError("spec.source", f"config.json has no number {name!r}")
        return value


def _kv_bytes(layers: int, kv_heads: int, head_size: int) -> int:
    return 2 * layers * kv_heads * head_size * _F16_BYTES
