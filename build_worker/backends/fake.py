"""Kind `fake`: an engine that emits scripted tokens at scripted times, for tests and for measuring the mesh.

Its tokenizer has one token per byte, with the byte's value as id, and two more for turns of a chat.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from build_worker.backends.base import BuildInput, EngineTraits, Report
from build_worker.stages import Stage
from mesh import capabilities
from mesh.errors import InvalidFieldError
from mesh.manifest import TokenizerInfo
from mesh.versions import installed_versions

if TYPE_CHECKING:
    from mesh.model_file import ModelFile

SCRIPT_VERSION = "1"
"""Of script.json and the options; its runner must know the same."""

PRECISION = "none"
DEFAULT_BATCH_SIZE = 32
DEFAULT_SEQUENCE_LENGTH = 32_768
DEFAULT_NUM_TOKENS = 8_192

NUMBERS = ("step_ms", "prefill_ms", "load_ms", "slots", "die_after_tokens", "hang_after_tokens", "helpers")
NUMBER_LIMIT = 1_000_000
TEXT = "text"
LOAD_ERROR = "load_error"

BYTES = 256
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeBuilder:
    """Writes a script and a tokenizer.

    Options: `text` is what the engine answers to every prompt, a byte per step; without it, each token
    follows from all tokens before it. The others (NUMBERS, LOAD_ERROR) go to the engine as they are.
    """

    needs_source = False

    def validate(self, spec: ModelFile) -> None:
        """See Builder."""
        if spec.precision not in ("", PRECISION):
            raise InvalidFieldError("spec.precision", f"kind fake has no weights: {PRECISION!r} or nothing")
        for name, value in spec.options.items():
            if name in NUMBERS:
                _check_number(name, value)
            elif name not in (TEXT, LOAD_ERROR):
                known = ", ".join((*NUMBERS, TEXT, LOAD_ERROR))
                raise InvalidFieldError(f"spec.options.{name}", f"kind fake has no such option, only {known}")

    def runtime_versions(self) -> dict[str, str]:
        """See Builder."""
        return {"fake": SCRIPT_VERSION}

    def tool_versions(self) -> dict[str, str]:
        """See Builder."""
        return {**self.runtime_versions(), **installed_versions("tokenizers")}

    def build(self, job: BuildInput, report: Report) -> EngineTraits:
        """See Builder."""
        spec = job.spec
        report(Stage.CONVERT, 0.0, "writing the tokenizer")
        _byte_tokenizer().save(str(job.output / "tokenizer.json"), pretty=False)
        report(Stage.QUANTISE, 0.0, "nothing to make smaller")
        report(Stage.COMPILE, 0.0, "writing the script")
        answer = [[byte] for byte in spec.options.get(TEXT, "").encode()]
        script = {"answer": answer} if answer else {}
        (job.output / "script.json").write_text(json.dumps(script, separators=(",", ":")))
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
            options={name: value for name, value in spec.options.items() if name != TEXT},
        )


def _check_number(name: str, value: str) -> None:
    try:
        is_good = 0 <= float(value) <= NUMBER_LIMIT
    except ValueError:
        is_good = False
    if not is_good:
        raise InvalidFieldError(
            f"spec.options.{name}", f"must be a number from 0 to {NUMBER_LIMIT}, not {value!r}"[:300]
        )


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
