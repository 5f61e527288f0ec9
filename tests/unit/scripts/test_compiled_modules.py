"""What setup.py has compiled: mypyc takes what it cannot compile for something else, and says nothing."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Bases whose class arguments or metaclass mypyc does not keep.
NOT_NATIVE = {"Struct", "NamedTuple", "TypedDict"}


def setup_module_of_the_package() -> "tuple[tuple[str, ...], list[str]]":
    spec = importlib.util.spec_from_file_location("suite_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.COMPILED, module.compiled_paths()


PATTERNS, PATHS = setup_module_of_the_package()


def classes_of(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Each class and the last names of its bases."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            yield node.name, bases


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_finds_something(pattern: str) -> None:
    assert list(ROOT.glob(pattern))


@pytest.mark.parametrize("path", PATHS)
def test_compiled_modules_hold_no_structs(path: str) -> None:
    for name, bases in classes_of(ROOT / path):
        assert not bases & NOT_NATIVE, f"{name} belongs into a module of its own, which is not compiled"


def test_classes_derived_from_compiled_ones_are_compiled_too() -> None:
    ours = {name for path in PATHS for name, bases in classes_of(ROOT / path) if "Protocol" not in bases}
    for package in ("router", "kvsim"):
        for path in (ROOT / package).rglob("*.py"):
            if str(path.relative_to(ROOT)) not in PATHS:
                derived = {name for name, bases in classes_of(path) if bases & ours}
                assert not derived, f"{path.name}: {derived}"
