"""`enginemesh verify`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cli.failures import EXIT_FAILED
from cli.options import JsonOption, local_settings
from cli.store_access import open_store
from cli.tables import DIGEST_LENGTH, size


def verify(
    engine: Annotated[str, typer.Argument(help="Engine, by its digest or the first digits of it.")],
    as_json: JsonOption = False,
) -> None:
    """Read every blob of an engine again and check it, and the signature; status 1 if anything is wrong."""
    from mesh.engine_copy import check_blobs  # noqa: PLC0415 - see cli/store_access.py
    from mesh.signing import SignatureState, Trust  # noqa: PLC0415 - likewise

    settings = local_settings()
    store = open_store(settings)
    record = store.record(store.resolve(engine))  # the manifest is checked by its digest
    verdict = record.verdict(Trust.from_settings(settings))
    is_signed = verdict.state is SignatureState.VERIFIED
    problems = {file.path: problem for file, problem in check_blobs(store, record.manifest) if problem}
    is_good = not problems and (is_signed or settings.signature_policy != "require")
    if as_json:
        report = {
            "engine": record.digest,
            "is_good": is_good,
            "signature": {"state": verdict.state.value, "reason": verdict.reason, "key_id": verdict.key_id},
            "files": len(record.manifest.files),
            "bytes": record.manifest.size,
            "problems": problems,
        }
        print(json.dumps(report, indent=2))
    else:
        for path, problem in problems.items():
            print(f"{path}: {problem}")
        print(f"signature: {verdict.reason}")
        files = len(record.manifest.files)
        state = "whole" if not problems else f"damaged in {len(problems)} of {files} files"
        print(f"engine {record.digest[:DIGEST_LENGTH]} is {state} ({size(record.manifest.size)} read)")
    if not is_good:
        raise typer.Exit(EXIT_FAILED)
