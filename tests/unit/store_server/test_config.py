import re
from pathlib import Path

import pytest

from kvcore.config import load_config
from store_server.cli import main, make_parser
from store_server.config import StoreConfig
from store_server.pool import available_bytes

GIB = 1 << 30
EXAMPLE = Path(__file__).parents[3] / "configs" / "store.toml"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--pool-size", "100kb"], "at least 1 MiB"),
        (["--pool-size", "much"], "not a size"),
        (["--eviction-policy", "mru"], "is not one of"),
        (["--low-watermark", "0.99"], "low_watermark"),
        (["--planes", "tcp,carrier-pigeon"], "carrier-pigeon"),
        (["--planes", "shm"], "tcp must be among them"),
        (["--slab-bytes", "5000"], "power of two"),
        (["--max-keys", "0"], "max_keys"),
        (["--log-level", "loud"], "log_level"),
        (["--config", "/nowhere/store.toml"], "cannot be read"),
    ],
)
def test_a_mistake_is_explained_before_anything_starts(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_the_defaults_are_a_configuration_that_works() -> None:
    config = StoreConfig()
    config.check()
    assert config.host == config.admin_host == "127.0.0.1"
    assert config.limits().pool_size_bytes == GIB


def test_help_tells_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["serve", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for field in StoreConfig.__struct_fields__:
        assert f"--{field.replace('_', '-')}" in text
    assert "MOONCAKE_STORE_POOL_SIZE_BYTES" in text


def test_available_memory_is_the_least_of_machine_and_control_group() -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n",
        "/sys/fs/cgroup/memory.max": "4294967296\n",
        "/sys/fs/cgroup/memory.current": "3221225472\n",
        "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 1073741824\n",
    }
    assert available_bytes(lambda path: files.get(path, "")) == 2 * GIB
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_bytes(lambda path: files.get(path, "")) == 8 * GIB
    assert available_bytes(lambda path: "") is None


def test_the_example_names_every_setting_with_its_default(tmp_path: Path) -> None:
    example = EXAMPLE.read_text()
    load_config(StoreConfig, file=EXAMPLE).check()
    plain, tables = example.split("# ========")
    settings = "\n".join(re.findall(r"^#?([a-z_]+ = .*)$", plain, re.M))
    everything = tmp_path / "store.toml"
    everything.write_text(settings.replace('"4gb"', '"1gb"'))
    assert load_config(StoreConfig, file=everything) == StoreConfig()
    for name in StoreConfig.__struct_fields__:
        known = rf"(^{name} = |\[{name}\])"
        assert re.search(known, settings + tables, re.M), f"configs/store.toml does not mention {name}"


@pytest.mark.parametrize("name", ["[[storage_levels]]", "[[tenants]]", "[peers]", "[events]"])
def test_each_table_of_the_example_works(name: str, tmp_path: Path) -> None:
    table = re.search(rf"^#{re.escape(name)}\n(#.*\n)+", EXAMPLE.read_text(), re.M)
    assert table is not None
    file = tmp_path / "store.toml"
    file.write_text(re.sub(r"^#(?! )", "", table[0], flags=re.M))
    load_config(StoreConfig, file=file).check()
