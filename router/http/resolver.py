"""Where an engine is, by its name."""

import asyncio
import ipaddress
import logging
import socket

logger = logging.getLogger(__name__)

# Until a name is asked for again that nobody has answered for: who connects waits for that.
_PAUSE_S = 30.0
# Answers: there is no such name. Everything else says nothing of the engine.
_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)


class Resolver:
    """Of one host. While nobody answers for names its last addresses count: an engine that is well must not
    be taken for dead because the name server is."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._is_address = _is_address(host)
        self._last = [host] if self._is_address else []
        self._ask_at = 0.0

    async def addresses(self) -> list[str]:
        """OSError (also for a timeout) or UnicodeError when there are none."""
        loop = asyncio.get_running_loop()
        if self._is_address or loop.time() < self._ask_at:
            return self._last
        asked = loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.wait_for(asked, self._timeout_s)
        except (asyncio.TimeoutError, socket.gaierror) as error:
            answered = isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
            if answered or not self._last:
                raise
            self._ask_at = loop.time() + _PAUSE_S
            reason = str(error) or f"no answer within {self._timeout_s:g} s"
            logger.warning(
                "a name cannot be asked for; its last addresses stay",
                extra={"host": self._host, "reason": reason},
            )
            return self._last
        self._last = list(dict.fromkeys(str(address[0]) for *_, address in found))
        return self._last


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
