"""The lock files hold what pyproject.toml asks for, in versions it accepts."""

from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
PROJECT_NAME = "mooncake-kv-suite"
PYTHON_3_11 = {"python_version": "3.11", "python_full_version": "3.11.2"}
# The demo and the engine tests run the store and the router from the engine environment too, SGLang's the
# store.
EXTRAS_OF_LOCK = {"dev": ["dev"], "engine": ["store", "router"], "sglang": ["store"]}


def locked_versions(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pins}


def wanted(extras: list[str]) -> list[Requirement]:
    """The project's own requirements and those of the extras; extras that name extras are followed."""
    project = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == PROJECT_NAME:
                found += wanted(sorted(requirement.extras))
            else:
                found.append(requirement)
    return [item for item in found if item.marker is None or item.marker.evaluate(PYTHON_3_11)]


@pytest.mark.parametrize("name", sorted(EXTRAS_OF_LOCK))
def test_lock_satisfies_what_is_asked_for(name: str) -> None:
    locked = locked_versions(name)
    missing = [
        f"{requirement} (locked: {locked.get(canonicalize_name(requirement.name))})"
        for requirement in wanted(EXTRAS_OF_LOCK[name])
        if (version := locked.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(version, prereleases=True)
    ]
    assert not missing, f"run scripts/lock, or pin by hand in requirements/{name}.lock: {missing}"
