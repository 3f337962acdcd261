"""Entry point of a gateway process: `python -m gateway.main`, settings from the environment."""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from gateway.server import Gateway
from mesh import logging, telemetry
from mesh.settings import GatewaySettings


async def serve(settings: GatewaySettings) -> int:
    """Runs a gateway until SIGTERM or SIGINT, then drains it; the process's exit status."""
    gateway = Gateway(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await gateway.start()
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, gateway.has_failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await gateway.stop()
    return 1 if gateway.has_failed.is_set() else 0


def main() -> None:
    """Configures telemetry and serves."""
    settings = GatewaySettings()
    logging.configure(settings)
    process_telemetry = telemetry.configure(settings, "gateway", settings.gateway_id)
    try:
        status = uvloop.run(serve(settings))
    finally:
        process_telemetry.shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
