"""Ways of serving a request, by the name a user gives (`--pd-protocol`); one file each."""

from kvcore.errors import ConfigError
from router.protocols.base import Exchange
from router.protocols.mooncake import MooncakeExchange
from router.protocols.nixl import NixlExchange
from router.protocols.sglang import SglangExchange
from router.protocols.suite import SuiteExchange

PD_PROTOCOLS: dict[str, type[Exchange]] = {
    "suite": SuiteExchange,
    "nixl": NixlExchange,
    "mooncake": MooncakeExchange,
    "sglang": SglangExchange,
}


def pd_protocol(name: str) -> type[Exchange]:
    """ConfigError, naming the known ones, when there is no such protocol."""
    if name not in PD_PROTOCOLS:
        raise ConfigError(f"no P/D protocol {name!r}; there are: {', '.join(sorted(PD_PROTOCOLS))}")
    return PD_PROTOCOLS[name]
