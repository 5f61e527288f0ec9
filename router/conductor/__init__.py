"""The router as an index for other routers: the HTTP interface of Mooncake's Conductor."""
