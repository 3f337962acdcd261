"""`enginemesh generate`."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from cli.answer import Answer, for_terminal
from cli.failures import EXIT_INTERRUPTED, EXIT_REFUSED, CommandError
from cli.options import GatewayOption, connect
from cli.tables import bare, to_json
from enginemesh.v1 import inference_pb2

if TYPE_CHECKING:
    from cli.client import Client

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


class Priority(str, Enum):
    """Place in the queue."""

    high = "high"
    normal = "normal"
    low = "low"


def generate(
    gateway: GatewayOption,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="What to ask. Without it, standard input is read.")
    ] = None,
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model to ask. Default: the only one there is.")
    ] = "",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="Put the prompt through the model's chat template, or take it as is."
        ),
    ] = True,
    system: Annotated[str, typer.Option(help="System message of the conversation.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, max=UINT32_MAX, help="New tokens at most.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="0 picks the likeliest token each time.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this weight.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=UINT32_MAX, help="Sample from this many likeliest tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=UINT64_MAX, help="Seed of the sampler.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.")
    ] = False,
    priority: Annotated[Priority, typer.Option(help="Place in the queue.")] = Priority.normal,
    engine: Annotated[str, typer.Option(help="Run on this engine only (its digest).")] = "",
    request_id: Annotated[str, typer.Option(help="Name of the request; one is made if not given.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Deadline in seconds.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each message of the stream as JSON.")
    ] = False,
) -> None:
    r"""Ask a model and print its answer as it comes; figures follow on standard error.

    **Examples**

    `enginemesh generate "Why is the sky blue?"`

    `enginemesh generate --raw -t 0 -n 32 "Once upon a time"`

    `cat letter.txt | enginemesh generate --system "Summarise what you are given." --stop "\\n\\n"`

    `enginemesh generate --json hello | jq -r .delta.text`
    """
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        priority=inference_pb2.Priority.Value(f"PRIORITY_{priority.name.upper()}"),
        engine=f"engines/{bare(engine)}" if engine else "",
    )
    try:
        _put_input(request, _read_prompt(prompt), system, is_chat=chat)
    except UnicodeError as error:
        raise CommandError(f"the prompt is not UTF-8: {error}", EXIT_REFUSED) from error
    sampling = request.sampling
    sampling.stop.extend(stop or [])
    sampling.ignore_eos = ignore_eos
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    for field, value in given.items():
        if value is not None:
            setattr(sampling, field, value)
    with connect(gateway) as client:
        request.model = request.model or only_model(client)
        answer = Answer(client.inference.Generate(request, timeout=timeout))
        try:
            _print(answer, as_json=as_json)
        except KeyboardInterrupt:
            answer.cancel()
            raise CommandError("interrupted; the request is cancelled", EXIT_INTERRUPTED) from None
    typer.secho(answer.summary(), fg="bright_black", err=True)


def only_model(client: Client) -> str:
    """The name of the model, where there is but one."""
    names = [bare(model.name) for model in client.models()]
    if len(names) == 1:
        return names[0]
    hint = f"choose one of {', '.join(names)}" if names else "make one with `enginemesh build MODEL_FILE`"
    raise CommandError(f"which model? {hint}", EXIT_REFUSED)


def _read_prompt(words: list[str] | None) -> str:
    if words:
        return " ".join(words)
    if sys.stdin.isatty():
        typer.secho("Type the prompt, then Ctrl-D:", fg="bright_black", err=True)
    return sys.stdin.buffer.read().decode()


def _put_input(request: inference_pb2.GenerateRequest, prompt: str, system: str, *, is_chat: bool) -> None:
    if not is_chat:
        if system:
            raise CommandError("--system needs a chat template; leave out --raw", EXIT_REFUSED)
        request.prompt = prompt
        return
    if system:
        request.chat.messages.add(role="system", content=system)
    request.chat.messages.add(role="user", content=prompt)


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        for message in answer:
            print(json.dumps(to_json(message), ensure_ascii=False), flush=True)
        return
    clean = for_terminal if sys.stdout.isatty() else str
    try:
        for message in answer:
            print(clean(message.delta.text), end="", flush=True)
    finally:
        print(flush=True)
