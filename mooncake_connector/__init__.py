"""vLLM plugin: KV blocks of this engine are shared with every other engine through `mooncake-store`."""


def register() -> None:
    """Entry point `vllm.general_plugins`; called in every vLLM process, possibly several times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "MooncakeSuiteConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "MooncakeSuiteConnector", "mooncake_connector.connector", "MooncakeSuiteConnector"
        )
