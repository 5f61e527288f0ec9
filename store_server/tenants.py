"""`[[tenants]]`: who may use the store besides its operator, each with a token, a quota and keys of its own.

[[tenants]]
name = "search"
token = "..."
dram_quota = "64gb"
ssd_quota = "1tb"
remote_quota = "20tb"
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from kvcore.errors import ConfigError
from kvcore.units import parse_size_bytes
from kvcore.wire.messages import CopyFrom, Message, Reserve
from store_server.core.owners import OPERATOR, Quota, tenant_prefix

M = TypeVar("M", bound=Message)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas: "64gb", or bytes; 0: as much as there is. `shm`: clients may touch the
    whole pool by themselves, over shm and rdma, so they could read, and spoil, what belongs to others; only
    for tenants that are trusted with that."""

    name: str
    token: str
    dram_quota: int | str = 0
    ssd_quota: int | str = 0
    remote_quota: int | str = 0
    shm: bool = False

    @property
    def prefix(self) -> bytes:
        return tenant_prefix(self.name)

    def quota(self) -> Quota:
        return Quota(
            prefix=self.prefix,
            dram_bytes=parse_size_bytes(self.dram_quota),
            ssd_bytes=parse_size_bytes(self.ssd_quota),
            remote_bytes=parse_size_bytes(self.remote_quota),
        )


class Client(msgspec.Struct, frozen=True):
    """Whom a connection belongs to: the operator, or a tenant with its name and prefix; and the token it
    showed."""

    name: str = ""
    prefix: bytes = OPERATOR
    may_touch_pool: bool = True
    token: str = ""

    @property
    def is_operator(self) -> bool:
        return self.prefix == OPERATOR


class Tenants:
    """All that the server has to know about them. ConfigError for what makes no sense."""

    def __init__(self, tenants: Sequence[Tenant], operator_token: str) -> None:
        check(tenants, operator_token)
        self._by_token = {one.token: Client(one.name, one.prefix, one.shm, one.token) for one in tenants}
        self._operator = Client(token=operator_token)
        self.names = {one.prefix: one.name for one in tenants}
        self.tokens = tuple(self._by_token)
        self.quotas = [one.quota() for one in tenants]

    def client_of(self, token: str) -> Client:
        """For a token that was let in."""
        return self._by_token.get(token, self._operator)


def check(tenants: Sequence[Tenant], operator_token: str) -> None:
    names = [one.name for one in tenants]
    tokens = [one.token for one in tenants] + [operator_token]
    for one in tenants:
        if not one.name or not one.token:
            raise ConfigError("tenants: each needs a name and a token")
        if names.count(one.name) > 1:
            raise ConfigError(f"tenants: {one.name!r} is there more than once")
        if tokens.count(one.token) > 1:
            raise ConfigError(f"tenants: the token of {one.name!r} is that of somebody else, too")
        quota = one.quota()
        if min(quota.dram_bytes, quota.ssd_bytes, quota.remote_bytes) < 0:
            raise ConfigError(f"tenants: a quota of {one.name!r} is negative")


def scoped(request: M, prefix: bytes) -> M:
    """The same request for the tenant's own keys, whatever keys it names."""
    if not prefix:
        return request
    changes: dict[str, Any] = {}
    if keys := getattr(request, "keys", None):
        changes["keys"] = [prefix + key for key in keys]
    if isinstance(request, Reserve | CopyFrom):
        changes["parents"] = [prefix + parent if parent else b"" for parent in request.parents]
    return msgspec.structs.replace(request, **changes) if changes else request
