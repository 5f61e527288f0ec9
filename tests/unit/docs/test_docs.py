"""What the documents say exists: links, files, settings, and flags of our programs."""

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

import kvsim.cli
import router.cli
import store_server.cli
from kvsim.config import SimConfig
from router.config import RouterConfig
from store_server.config import StoreConfig

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "tests/data/*.md")
    for path in ROOT.glob(pattern)
)
# Changelog and decisions tell of what once was.
MANUALS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md" and path.parent.name != "adr"]
PARSERS = {
    "mooncake-store": store_server.cli.make_parser,
    "mooncake-router": router.cli.make_parser,
    "mooncake-sim": kvsim.cli.make_parser,
}
# Subcommands of the router, which parse for themselves.
ROUTER_COMMANDS = {"profile": "router/profile.py", "register": "router/register.py"}
# Of vLLM and SGLang, named without a command line around them. The documents about the two are full of such.
FOREIGN_FLAGS = {
    "--disable-sliding-window",
    "--disaggregation-mode",
    "--enable-prompt-tokens-details",
    "--enable-return-routed-experts",
    "--enable-scale-out",
    "--kv-events-config",
    "--kv-transfer-config",
    "--max-model-len",
}
ENGINES_DOCUMENTS = {"sglang.md", "vllm.md"}
# Look like settings and are files or attributes.
NO_SETTINGS = {"engine.lock", "engine.reason", "peers.py"}

in_manuals = pytest.mark.parametrize("path", MANUALS, ids=lambda path: str(path.relative_to(ROOT)))


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def inline_code(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_fences(text))]


def command_lines(text: str) -> Iterator[str]:
    """Of fenced and indented blocks, with lines that go on in the next joined."""
    is_fenced, begun = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            begun += line.strip().removeprefix("$ ")
            if begun.endswith("\\"):
                begun = begun[:-1] + " "
                continue
            yield begun
            begun = ""


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", without_fences(path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(path.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@in_manuals
def test_files_that_are_named_are_there(path: Path) -> None:
    folders = "|".join(sorted(one.name for one in ROOT.iterdir() if one.is_dir() and one.name[0] != "."))
    for code in inline_code(path.read_text()):
        for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*\w", code):
            assert any(ROOT.glob(name)) or any(ROOT.glob(f"{name}*")), name


@in_manuals
def test_command_lines_are_understood(path: Path) -> None:
    text = path.read_text()
    lines = [(line, True) for line in command_lines(text)] + [(code, False) for code in inline_code(text)]
    for line, is_whole in lines:
        for command in re.findall(r"(?<![\w/.-])(mooncake-(?:store|router|sim) [\w./-].*)", line):
            program, *words = shlex.split(re.split(r" [|&>]", command)[0], comments=True)
            if words and not {"--help", "--version"} & set(words):
                check_command(program, words, is_whole)


def check_command(program: str, words: list[str], is_whole: bool) -> None:
    """Of one that is not whole, in the middle of a sentence, only what it is to do."""
    if program == "mooncake-router" and words[0] in ROUTER_COMMANDS:
        source = (ROOT / ROUTER_COMMANDS[words[0]]).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--")), words
        return
    parser = PARSERS[program]()
    if is_whole:
        try:
            parser.parse_args(words)
        except SystemExit as error:
            raise AssertionError(f"{program} {shlex.join(words)}") from error
    elif not words[0].startswith("-"):
        assert words[0] in next(action.choices for action in parser._actions if action.choices)


@cache
def known_flags() -> frozenset[str]:
    """Those of our three programs, and every one that a script or a benchmark writes out."""
    found = {flag for make_parser in PARSERS.values() for flag in _flags_of(make_parser())}
    for folder in ("scripts", "benchmarks", "kvcore/verify", "router"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and (file.suffix == ".py" or "." not in file.name):
                found |= set(re.findall(r"--[a-z][\w.-]*\w", file.read_text(errors="replace")))
    return frozenset(found)


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _flags_of(one)


@in_manuals
def test_flags_exist(path: Path) -> None:
    known = FOREIGN_FLAGS | known_flags()
    for code in inline_code(path.read_text()) if path.name not in ENGINES_DOCUMENTS else ():
        if re.match(r"(vllm|python|curl|pip|docker) ", code):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w(?![\w*-])", code):
            assert flag in known, flag


def tables(schema: type[msgspec.Struct]) -> dict[str, set[str]]:
    """The names in each table of a configuration."""
    found = {}
    for field in msgspec.structs.fields(schema):
        kinds = [field.type, *getattr(field.type, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found[field.name] = {one.name for one in msgspec.structs.fields(kind)}
    return found


@in_manuals
def test_settings_exist(path: Path) -> None:
    known: dict[str, set[str]] = {}
    for schema in (StoreConfig, RouterConfig, SimConfig):
        for table, names in tables(schema).items():
            known.setdefault(table, set()).update(names)
    assert {"scheduling", "peers", "cluster"} <= known.keys()
    for code in inline_code(path.read_text()):
        for table, name in re.findall(r"(?<![\w./-])([a-z_]+)\.([a-z]\w+)\b(?![(/.])", code):
            if table in known and f"{table}.{name}" not in NO_SETTINGS:
                assert name in known[table], f"{table}.{name}"
