"""How many clients the limit of open files affords."""

import logging
import resource

from kvcore.errors import ConfigError

logger = logging.getLogger(__name__)


def affordable_connections(wanted: int, *, files_per_client: int, own_files: int) -> int:
    """Raises the soft limit as far as the hard one allows. ConfigError when not even one client fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = own_files + files_per_client * wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    affordable = (soft - own_files) // files_per_client
    if affordable < 1:
        raise ConfigError(
            f"the limit of {soft} open files leaves none for clients: raise it (ulimit -n {needed})"
        )
    logger.warning(
        "the limit of %d open files allows %d clients instead of %d: raise it with ulimit -n %d",
        soft,
        affordable,
        wanted,
        needed,
    )
    return affordable
