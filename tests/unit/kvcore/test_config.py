import argparse
import json
import logging
from typing import Annotated

import msgspec
import pytest

from kvcore.config import add_flags, flag_overrides, load_config
from kvcore.errors import ConfigError


class Limits(msgspec.Struct, frozen=True):
    max_keys: int = 100
    max_body_bytes: int = 1 << 20


class App(msgspec.Struct, frozen=True):
    pool_size_bytes: Annotated[int, msgspec.Meta(description="size of the pool, 10% spare")]
    lease_ms: int = 5000
    host: str = "127.0.0.1"
    planes: tuple[str, ...] = ("tcp",)
    verify: bool = False
    limits: Limits = Limits()


def load(**kwargs):
    return load_config(App, **kwargs)


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path):
    path = tmp_path / "app.toml"
    path.write_text('pool_size_bytes = "4gb"\nlease_ms = "30s"\nhost = "file"\n[limits]\nmax_keys = 7\n')
    environ = {"APP_HOST": "env", "APP_LIMITS_MAX_KEYS": "8", "APP_LEASE_MS": "250ms", "OTHER": "x"}
    config = load(file=path, env_prefix="APP", environ=environ, overrides={"host": "flag", "lease_ms": None})
    assert config == App(4 << 30, 250, "flag", limits=Limits(max_keys=8))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps({"pool_size_bytes": 5, "limits": {"max_body_bytes": "1k"}})),
        ("a.yaml", "pool_size_bytes: 5\nlimits:\n  max_body_bytes: 1k\n"),
        ("a.toml", 'pool_size_bytes = 5\nlimits.max_body_bytes = "1k"\n'),
    ],
)
def test_the_three_file_formats_mean_the_same(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert load(file=path) == App(5, limits=Limits(max_body_bytes=1024))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "pool_size_byte = 5",
            r"app.toml: unknown key 'pool_size_byte' \(did you mean 'pool_size_bytes'",
        ),
        ("pool_size_bytes = 5\n[limits]\nmax_kes = 3", r"limits: unknown key 'max_kes' .*'max_keys'"),
        ("pool_size_bytes = '5 parsecs'", "app.toml: pool_size_bytes: not a size"),
        ("pool_size_bytes = 5\nlease_ms = 'soon'", "app.toml: lease_ms: not a duration"),
        ("pool_size_bytes = 5\nverify = 'yes'", "app.toml: verify = 'yes'"),
        ("pool_size_bytes = 5\nlimits = 3", "'limits' is a table"),
        ("lease_ms = 5", "app.toml: .*missing required field `pool_size_bytes`"),
        ("pool_size_bytes = = 5", "app.toml: "),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, text, complaint):
    path = tmp_path / "app.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load(file=path)


def test_files_that_cannot_be_read_or_parsed_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=tmp_path / "absent.toml")
    binary = tmp_path / "app.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"app.toml: is not text in UTF-8"):
        load(file=binary)
    odd = tmp_path / "app.ini"
    odd.write_text("x")
    with pytest.raises(ConfigError, match=r"unknown suffix '.ini'"):
        load(file=odd)
    listed = tmp_path / "app.json"
    listed.write_text("[1]")
    with pytest.raises(ConfigError, match="table of keys is expected"):
        load(file=listed)


def test_environment_strings_become_the_fields_types(caplog):
    environ = {
        "APP_POOL_SIZE_BYTES": "1gb",
        "APP_VERIFY": "true",
        "APP_PLANES": "shm, tcp",
        "APP_HOTS": "typo",
        "APP_PORT_8080_TCP_ADDR": "a cluster's own",
    }
    with caplog.at_level(logging.WARNING):
        config = load(env_prefix="APP_", environ=environ)
    assert config == App(1 << 30, planes=("shm", "tcp"), verify=True)
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable APP_HOTS is not known (did you mean 'APP_HOST'?)"
    ]
    caplog.clear()
    assert load(env_prefix="APP_", environ=environ, others=("APP_HOTS",)) == config
    assert not caplog.records
    with pytest.raises(ConfigError, match="environment variable APP_LEASE_MS: lease_ms"):
        load(env_prefix="APP", environ={"APP_LEASE_MS": "tcp://10.0.0.1:80"})


def test_flags_come_from_the_schema():
    parser = argparse.ArgumentParser()
    add_flags(parser, App)
    assert "size of the pool, 10% spare (required)" in parser.format_help()
    args = parser.parse_args(["--pool-size-bytes", "2mb", "--verify", "--limits.max-keys", "3"])
    assert load(overrides=flag_overrides(App, args)) == App(2 << 20, verify=True, limits=Limits(max_keys=3))
    with pytest.raises(ConfigError, match="unknown key 'hots'"):
        load(overrides={"hots": "x"})
