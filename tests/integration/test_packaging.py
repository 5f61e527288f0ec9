"""The wheel as a user gets it: what is in it, and that each part stands without the others' dependencies."""

import configparser
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kvcore", "kvsim", "mooncake_connector", "router", "sglang_hicache_backend", "store_server"}
CORE_DEPENDENCIES = {"msgspec", "numpy", "tomli", "xxhash"}  # tomli before Python 3.11 only


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools leaves build/ and an egg-info folder in what it builds from.
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, ignore=ignored, dirs_exist_ok=True)
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel in it, and the third-party packages we run with."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    third_party = Path(msgspec.__file__).parent.parent
    (site_packages / "third_party.pth").write_text(f"{third_party}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def run_isolated(installed: Path, code: str) -> object:
    done = subprocess.run(
        [str(installed / "python"), "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == PACKAGES
    modules = [name for name in names if not name.split("/")[0].endswith(".dist-info")]
    assert not [name for name in modules if "test" in name.lower()]
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    static = (ROOT / "router" / "dashboard" / "static").iterdir()
    assert {f"router/dashboard/static/{file.name}" for file in static} <= set(names)


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(metadata_name).decode())
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(metadata_name.replace("METADATA", "entry_points.txt")).decode())
        assert archive.read(metadata_name.replace("METADATA", "licenses/LICENSE"))
    assert metadata["Name"] == "mooncake-kv-suite"
    required = [item for item in metadata.get_all("Requires-Dist", []) if "extra ==" not in item]
    assert {item.split(">=")[0] for item in required} == CORE_DEPENDENCIES
    assert dict(entry_points["console_scripts"]) == {
        "mooncake-store": "store_server.cli:main",
        "mooncake-router": "router.start:main",
        "mooncake-sim": "kvsim.start:main",
    }
    assert dict(entry_points["vllm.general_plugins"]) == {"mooncake_suite": "mooncake_connector:register"}


def test_importing_the_plugin_loads_no_engine_and_no_application(installed: Path) -> None:
    code = (
        "import json, sys, importlib.metadata as m\n"
        "(point,) = m.entry_points(group='vllm.general_plugins', name='mooncake_suite')\n"
        "register = point.load()\n"
        "import mooncake_connector, mooncake_connector.config, mooncake_connector.metadata\n"
        "print(json.dumps([mooncake_connector.__file__, callable(register), sorted(sys.modules)]))"
    )
    loaded = run_isolated(installed, code)
    assert isinstance(loaded, list)
    file, is_callable, modules = loaded
    assert Path(file).is_relative_to(installed.parent)
    assert is_callable
    roots = {module.split(".")[0] for module in modules}
    assert not roots & {"torch", "vllm", "router", "store_server", "kvsim", "uvloop", "aiohttp"}


def test_top_level_names_belong_to_us_alone(installed: Path) -> None:
    code = (
        "import json, importlib.metadata as m\n"
        f"owners = m.packages_distributions()\n"
        f"print(json.dumps({{name: sorted(set(owners[name])) for name in {sorted(PACKAGES)!r}}}))"
    )
    assert run_isolated(installed, code) == {name: ["mooncake-kv-suite"] for name in PACKAGES}


@pytest.mark.parametrize("command", ["mooncake-store", "mooncake-router", "mooncake-sim"])
def test_console_script_explains_itself(installed: Path, command: str) -> None:
    done = subprocess.run([str(installed / command), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["mooncake-store", "stats"], "store"),
        (["mooncake-router", "--help"], "router"),
        (["mooncake-sim", "--help"], "sim"),
    ],
)
def test_a_program_without_its_packages_says_what_to_install(
    wheel: Path, tmp_path: Path, command: list[str], extra: str
) -> None:
    """With the packages of the core alone, as `pip install mooncake-kv-suite` leaves it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for name in ("msgspec", "xxhash", "numpy"):
        home = Path(str(importlib.util.find_spec(name).origin)).parent  # type: ignore[union-attr]
        (tmp_path / name).symlink_to(home)
        for beside in home.parent.glob(f"{name}.libs"):
            (tmp_path / beside.name).symlink_to(beside)
    entry_points = configparser.ConfigParser()
    (file,) = tmp_path.glob("*.dist-info/entry_points.txt")
    entry_points.read_string(file.read_text())
    module, _, function = entry_points["console_scripts"][command[0]].partition(":")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = {command!r}\n"
        f"from {module} import {function}; sys.exit({function}())"
    )
    bare = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'mooncake-kv-suite[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
