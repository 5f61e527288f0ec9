"""HTTP/1.1 on raw asyncio protocols and httptools: bytes pass verbatim, parsers only find message ends."""
