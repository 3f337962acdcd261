"""Every link of this worker, opened when it is first needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from infer_worker.link import CLOSE_LIMIT_S, Link
from mesh.bus.connection import UNREACHABLE
from mesh.waiting import cancel_until_ended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from enginemesh.internal.v1 import link_pb2
    from mesh.bus.leases import Leases

log = structlog.get_logger(__name__)

REST_S = 1.0
"""A gateway that did not answer is not tried again for this long, so that it costs others no slots."""


class LinkSet:
    """The links by address.

    Args:
        hello: How this worker introduces itself.
        on_message: Told what gateways say.
        on_lost: Told of each link that ended, however it did, also of one that never came up.
    """

    def __init__(
        self,
        hello: link_pb2.Hello,
        on_message: Callable[[Link, link_pb2.GatewayMessage], None],
        on_lost: Callable[[Link], None],
    ) -> None:
        self._hello = hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, tuple[Link, asyncio.Task[None]]] = {}
        self._resting: dict[str, float] = {}

    def get(self, address: str) -> Link | None:
        """The link to a gateway, opened if there is none; None if it just failed and should rest."""
        if address in self._links:
            return self._links[address][0]
        now = self._loop.time()
        self._resting = {resting: until for resting, until in self._resting.items() if until > now}
        if address in self._resting:
            return None
        link = Link(address, self._hello, self._on_message)
        self._links[address] = (link, asyncio.ensure_future(self._run(link)))
        return link

    async def watch(
        self, gateways: Leases, can_renew: Callable[[], Awaitable[bool]], interval_s: float
    ) -> None:
        """Closes links to gateways that have had no lease at two checks in a row, for ever.

        One check could fall into the moment after Redis lost its data.

        Args:
            gateways: Leases of gateways.
            can_renew: Whether leases can be renewed at present. While they cannot, as when the memory of
                Redis is full, a missing one says nothing.
            interval_s: Between two checks.
        """
        absent: set[str] = set()
        while True:
            await asyncio.sleep(interval_s)
            if not self._links:
                continue
            try:
                if not await can_renew():
                    absent.clear()
                    continue
                live = await gateways.live()
            except UNREACHABLE:
                continue
            linked = {link.gateway_id: task for link, task in self._links.values() if link.gateway_id}
            for gateway_id in absent & linked.keys() - live.keys():
                log.warning("gateway has lost its lease", gateway=gateway_id)
                linked[gateway_id].cancel()
            absent = linked.keys() - live.keys()

    async def close(self) -> None:
        """Sends what is left on every link and ends them all."""
        tasks = [task for _, task in self._links.values()]
        for link, _ in self._links.values():
            link.close()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * CLOSE_LIMIT_S)
        await cancel_until_ended(*tasks)

    async def _run(self, link: Link) -> None:
        log.info("link opens", gateway=link.address)
        how = "cancelled"
        try:
            how = await link.run()
        except Exception:
            how = "failed"
            log.exception("link failed", gateway=link.address)
        finally:
            log.info("link ended", gateway=link.address, how=how)
            if not link.gateway_id:
                self._resting[link.address] = self._loop.time() + REST_S
            del self._links[link.address]
            self._on_lost(link)
