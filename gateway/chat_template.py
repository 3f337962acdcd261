"""Renders chat templates as Hugging Face's tokenizers do, in a sandbox, without their library.

A template comes with a model and is not trusted: it runs in Jinja's immutable sandbox, with nothing but the
conversation, and both its output and its time have a limit. tests/gateway/test_chat_template.py holds the
result against transformers' own; importing that here would cost every gateway start 1.5 s.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from mesh.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jinja2.parser import Parser

MAX_CHARACTERS = 16 << 20
"""A template that makes more than this of a conversation is at fault."""
MAX_CPU_S = 1.0
"""Processor time that one conversation may take, so that other calls and the machine's load don't count."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's turns for training; here it is only passed through."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that Jinja asks for

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeteredCode(CodeGenerator):
    """Asks for the time in each turn of a loop and each call of a macro; nothing else can go on and on."""

    @override
    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _time_check())
        super().visit_For(node, frame)

    @override
    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        node.body.insert(0, _time_check())
        super().visit_Macro(node, frame)


def _time_check() -> nodes.Node:
    check = nodes.EnvironmentAttribute("check_time")
    return nodes.ExprStmt(nodes.Call(check, [], [], None, None))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on the time that a rendering takes."""

    code_generator_class = _MeteredCode

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self._limits = threading.local()

    def start_time(self) -> None:
        """Begins a rendering in this thread."""
        self._limits.end = time.thread_time() + MAX_CPU_S

    def check_time(self) -> None:
        """Raises TemplateError if this thread's rendering has taken too long."""
        if time.thread_time() > self._limits.end:
            raise TemplateError(f"it takes over {MAX_CPU_S:g} s of processor time")


def _environment() -> _Environment:
    environment = _Environment()
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
            self._environment = _environment()
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise InvalidFieldError("chat", f"the model's chat template is broken: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ready for the assistant's turn.

        Raises:
            InvalidFieldError: the template refuses the conversation or makes too much of it.
        """
        self._environment.start_time()
        try:
            return _join(
                self._template.generate(
                    messages=list(messages),
                    add_generation_prompt=True,
                    tools=None,
                    documents=None,
                    **self._tokens,
                )
            )
        except InvalidFieldError:
            raise
        except Exception as error:  # whatever the template's own expressions raise
            raise InvalidFieldError("chat", f"the model's template refuses it: {error}") from error


def _join(pieces: Iterable[str]) -> str:
    """The pieces as one text, unless they are too much."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise InvalidFieldError(
                "chat", f"the template makes over {MAX_CHARACTERS} characters of it", limit=MAX_CHARACTERS
            )
        kept.append(piece)
    return "".join(kept)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
