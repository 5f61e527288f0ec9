"""Configuration of every application: defaults < file < environment < flags, into a frozen msgspec Struct.

A schema is a Struct whose field names carry their unit: those ending in `_bytes` accept "4gb", those ending
in `_ms` accept "30s" (kvcore/units.py). A field that is a Struct itself is a table of the file, and
PREFIX_TABLE_FIELD in the environment. `Annotated[int, msgspec.Meta(description="...")]` gives a flag its
help.
"""

import argparse
import difflib
import json
import logging
import re
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from kvcore.errors import ConfigError
from kvcore.units import parse_duration_ms, parse_size_bytes

T = TypeVar("T", bound=msgspec.Struct)
logger = logging.getLogger(__name__)

# What Kubernetes puts into every pod beside a Service, also that of the pod itself; <SERVICE>_PORT is a link.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_SERVICE_VARIABLE = re.compile(r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")


def load_config(
    schema: type[T],
    *,
    file: str | Path | None = None,
    env_prefix: str = "",
    environ: Mapping[str, str] | None = None,
    others: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> T:
    """Builds `schema` from a TOML/JSON/YAML file, the environment (PREFIX_FIELD) and overrides (flags).

    `others`: variables with this prefix that are for somebody else, and no typing errors.
    Overrides that are None count as not given; a nested one is a dict or a dotted name ("limits.max_keys").
    ConfigError names the file, variable or flag at fault and, for an unknown key, the nearest known one.
    """
    values: dict[str, Any] = {}
    if file is not None:
        _merge(schema, values, read_file(Path(file)), origin=f"{file}: ", strict=True)
    if environ is not None and env_prefix:
        ours = {name: value for name, value in environ.items() if name not in others}
        _merge_environment(schema, values, env_prefix, ours)
    for name, value in (overrides or {}).items():
        if value is not None:
            head, *rest = reversed(name.split("."))
            table: dict[str, Any] = {head: value}
            for outer in rest:
                table = {outer: table}
            _merge(schema, values, table, origin="", strict=False)
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file or schema.__name__}: {error}") from error


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a .toml, .json, .yaml or .yml file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8: {error}") from error
    parsed: Any
    try:
        if path.suffix == ".toml":
            parsed = msgspec.toml.decode(text)
        elif path.suffix == ".json":
            parsed = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            parsed = msgspec.yaml.decode(text) if text.strip() else {}
        else:
            raise ConfigError(f"{path}: unknown suffix {path.suffix!r} (use .toml, .json, .yaml or .yml)")
    except ImportError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: a table of keys is expected at the top, not {type(parsed).__name__}")
    return parsed


def add_flags(parser: argparse.ArgumentParser, schema: type[msgspec.Struct], _prefix: str = "") -> None:
    """One `--field-name` flag a field (`--table.field-name` for tables), for `flag_overrides` to collect.

    No flag has an argparse default: what was not given must not hide the file's value.
    """
    for field in msgspec.structs.fields(schema):
        kind, description = _unwrap(field.type)
        flag = f"--{_prefix}{field.name.replace('_', '-')}"
        if _is_struct(kind):
            add_flags(parser, kind, f"{_prefix}{field.name.replace('_', '-')}.")
            continue
        default = "required" if field.required else f"default: {_default_text(field)}"
        help_text = f"{description} ({default})".strip().replace("%", "%%")
        dest = f"{_prefix}{field.name}".replace("-", "_")
        if kind is bool:
            parser.add_argument(
                flag, dest=dest, default=None, action=argparse.BooleanOptionalAction, help=help_text
            )
        else:
            metavar = field.name.rsplit("_", 1)[-1].upper()
            parser.add_argument(flag, dest=dest, default=None, metavar=metavar, help=help_text)


