"""What one request's decision has stores do: copy its prefix to the chosen engine's store, or bring it from
disk."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.cluster import Cluster
from router.config import RouterConfig
from router.core.decision import Decision, Transfer
from router.core.view import RequestView
from router.metrics import RouterMetrics
from router.prefetch import Prefetcher
from router.prefix_copies import PrefixCopier


class TransferServices(Protocol):
    config: RouterConfig
    cluster: Cluster
    metrics: RouterMetrics
    prefetcher: Prefetcher
    copier: PrefixCopier


class PrefixTransfer:
    """Of one request. On the event loop's thread."""

    def __init__(self, services: TransferServices) -> None:
        self._services = services
        self._transfer: Transfer | None = None
        self._is_copied = False

    def holds(self, view: RequestView, decision: Decision, ask_again: Callable[[], None]) -> bool:
        """Whether the request waits for a copy before it is sent; `ask_again` is called then, once, when the
        copy is there or not worth more waiting. By then another engine may suit it better."""
        if decision.transfer is None or self._is_copied:
            return False
        services = self._services
        copying = services.copier.begin(view, decision, services.config.scheduling)
        if copying is None:
            return False
        self._is_copied = True
        services.metrics.transfers[decision.transfer.source] += 1
        if not copying.wait_ms:
            return False
        waiting = asyncio.ensure_future(asyncio.wait((copying.task,), timeout=copying.wait_ms / 1e3))
        waiting.add_done_callback(lambda _: ask_again())
        return True

    def begin(self, view: RequestView, transfer: Transfer | None) -> None:
        """The request was sent. The chosen engine's connector fetches the prefix itself, while it computes
        what comes after. Ours is to have it in memory by then, and to know that its source is busy until the
        prefill is done."""
        if transfer is None or self._is_copied:
            return
        self._transfer = transfer
        self._services.cluster.book.transfer_started(transfer)
        self._services.metrics.transfers[transfer.source] += 1
        self._services.prefetcher.begin(view, transfer)

    def end(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._services.cluster.book.transfer_ended(transfer)
