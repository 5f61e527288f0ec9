"""`mooncake-store`: one command to run a store, and those that ask a running one."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcore import __version__
from kvcore.config import add_flags, flag_overrides, load_config
from kvcore.errors import ConfigError
from store_server.config import ENV_PREFIX, StoreConfig

_DESCRIPTION = """\
A DRAM store for the KV blocks of LLM engines. Engines on this host share its memory, others use TCP.

  mooncake-store serve --pool-size 64gb            run a store on 127.0.0.1:50051
  mooncake-store stats                             how full it is, what it does
  mooncake-store bench                             how fast it is from here
"""

_SERVE_EPILOG = """\
Everything can also be set in a file (--config store.toml; flags win) or in the environment
(MOONCAKE_STORE_POOL_SIZE_BYTES=64gb). Sizes accept "64gb", durations "30s".

The admin port answers /health, /ready, /metrics (Prometheus) and /stats (JSON).
To let other hosts in: --host 0.0.0.0 together with MOONCAKE_STORE_TOKEN=secret.
"""


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mooncake-store", description=_DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mooncake-store {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run a store", epilog=_SERVE_EPILOG, formatter_class=raw)
    serve.add_argument("--config", metavar="FILE", help="a .toml, .json or .yaml file")
    serve.add_argument("--ready-file", metavar="FILE", help="addresses as JSON, written when listening")
    add_flags(serve, StoreConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when something failed, 2 for a mistake in flags or configuration."""
    args = make_parser().parse_args(argv)
    try:
        return _serve(args)
    except ConfigError as error:
        print(f"mooncake-store: {error}", file=sys.stderr)
        return 2


def _serve(args: argparse.Namespace) -> int:
    # Not at the top: the other commands must not wait for uvloop and aiohttp.
    from store_server.serve import serve

    config = load_config(
        StoreConfig,
        file=args.config,
        env_prefix=ENV_PREFIX,
        environ=os.environ,
        overrides=flag_overrides(StoreConfig, args),
    )
    try:
        serve(config, Path(args.ready_file) if args.ready_file else None)
    except OSError as error:
        print(f"mooncake-store: cannot listen: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
