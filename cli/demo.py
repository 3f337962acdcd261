"""`enginemesh demo`."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING, Annotated

import typer

from cli import spans
from cli.answer import Answer, for_terminal
from cli.embedded import free_port, is_free
from cli.failures import EXIT_INTERRUPTED, CommandError
from cli.interrupts import terminated_like_interrupted, wait_for_interrupt
from cli.local_mesh import LocalMesh, Plan
from cli.options import DataOption, connect
from cli.sample_model import fetch_sample_model
from cli.tables import stdout_console
from cli.up import SAMPLE_MODEL, PortOption, build_model, say, wait_for_models
from cli.waterfall import print_waterfall
from enginemesh.v1 import inference_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

QUESTION = "In two sentences: why is the sky blue?"
MAX_TOKENS = 96
CALL_LIMIT_S = 120.0
TRACE_LIMIT_S = 5.0
"""A process writes its spans a moment after they end."""


def demo(
    data: DataOption,
    port: PortOption,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the mesh running until Ctrl-C.")] = False,
) -> None:
    """Show the whole path once: compile a small model for this CPU, ask it, follow the request, stop.

    Needs no GPU, no Docker and no account. The first run fetches about 100 MB and compiles; later runs
    find the engine in the store.
    """
    begin = time.monotonic()
    console = stdout_console()
    if not keep and not is_free(port):
        port = free_port()  # a mesh that stops again may run anywhere
    with terminated_like_interrupted():
        try:
            _step(console, "1/5  The weights: SmolLM2-135M-Instruct, 98 MB of GGUF")
            source = fetch_sample_model(data / "sources")
            say(console, f"     {source}")
            _step(console, "2/5  The mesh: Valkey, an S3 server, gateway, build worker, inference worker")
            plan = Plan(data, port, SAMPLE_MODEL.kind, (SAMPLE_MODEL.model,), 1, (source.parent,))
            with LocalMesh(plan, lambda line: say(console, line)) as mesh:
                say(console, f"     gateway at {mesh.address}, logs in {data / 'logs'}")
                _step(console, "3/5  The engine: compiled for this CPU, published in the store")
                build_model(mesh, SAMPLE_MODEL, console)
                wait_for_models(mesh, plan.models, console)
                _step(console, f"4/5  A question: {QUESTION}")
                request_id = _ask(mesh.address, console)
                _step(console, "5/5  Where its time went")
                _show_trace(console, data, request_id)
                _show_commands(console, mesh.address, is_kept=keep)
                say(console, f"Done in {time.monotonic() - begin:.0f} s.")
                if keep:
                    say(console, "The mesh goes on running; Ctrl-C stops it.")
                    wait_for_interrupt()
        except KeyboardInterrupt:
            raise CommandError("interrupted", EXIT_INTERRUPTED) from None


def _step(console: Console, title: str) -> None:
    console.print()
    console.print(title, style="bold cyan", highlight=False, markup=False)


def _ask(address: str, console: Console) -> str:
    """Streams an answer; returns the request's id."""
    request = _request()
    with connect(address) as client:
        answer = Answer(client.inference.Generate(request, timeout=CALL_LIMIT_S))
        for message in answer:
            text = for_terminal(message.delta.text)
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    say(console, answer.summary())
    return answer.finished.request_id


def _request() -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(model=SAMPLE_MODEL.model)
    request.chat.messages.add(role="user", content=QUESTION)
    request.sampling.max_tokens = MAX_TOKENS
    request.sampling.temperature = 0.0
    return request


def _show_trace(console: Console, data: Path, request_id: str) -> None:
    folder = data / "traces"
    deadline = time.monotonic() + TRACE_LIMIT_S
    while True:
        trace_id = spans.find(folder, request_id)
        trace = spans.load(folder, trace_id) if trace_id else None
        if trace is not None and trace.is_whole and len({span.service for span in trace.spans}) > 1:
            print_waterfall(console, trace)
            return
        if time.monotonic() > deadline:
            raise CommandError(f"no whole trace of request {request_id} in {folder}")
        time.sleep(0.05)


def _show_commands(console: Console, address: str, *, is_kept: bool) -> None:
    message = json.dumps(
        {
            "model": SAMPLE_MODEL.model,
            "chat": {"messages": [{"role": "user", "content": "Name three colours."}]},
            "sampling": {"max_tokens": 32},
        }
    )
    console.print()
    where = "Try, from another terminal:" if is_kept else "Try, after `make up`:"
    say(console, where)
    address = address if is_kept else "127.0.0.1:50051"
    for command in (
        ["grpcurl", "-plaintext", address, "list"],
        ["grpcurl", "-plaintext", "-d", message, address, "enginemesh.v1.Inference/Generate"],
        ["grpcurl", "-plaintext", address, "enginemesh.v1.Workers/ListWorkers"],
        ["enginemesh", "generate", "Tell me a joke."],
        ["enginemesh", "trace"],
    ):
        say(console, f"  {shlex.join(command)}")
    console.print()
