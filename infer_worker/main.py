"""Entry point of an inference worker: `python -m infer_worker.main`, settings from the environment."""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from infer_worker.worker import Worker
from mesh import logging, telemetry
from mesh.settings import InferWorkerSettings


async def work(settings: InferWorkerSettings) -> int:
    """Runs a worker until SIGTERM or SIGINT, then drains it; returns its exit status."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await Worker(settings).run(stop)


def main() -> None:
    """Configures telemetry and works."""
    settings = InferWorkerSettings()
    logging.configure(settings)
    process_telemetry = telemetry.configure(settings, "infer_worker", settings.worker_id)
    try:
        status = uvloop.run(work(settings))
    finally:
        process_telemetry.shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
