"""The store from an event loop: many requests in flight on one connection, answers in any order.

usage: python examples/asyncio_client.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import asyncio
import sys

from kvcore.client.async_client import AsyncStoreClient


async def main(address: str) -> None:
    async with await AsyncStoreClient.connect(address) as client:
        if not client.connected:
            sys.exit(f"no store at {address}: {client.last_error}")
        keys = [f"async {number}" for number in range(100)]
        statuses = await asyncio.gather(*(client.put(key, key.encode()) for key in keys))
        print("put:", {status.name for status in statuses})
        values = await asyncio.gather(*(client.get(key) for key in keys))
        print("got:", sum(value == key.encode() for key, value in zip(keys, values, strict=True)), "right")
        print(
            "there:",
            sum(await client.batch_exists([*keys, "absent"])),
            "- absent:",
            await client.get("absent"),
        )
        stats = await client.stats()
        print("objects in the store:", int(stats["objects"]))
        await asyncio.gather(*(client.remove(key) for key in keys))
        print("left:", sum(await client.batch_exists(keys)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
