"""Settings named by dotted paths: what `--set`, `compare` and `sweep` change in a configuration."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.config import load_config, read_file
from kvcore.errors import ConfigError
from kvsim.config import SimConfig


def parse_assignment(text: str) -> tuple[str, list[str]]:
    """ "cluster.prefill_nodes=4,8,12" -> its name and values."""
    name, separator, values = text.partition("=")
    if not separator or not name.strip() or not values:
        raise ConfigError(f"{text!r}: write NAME=VALUE, for example cluster.prefill_nodes=8")
    return name.strip(), [value.strip() for value in values.split(",")]


def configure(file: str, overrides: Mapping[str, Any], beside: str = "") -> SimConfig:
    """The file's configuration, or the defaults when `file` is empty; the trace's path is relative to the
    working directory first and to the file, or else `beside`, second."""
    config = load_config(SimConfig, file=file or None, overrides=dict(overrides))
    path, folder = config.trace.path, Path(file or beside).parent
    if path and not Path(path).exists() and (found := folder / path).exists():
        return load_config(SimConfig, file=file or None, overrides={**overrides, "trace.path": str(found)})
    return config


def variants(
    file: str, overrides: Mapping[str, Any], axes: Sequence[tuple[str, list[str]]]
) -> list[SimConfig]:
    """One configuration for each combination of the axes' values, named after what is different. An axis
    "a:b" with values "4:12" changes two settings together."""
    found = []
    for values in itertools.product(*(values for _, values in axes)):
        chosen: dict[str, str] = {}
        for (name, _), value in zip(axes, values, strict=True):
            names, parts = name.split(":"), value.split(":")
            if len(names) != len(parts):
                raise ConfigError(f"{name}={value}: as many values as names are needed, divided by colons")
            chosen.update(zip(names, parts, strict=True))
        label = ", ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in chosen.items())
        found.append(configure(file, {**overrides, **chosen, "name": label}))
    return found


def comparison(file: str, overrides: Mapping[str, Any]) -> list[SimConfig]:
    """A file with a `[base]` table and `[[runs]]`, each with a name and what it changes: dotted names."""
    tables = read_file(Path(file))
    runs: Any = tables.get("runs")
    base = tables.get("base", {})
    is_list = isinstance(runs, list) and runs and all(isinstance(run, Mapping) for run in runs)
    if not is_list or not isinstance(base, Mapping) or set(tables) - {"base", "runs"}:
        raise ConfigError(f"{file}: a comparison has a [base] table and [[runs]], nothing else")
    return [configure("", {**flatten(base), **flatten(run), **overrides}, beside=file) for run in runs]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
