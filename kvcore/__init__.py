"""The one package that stores, plugins and the router share. Pure Python over msgspec, xxhash and numpy."""

__version__ = "0.1.0"
