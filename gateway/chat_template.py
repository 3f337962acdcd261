"""Renders chat templates as Hugging Face's tokenizers do, in a sandbox, without their library.

A template comes with a model and is not trusted: it runs in Jinja's immutable sandbox, with nothing but the
conversation, and its output has a limit. tests/gateway/test_chat_template.py holds the result against
transformers' own; importing that here would cost every gateway start 1.5 s.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.nodes import Node
    from jinja2.parser import Parser

MAX_CHARACTERS = 16 << 20
"""A template that makes more than this of a conversation is at fault."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's turns for training; here it is only passed through."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that Jinja asks for

    @override
    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    # Jinja's own filter escapes HTML, which would change what the model reads.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source.
        tokens: Special tokens that it may name, such as bos_token.

    Raises:
        InvalidFieldError: it does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise InvalidFieldError("chat", f"the model's chat template is broken: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ready for the assistant's turn.

        Raises:
            InvalidFieldError: the template refuses the conversation or makes too much of it.
        """
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            ):
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise InvalidFieldError(
                        "chat",
                        f"the template makes over {MAX_CHARACTERS} characters of it",
                        limit=MAX_CHARACTERS,
                    )
                pieces.append(piece)
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise InvalidFieldError("chat", f"the model's template refuses it: {error}") from error
        return "".join(pieces)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
