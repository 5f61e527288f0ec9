"""The `[discovery]` part of router.toml."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from router.core.view import Role


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
    kubernetes_selector: Annotated[
        str, Meta(description="labels of the pods of engines that do everything: app=vllm,tier=gpu")
    ] = ""
    kubernetes_prefill_selector: Annotated[str, Meta(description="labels of prefill engines' pods")] = ""
    kubernetes_decode_selector: Annotated[str, Meta(description="labels of decode engines' pods")] = ""
    kubernetes_bootstrap_annotation: Annotated[
        str, Meta(description="of pods: a prefill engine's bootstrap port, where no port is named so")
    ] = "sglang.ai/bootstrap-port"
    kubernetes_namespace: Annotated[
        str, Meta(description="of the Services or pods; empty: the router's own")
    ] = ""
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
        if self.source == "kubernetes":
            self._check_kubernetes()

    @property
    def kubernetes_services(self) -> tuple[tuple[str, Role], ...]:
        """(name or "", role)."""
        return (
            (self.kubernetes_service, Role.MIXED),
            (self.kubernetes_prefill_service, Role.PREFILL),
            (self.kubernetes_decode_service, Role.DECODE),
        )

    @property
    def kubernetes_selectors(self) -> tuple[tuple[str, Role], ...]:
        """(selector or "", role)."""
        return (
            (self.kubernetes_selector, Role.MIXED),
            (self.kubernetes_prefill_selector, Role.PREFILL),
            (self.kubernetes_decode_selector, Role.DECODE),
        )

    def _check_kubernetes(self) -> None:
        services, selectors = self.kubernetes_services, self.kubernetes_selectors
        (mixed, prefill, decode) = (
            bool(service) + bool(selector)
            for (service, _), (selector, _) in zip(services, selectors, strict=True)
        )
        if max(mixed, prefill, decode) > 1:
            raise ConfigError(
                "engines of one role are found by their Service or by their pods' labels, not both"
            )
        if not (mixed or (prefill and decode)):
            raise ConfigError(
                "--discovery.source kubernetes needs --discovery.kubernetes-service or --selector; for pools "
                "--discovery.kubernetes-prefill-service and --discovery.kubernetes-decode-service, or "
                "--prefill-selector and --decode-selector"
            )
        if mixed and (prefill or decode):
            raise ConfigError(
                "the Service or selector of engines that do everything cannot be mixed with those of prefill "
                "and decode"
            )
        for selector, _ in selectors:
            if any(not term.partition("=")[0].strip() for term in selector.split(",") if selector):
                raise ConfigError(f"selector {selector!r}: write labels as KEY=VALUE,KEY=VALUE")
