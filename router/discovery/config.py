"""The `[discovery]` part of router.toml."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: Annotated[
        str,
        Meta(
            pattern="^(static|file|redis|kubernetes)$",
            description="static (engines named by flags), file, redis or kubernetes",
        ),
    ] = "static"
    interval_ms: Annotated[
        float, Meta(gt=0, description="between two looks at the file or Redis, and after a failure")
    ] = 1_000
    file: Annotated[str, Meta(description="a .toml, .json or .yaml file with a list `engines`")] = ""
    redis_url: Annotated[
        str, Meta(description="where engines are registered; see mooncake-router register --help")
    ] = "redis://127.0.0.1:6379/0"
    redis_key: Annotated[str, Meta(min_length=1, description="the hash they are registered in")] = (
        "mooncake-router:engines"
    )
    kubernetes_service: Annotated[str, Meta(description="the Service of engines that do everything")] = ""
    kubernetes_prefill_service: Annotated[str, Meta(description="the Service of prefill engines")] = ""
    kubernetes_decode_service: Annotated[str, Meta(description="the Service of decode engines")] = ""
    kubernetes_namespace: Annotated[str, Meta(description="of the Services; empty: the router's own")] = ""
    kubernetes_port: Annotated[
        str, Meta(description="name or number of the engines' HTTP port; empty: the only or first one")
    ] = ""
    kubernetes_api: Annotated[str, Meta(description="empty: that of the cluster the router runs in")] = ""
    kubernetes_credentials: Annotated[
        str, Meta(description="directory with token, ca.crt and namespace of a service account")
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"

    def check(self) -> None:
        """ConfigError when the chosen source is not told enough."""
        if self.source == "file" and not self.file:
            raise ConfigError("--discovery.source file needs --discovery.file")
        mixed, prefill, decode = (
            self.kubernetes_service,
            self.kubernetes_prefill_service,
            self.kubernetes_decode_service,
        )
        if self.source == "kubernetes" and not (mixed or (prefill and decode)):
            raise ConfigError(
                "--discovery.source kubernetes needs --discovery.kubernetes-service, or both "
                "--discovery.kubernetes-prefill-service and --discovery.kubernetes-decode-service"
            )
        if self.source == "kubernetes" and mixed and (prefill or decode):
            raise ConfigError(
                "--discovery.kubernetes-service cannot be mixed with those of prefill and decode"
            )
