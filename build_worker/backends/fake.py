"""Kind `fake`: an engine that emits scripted tokens at scripted times, for tests and for measuring the mesh.

Its tokenizer has one token per byte, with the byte's value as id, and two more for turns of a chat.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from build_worker.backends.base import BuildInput, EngineTraits, Part, Report
from build_worker.stages import Stage
from mesh import capabilities
from mesh.errors import BuildError
from mesh.manifest import TokenizerInfo
from mesh.versions import installed_versions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.model_file import ModelFile

SCRIPT_VERSION = "1"
"""Of script.json and the options; its runner must know the same."""

PRECISION = "none"
DEFAULT_BATCH_SIZE = 32
DEFAULT_SEQUENCE_LENGTH = 32_768
DEFAULT_NUM_TOKENS = 8_192

TEXT = "text"
BUILD_OPTIONS = (
    *("convert_ms", "quantise_ms", "compile_ms"),
    *("build_helpers", "build_memory_mib", "build_disk_mib", "engine_mib"),
)

TOKENIZER, SCRIPT, NOISE = "tokenizer.json", "script.json", "noise.bin"
CONVERT = Part("convert", Stage.CONVERT)
QUANTISE = Part("quantise", Stage.QUANTISE)
COMPILE = Part("compile", Stage.COMPILE)
PARTS = (CONVERT, QUANTISE, COMPILE)

MIB = 1 << 20
TICK_S = 0.05
_held: list[bytes] = []

BYTES = 256
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeBuilder:
    """Writes a script and a tokenizer, in resumable parts that last as long as is asked for.

    Options: `text` is what the engine answers to every prompt, a byte per step; without it, each token
    follows from all tokens before it. BUILD_OPTIONS say what the build itself takes. The others, see
    mesh/kinds.py, go to the engine as they are.
    """

    def validate(self, spec: ModelFile) -> None:
        """See Builder."""
        spec.check()

    def runtime_versions(self) -> dict[str, str]:
        """See Builder."""
        return {"fake": SCRIPT_VERSION}

    def tool_versions(self) -> dict[str, str]:
        """See Builder."""
        return {**self.runtime_versions(), **installed_versions("tokenizers")}

    def parts(self, spec: ModelFile) -> Sequence[Part]:  # noqa: ARG002 - always the same
        """See ResumableBuilder."""
        return PARTS

    def run_part(self, part: Part, job: BuildInput, result: Path, report: Report) -> None:
        """See ResumableBuilder."""
        print(f"fake {part.name}", flush=True)  # noqa: T201 - as tools do; it goes to the build's log
        if job.previous is not None:
            shutil.copytree(job.previous, result, dirs_exist_ok=True)
        if part is CONVERT:
            report(part.stage, 0.0, "writing the tokenizer")
            _byte_tokenizer().save(str(result / TOKENIZER), pretty=False)
        elif part is COMPILE:
            report(part.stage, 0.0, "writing the script")
            _take_resources(job)
            answer = [[byte] for byte in job.spec.options.get(TEXT, "").encode()]
            script = {"answer": answer} if answer else {}
            (result / SCRIPT).write_text(json.dumps(script, separators=(",", ":")))
            _write_noise(result / NOISE, _number(job.spec, "engine_mib") * MIB)
        else:
            report(part.stage, 0.0, "nothing to make smaller")
        _last(part.stage, _number(job.spec, f"{part.name}_ms") / 1000, report)

    def build(self, job: BuildInput, report: Report) -> EngineTraits:
        """See Builder."""
        spec = job.spec
        if job.previous is None:
            raise BuildError("the parts of the build are missing")
        report(Stage.COMPILE, 1.0, "collecting the files")
        for path in job.previous.iterdir():
            path.replace(job.output / path.name)
        return EngineTraits(
            precision=PRECISION,
            max_batch_size=spec.max_batch_size or DEFAULT_BATCH_SIZE,
            max_seq_len=spec.max_seq_len or DEFAULT_SEQUENCE_LENGTH,
            max_num_tokens=spec.max_num_tokens or DEFAULT_NUM_TOKENS,
            tokenizer=TokenizerInfo(
                chat_template=spec.chat_template or CHAT_TEMPLATE,
                eos_token=TURN_END,
                eos_token_ids=(BYTES + 1,),
                vocab_size=BYTES + 2,
            ),
            capabilities=(capabilities.LOGPROBS, capabilities.REPRODUCIBLE, capabilities.SEED),
            options={
                name: value for name, value in spec.options.items() if name not in (TEXT, *BUILD_OPTIONS)
            },
        )


def _number(spec: ModelFile, name: str) -> int:
    return int(float(spec.options.get(name, "0")))


def _last(stage: Stage, duration_s: float, report: Report) -> None:
    end = time.monotonic() + duration_s
    while (left := end - time.monotonic()) > 0:
        report(stage, 1 - left / duration_s)
        time.sleep(min(left, TICK_S))


def _take_resources(job: BuildInput) -> None:
    """Takes what the options say, and holds the memory until this process ends."""
    for _ in range(_number(job.spec, "build_helpers")):
        subprocess.Popen(["/bin/sleep", "infinity"])
    _held.append(b"\1" * (_number(job.spec, "build_memory_mib") * MIB))
    _write_noise(job.work / "dropped", _number(job.spec, "build_disk_mib") * MIB)


def _write_noise(path: Path, size: int) -> None:
    """The same bytes each time, which no store makes smaller."""
    noise = random.Random(size)  # noqa: S311 - it hides nothing
    if size:
        with path.open("wb") as file:
            for _ in range(size // MIB):
                file.write(noise.randbytes(MIB))


def _byte_tokenizer() -> Tokenizer:
    # The characters that stand for bytes in a byte-level BPE: printable bytes for themselves, in their
    # order, and the others from code point 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab.update({chr(BYTES + index): byte for index, byte in enumerate(others)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TURN_START, TURN_END])
    return tokenizer
