"""The remote level: an object store or a Redis/Valkey server below DRAM and SSD, shared by several stores."""

from store_server.remote.config import RemoteConfig
from store_server.remote.tier import RemoteTier

__all__ = ["RemoteConfig", "RemoteTier"]
