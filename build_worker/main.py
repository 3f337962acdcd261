"""Entry point of a build worker process: `python -m build_worker.main`, settings from the environment."""

from __future__ import annotations

import asyncio
import signal

from build_worker.worker import BuildWorker
from mesh import logging, telemetry
from mesh.hardware import detect_target
from mesh.settings import BuildWorkerSettings


async def work(settings: BuildWorkerSettings) -> None:
    """Runs a build worker until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await BuildWorker(settings, detect_target(settings.kind_list)).run(stop)


def main() -> None:
    """Configures logs and telemetry, and works."""
    settings = BuildWorkerSettings()
    logging.configure(settings)
    process_telemetry = telemetry.configure(settings, "build_worker", settings.worker_id)
    try:
        asyncio.run(work(settings))
    finally:
        process_telemetry.shutdown()


if __name__ == "__main__":
    main()
