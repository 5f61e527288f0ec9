"""What the event loop reports when nobody else takes an error."""

import asyncio
import errno
import logging

logger = logging.getLogger(__name__)


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """An exception handler of asyncio. Without file descriptors there is something to do about it, so it says
    that."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        logger.error(
            "no more files can be opened, new clients are turned away: raise the limit (ulimit -n) or lower "
            "--max-connections"
        )
    else:
        logger.error(
            "unexpected: %s", context.get("message"), exc_info=error if isinstance(error, Exception) else None
        )