def flag_overrides(schema: type[msgspec.Struct], args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, by (dotted) field name."""
    given = vars(args)
    return {name: given[name] for name in _leaf_names(schema) if given.get(name) is not None}


def _merge(schema: Any, into: dict[str, Any], table: Mapping[str, Any], *, origin: str, strict: bool) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(schema)}
    for key, raw in table.items():
        if key not in fields:
            table_name = f"{origin[:-1]}: " if origin.endswith(".") else origin
            raise ConfigError(f"{table_name}unknown key {key!r}{_nearest(key, fields)}")
        kind, _ = _unwrap(fields[key].type)
        if _is_struct(kind):
            if not isinstance(raw, Mapping):
                raise ConfigError(f"{origin}{key!r} is a table of keys, not {raw!r}")
            _merge(kind, into.setdefault(key, {}), raw, origin=f"{origin}{key}.", strict=strict)
        else:
            into[key] = _convert(key, raw, fields[key].type, origin, strict)


def _merge_environment(
    schema: type[msgspec.Struct], into: dict[str, Any], prefix: str, environ: Mapping[str, str]
) -> None:
    prefix = prefix if prefix.endswith("_") else prefix + "_"
    names = {prefix + name.replace(".", "_").upper(): name for name in _leaf_names(schema)}
    for variable in sorted(environ):
        if variable not in names:
            # Not refused: others may use the prefix as well.
            is_ours = variable.startswith(prefix) and not _SERVICE_VARIABLE.search(variable)
            if is_ours and (near := _nearest(variable, names)):
                logger.warning("environment variable %s is not known%s", variable, near)
            continue
        if variable.endswith("_PORT") and _SERVICE_LINK.match(environ[variable]):
            continue
        *outer, leaf = names[variable].split(".")
        table: dict[str, Any] = {leaf: environ[variable]}
        for name in reversed(outer):
            table = {name: table}
        _merge(schema, into, table, origin=f"environment variable {variable}: ", strict=False)


def _convert(key: str, raw: Any, kind: Any, origin: str, strict: bool) -> Any:
    value = raw
    try:
        if key.endswith("_bytes") and isinstance(raw, str):
            value = parse_size_bytes(raw)
        elif key.endswith("_ms") and isinstance(raw, str):
            value = parse_duration_ms(raw)
            value = int(value) if value.is_integer() else value
        elif not strict and isinstance(raw, str) and get_origin(_unwrap(kind)[0]) in (list, tuple):
            is_json = raw.lstrip().startswith("[")
            value = json.loads(raw) if is_json else [item.strip() for item in raw.split(",") if item.strip()]
        return msgspec.convert(value, kind, strict=strict)
    except (ConfigError, json.JSONDecodeError) as error:
        raise ConfigError(f"{origin}{key}: {error}") from error
    except msgspec.ValidationError as error:
        inner = _unwrap(kind)[0]
        choices = f" (one of {', '.join(map(str, get_args(inner)))})" if get_origin(inner) is Literal else ""
        raise ConfigError(f"{origin}{key} = {raw!r}: {error}{choices}") from error


def _unwrap(kind: Any) -> tuple[Any, str]:
    """The type without Annotated and Optional, and the description of its Meta."""
    description = ""
    while True:
        if get_origin(kind) is Annotated:
            metas = [item for item in get_args(kind)[1:] if isinstance(item, msgspec.Meta)]
            description = next((meta.description for meta in metas if meta.description), description)
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, types.UnionType):
            alternatives = [item for item in get_args(kind) if item is not type(None)]
            if len(alternatives) != 1:
                return kind, description
            kind = alternatives[0]
        else:
            return kind, description


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _leaf_names(schema: Any) -> list[str]:
    names: list[str] = []
    for field in msgspec.structs.fields(schema):
        kind, _ = _unwrap(field.type)
        if _is_struct(kind):
            names += [f"{field.name}.{inner}" for inner in _leaf_names(kind)]
        else:
            names.append(field.name)
    return names


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory() if callable(field.default_factory) else None
    if isinstance(default, (list, tuple)):
        default = ",".join(map(str, default))
    return "none" if default in (None, "") else str(default)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
