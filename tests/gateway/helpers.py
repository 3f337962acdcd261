"""Small builders that gateway tests share."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from enginemesh.internal.v1 import step_pb2
from enginemesh.v1 import sampling_pb2
from gateway.detokenizer import DetokenizerFactory
from gateway.output import OutputStream
from gateway.session import Session, Timeline

STOP = step_pb2.SEQUENCE_FINISH_REASON_STOP
LENGTH = step_pb2.SEQUENCE_FINISH_REASON_LENGTH
ERROR = step_pb2.SEQUENCE_FINISH_REASON_ERROR
REFUSED = step_pb2.SEQUENCE_FINISH_REASON_REFUSED


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, as the ids 0 to 255; decodes like a byte-level BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {_byte_of(character): character for character in alphabet}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_of(character: str) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(character)
    if code in printable:
        return code
    return [byte for byte in range(256) if byte not in printable][code - 256]


def byte_fallback_tokenizer() -> Tokenizer:
    """Like Llama's: words with a leading U+2581, and bytes for what it has no word for."""
    words = ["<unk>", "<s>", "</s>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["\u2581Hello", "\u2581world", "\u2581", "!", "a", "b", "c"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def session(request_id: str = "r", *, max_tokens: int = 8, max_attempts: int = 3, stop=(), **more) -> Session:
    """A session whose tokens are bytes."""
    return Session(
        request_id=request_id,
        model="m",
        prompt_ids=[1, 2, 3],
        sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, **more.pop("sampling", {})),
        eos_token_ids=frozenset({0}),
        output=OutputStream(DetokenizerFactory(byte_level_tokenizer()).start(), stop),
        timeline=Timeline(arrived=0.0),
        engines=frozenset({"e", "e1"}),
        max_attempts=max_attempts,
        **more,
    )


def step(*rows: tuple[int, int, list[int]], finishes=()) -> step_pb2.StepOutput:
    """A frame of (id, offset, tokens) rows and (id, reason) finishes."""
    message = step_pb2.StepOutput()
    for identifier, offset, tokens in rows:
        message.ids.append(identifier)
        message.offsets.append(offset)
        message.counts.append(len(tokens))
        message.token_ids.extend(tokens)
    for identifier, reason in finishes:
        message.finishes.add(id=identifier, reason=reason)
    return message
