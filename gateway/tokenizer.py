"""A model's tokenizer and chat template: prompts and conversations to token ids."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate
from gateway.detokenizer import DetokenizerFactory
from gateway.output import OutputStream
from mesh.errors import IntegrityError, InvalidFieldError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginemesh.v1 import inference_pb2
    from mesh.manifest import TokenizerInfo


class ModelTokenizer:
    """Text to ids and back, for one model. Safe to use from several threads.

    Args:
        data: tokenizer.json of the `tokenizers` library.
        info: What the engine's manifest says beside it.

    Raises:
        IntegrityError: the tokenizer cannot be read.
    """

    def __init__(self, data: bytes, info: TokenizerInfo) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except ValueError as error:
            raise IntegrityError(f"{info.file} is no tokenizer: {error}", file=info.file) from error
        # Files often carry the settings of the training run, which would cut prompts without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._detokenizers = DetokenizerFactory(self._tokenizer)
        self._vocab_size = info.vocab_size
        self._info = info
        self.eos_token_ids = frozenset(info.eos_token_ids)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of plain text, with the special tokens that the model's own post-processor adds."""
        return self._encode(prompt, add_special_tokens=True, field="prompt")

    def encode_chat(self, messages: Sequence[inference_pb2.ChatMessage]) -> list[int]:
        """Ids of a conversation put through the chat template, ready for the assistant's turn.

        The template names every special token itself, so none is added.

        Raises:
            UnsupportedError: the model has no chat template.
            InvalidFieldError: the template refuses the conversation.
        """
        if not self._info.chat_template:
            raise UnsupportedError("the model has no chat template; send `prompt` instead", field="chat")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        return self._encode(self._chat_template.render(conversation), add_special_tokens=False, field="chat")

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Ids that the client made itself.

        Raises:
            InvalidFieldError: one is not of this vocabulary.
        """
        checked = list(ids)
        largest = max(checked, default=0)
        if largest >= self._vocab_size:
            raise InvalidFieldError(
                f"token_ids.ids[{checked.index(largest)}]",
                f"{largest} is not below the vocabulary's size {self._vocab_size}",
                limit=self._vocab_size,
            )
        return checked

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        """Compiled when first needed: a broken template is no fault of requests without a conversation."""
        tokens = {"bos_token": self._info.bos_token, "eos_token": self._info.eos_token}
        return ChatTemplate(self._info.chat_template, tokens)

    def output(self, stops: Sequence[str], continued_ids: Sequence[int] = ()) -> OutputStream:
        """A decoder for one answer.

        Args:
            stops: Stop strings; none matches across the start of the answer.
            continued_ids: Ids that the answer's text goes on from, so that a space between them is kept.
        """
        return OutputStream(self._detokenizers.start(continued_ids), stops)

    def _encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # what the library makes of a lone surrogate
            raise InvalidFieldError(field, "is not valid Unicode text") from error
        if not ids:
            raise InvalidFieldError(field, "gives no tokens")
        return ids
