"""Source models of kind `openvino`: each becomes OpenVINO IR in half precision and a tokenizer."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from build_worker.stages import Stage
from mesh.errors import BuildError, InvalidFieldError, PreconditionError
from mesh.tokenizer_files import TOKENIZER, describe_tokenizer, read_json_object

if TYPE_CHECKING:
    from pathlib import Path

    from build_worker.backends.base import Report
    from build_worker.gguf_writer import Content
    from build_worker.lora import LoraAdapter
    from mesh.manifest import TokenizerInfo

MODEL = "openvino_model.xml"
TOKENIZER_IR = tuple(
    f"openvino_{part}.{kind}" for part in ("tokenizer", "detokenizer") for kind in ("xml", "bin")
)

# What tokenisers get wrong: spaces, digits, contractions, joined emoji, scripts, and their own specials.
_PROBES = (
    *("Hello world", "  two spaces", "It's 12345 o'clock, isn't it?", "\t\tTab  ends  ", "x" * 40 + " " * 9),
    *("\n\ndef f(x):\n    return x+1", "café 日本語 😀👩‍👩‍👧 emoji", "नमस्ते دنيا ", "e\u0301 “quotes”…"),
)


class Source(Protocol):
    """A source model."""

    def convert(self, work: Path, output: Path, adapter: LoraAdapter | None, report: Report) -> Path:
        """Puts tokenizers into `output`; returns a folder with the model's IR, the adapter merged into it.

        Raises:
            InvalidFieldError: the weights are damaged, or the adapter cannot be merged into them.
            PreconditionError: the export that this source needs is not installed.
        """

    def tokenizer(self, chat_template: str) -> TokenizerInfo:
        """What it says of its tokenizer; `chat_template` replaces its own unless empty."""

    def check_tokenizer(self, output: Path) -> None:
        """Raises BuildError if the tokenizers in `output` disagree."""


def open_source(path: Path, field: str = "spec.source") -> Source:
    """The source model at `path`: a GGUF file, a folder with one, or a Hugging Face style folder.

    Raises:
        InvalidFieldError: it is none of these; blames `field`.
    """
    if path.is_file():
        return GgufSource(path, field)
    if (path / "config.json").exists():
        return FolderSource(path, field)
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise InvalidFieldError(
            field, f"the folder has neither config.json nor exactly one GGUF file, but {len(found)}"
        )
    return GgufSource(found[0], field)


class GgufSource:
    """A GGUF file of an architecture that OpenVINO GenAI reads."""

    ARCHITECTURES = ("llama", "qwen2", "qwen3")

    def __init__(self, path: Path, field: str) -> None:
        from build_worker.gguf_model import GgufModel

        self._model = GgufModel(path)
        if self._model.architecture not in self.ARCHITECTURES:
            raise InvalidFieldError(
                field,
                f"architecture {self._model.architecture!r} is not supported; there are "
                + ", ".join(self.ARCHITECTURES),
            )
        # OpenVINO's reader would leave these out in silence, and long texts would come out wrong.
        scaling = self._model.get(f"{self._model.architecture}.rope.scaling.type", "none")
        if scaling != "none" or self._model.has_tensor("rope_freqs.weight"):
            raise InvalidFieldError(field, "GGUF models with scaled RoPE are not supported")

    def convert(self, work: Path, output: Path, adapter: LoraAdapter | None, report: Report) -> Path:
        """See Source."""
        from build_worker.gguf_tokenizer import make_tokenizer

        make_tokenizer(self._model).save(str(output / TOKENIZER), pretty=False)
        _to_ir(self._model.content, work, adapter, report)
        for name in TOKENIZER_IR:
            shutil.move(work / name, output / name)
        return work

    def tokenizer(self, chat_template: str) -> TokenizerInfo:
        """See Source."""
        from build_worker.gguf_tokenizer import describe_tokenizer as describe

        return describe(self._model, chat_template)

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
    """A folder as on the Hugging Face hub: config.json, tokenizer.json, and safetensors or OpenVINO IR.

    Safetensors of an architecture that GGUF knows are read here; others are exported by optimum-intel.
    """

    def __init__(self, path: Path, field: str) -> None:
        self._path = path
        self._field = field
        self._config = read_json_object(path / "config.json", field)
        if not (path / TOKENIZER).exists():
            raise InvalidFieldError(field, f"the folder has no {TOKENIZER}")

    def convert(self, work: Path, output: Path, adapter: LoraAdapter | None, report: Report) -> Path:
        """See Source."""
        from build_worker.gguf_hub import HubModel, why_not

        report(Stage.CONVERT, 0.0, "making OpenVINO IR")
        shutil.copyfile(self._path / TOKENIZER, output / TOKENIZER)
        has_ir = (self._path / MODEL).exists()
        if not has_ir and not any(self._path.glob("*.safetensors")):
            # Other formats of weights are pickles, which run code when they are read.
            raise InvalidFieldError(self._field, "the folder has neither OpenVINO IR nor safetensors")
        reason = "it is OpenVINO IR" if has_ir else why_not(self._config)
        if not reason:
            _to_ir(HubModel(self._path, self._config, self._field).content, work, adapter, report)
            return work
        if adapter is not None:
            raise InvalidFieldError(self._field, f"an adapter cannot be built into this model: {reason}")
        exported = self._path if has_ir else self._export(work, reason)
        for name in TOKENIZER_IR:
            if (exported / name).exists():
                shutil.copyfile(exported / name, output / name)
        return exported

    def tokenizer(self, chat_template: str) -> TokenizerInfo:
        """See Source."""
        return describe_tokenizer(self._path, self._field, chat_template)

    def check_tokenizer(self, output: Path) -> None:
        """See Source. The folder's own tokenizer.json is the truth, so there is nothing to compare."""

    def _export(self, work: Path, reason: str) -> Path:
        try:
            from optimum.exporters.openvino import main_export
            from optimum.intel.openvino import OVConfig
        except ImportError as error:
            raise PreconditionError(
                "NOT_INSTALLED",
                "enginemesh[openvino-export]",
                f"the source needs an export by optimum-intel, as {reason}, and this build worker has none: "
                f"install the extra `openvino-export` ({error})",
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


def _to_ir(content: Content, work: Path, adapter: LoraAdapter | None, report: Report) -> None:
    """Leaves the model's IR in `work`, with the tokenizer and detokenizer as OpenVINO makes them."""
    import openvino_genai

    from build_worker.gguf_writer import write_half_precision

    # OpenVINO rounds the zero points of asymmetric GGUF types, which costs a third of the answers; it reads
    # F16 exactly.
    half = work / "model.gguf"
    write_half_precision(
        half, content, adapter, lambda fraction: report(Stage.CONVERT, 0.6 * fraction, "reading weights")
    )
    report(Stage.CONVERT, 0.6, "making OpenVINO IR")
    openvino_genai.LLMPipeline(str(half), "CPU", enable_save_ov_model=True)
    half.unlink()
