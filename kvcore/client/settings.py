"""What every engine plugin is told about its store. Each plugin's configuration adds its own keys."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcore.transport.protocol import planes_of


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store_address: Annotated[
        str, Meta(description="where mooncake-store listens: host:port, tls://host:port or unix:///path")
    ] = "127.0.0.1:50051"
    store_token: Annotated[str, Meta(description="the store's access token, if it wants one")] = ""
    store_tls_ca: Annotated[
        str, Meta(description="for tls://: file of certificates to trust; empty: the system's")
    ] = ""
    store_tls_cert: Annotated[str, Meta(description="file of our certificate, if the store wants one")] = ""
    store_tls_key: Annotated[str, Meta(description="file of its private key")] = ""
    protocol: Annotated[
        str, Meta(description="auto and rdma: rdma, else shm, else tcp; shm: that, else tcp; tcp")
    ] = "auto"
    device_name: Annotated[
        str, Meta(description="RDMA devices, comma-separated; empty: all whose port is up")
    ] = ""
    planes: Annotated[
        list[str],
        Meta(description="how bytes may move, best first; empty: as the protocol says"),
    ] = msgspec.field(default_factory=list)
    tenant: Annotated[str, Meta(min_length=1, description="engines of different tenants never share")] = (
        "default"
    )
    weights_id: Annotated[
        str,
        Meta(description="identity of the weights; empty: revision, or a digest of the checkpoint's files"),
    ] = ""

    def client_options(self) -> dict[str, Any]:
        """For StoreClient, besides the address and the client's name. ConfigError for an unknown protocol."""
        return {
            "token": self.store_token,
            "planes": planes_of(self.protocol, self.planes),
            "device_name": self.device_name,
            "tls_ca": self.store_tls_ca,
            "tls_cert": self.store_tls_cert,
            "tls_key": self.store_tls_key,
        }
