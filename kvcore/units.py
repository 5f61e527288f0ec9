"""Sizes and durations as people write them: "4gb", "512 MiB", "30s", "250ms"."""

import re

from kvcore.errors import ConfigError

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATIONS_MS = {"ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3, "h": 3600e3, "d": 86400e3}
_NUMBER_UNIT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def parse_size_bytes(text: str | int) -> int:
    """Bytes. Units are binary, as Mooncake's users write them: "4gb" = "4GiB" = "4g" = 4 * 2**30."""
    if isinstance(text, int):
        return text
    match = _NUMBER_UNIT.match(text)
    if match:
        unit = match[2].lower().removesuffix("b").removesuffix("i")
        if unit in _SIZES:
            return int(float(match[1]) * _SIZES[unit])
    raise ConfigError(f"not a size: {text!r} (write bytes, or for example '512mb', '4gb')")


def format_objects(count: int) -> str:
    """For people: "1 object", "2,000 objects"."""
    return f"{count:,} object{'' if count == 1 else 's'}"


def parse_duration_ms(text: str | int | float) -> float:
    """Milliseconds. A bare number is milliseconds."""
    if isinstance(text, (int, float)):
        return float(text)
    match = _NUMBER_UNIT.match(text)
    if match and (match[2].lower() or "ms") in _DURATIONS_MS:
        return float(match[1]) * _DURATIONS_MS[match[2].lower() or "ms"]
    raise ConfigError(f"not a duration: {text!r} (write milliseconds, or for example '30s', '250ms')")


def format_size(size_bytes: float) -> str:
    """For people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
