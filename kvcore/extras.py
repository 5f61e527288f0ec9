"""Programs whose packages pip installs only when asked for them by an extra, and how they begin."""

import importlib
import os
import sys

_OURS = ("kvcore", "store_server", "router", "kvsim", "mooncake_connector", "sglang_hicache_backend")


def missing_package(program: str, extra: str, error: ModuleNotFoundError) -> str:
    """What to tell who starts `program` without the packages of `extra`. Raises `error` for a module of our
    own, which no pip will bring."""
    if (error.name or "").split(".")[0] in _OURS:
        raise error
    return f"{program}: {error}. Install what it needs: pip install 'mooncake-kv-suite[{extra}]'"


def start(program: str, extra: str, module: str) -> int:
    """The exit status of `main` of `module`; 2, with what to install, without the packages of `extra`."""
    try:
        run = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        print(missing_package(program, extra, error), file=sys.stderr)
        return 2
    try:
        status: int = run()
    except BrokenPipeError:
        return output_closed()
    return status


def output_closed() -> int:
    """The exit status when whoever read our output (`head`) has seen enough. The interpreter would complain
    about the rest of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
