"""Entry point of a gateway process: `python -m gateway.main`, settings from the environment."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from gateway.server import Gateway
from mesh import logging, telemetry
from mesh.settings import GatewaySettings


async def serve(settings: GatewaySettings) -> None:
    """Runs a gateway until SIGTERM or SIGINT, then drains it."""
    gateway = Gateway(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await gateway.start()
    await stop.wait()
    await gateway.stop()


def main() -> None:
    """Configures telemetry and serves."""
    settings = GatewaySettings()
    logging.configure(settings)
    process_telemetry = telemetry.configure(settings, "gateway", settings.gateway_id)
    try:
        uvloop.run(serve(settings))
    finally:
        process_telemetry.shutdown()


if __name__ == "__main__":
    main()
