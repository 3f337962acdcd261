"""`enginemesh init`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import Annotated

import typer

from cli.failures import EXIT_REFUSED, CommandError
from cli.model_template import model_name, render
from mesh.kinds import KINDS, nearest
from mesh.manifest import MODEL_NAME
from mesh.model_shape import read_shape

GGUF_SUFFIX = ".gguf"


def init(
    source: Annotated[
        Path,
        typer.Argument(
            exists=True, help="Folder in the style of Hugging Face (config.json), or a GGUF file."
        ),
    ],
    *,
    kind: Annotated[str, typer.Option(help=f"Engine kind: {', '.join(KINDS)}.")] = "openvino",
    name: Annotated[str, typer.Option(help="Name of the model. Default: after the folder or file.")] = "",
) -> None:
    """Print a commented model file for a model on this machine.

    What is set in it is a good start for this model; what else could be set stands there as comments.

    **Examples**

    `enginemesh init ./TinyLlama-1.1B-Chat > tinyllama.yaml`

    `enginemesh init model.gguf --name my-model`
    """
    if kind not in KINDS:
        raise CommandError(
            f"no engine kind {kind!r}; {nearest(kind, KINDS)}there are {', '.join(KINDS)}", EXIT_REFUSED
        )
    if name and not MODEL_NAME.fullmatch(name):
        raise CommandError(f"--name: 1 to 63 characters of a-z, 0-9, '.' and '-', not {name!r}", EXIT_REFUSED)
    resolved = source.resolve()
    is_gguf = resolved.suffix.lower() == GGUF_SUFFIX
    made_name = name or model_name(resolved.stem if is_gguf else resolved.name)
    typer.echo(render(made_name, kind, str(source), read_shape(resolved)), nl=False)
