"""`mooncake-store`: one command to run a store, and those that ask a running one."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore import __version__
from kvcore.config import add_flags, flag_overrides, load_config
from kvcore.errors import ConfigError, KVError
from kvcore.extras import missing_package, output_closed
from kvcore.units import parse_size_bytes
from kvcore.wire.messages import EvictStrategy
from store_server.config import ENV_PREFIX, StoreConfig

if TYPE_CHECKING:
    from kvcore.client.sync_client import StoreClient

_DESCRIPTION = """\
A DRAM store for the KV blocks of LLM engines. Engines on this host share its memory, others use TCP.

  mooncake-store serve --pool-size-bytes 64gb      run a store on 127.0.0.1:50051
  mooncake-store stats                             how full it is, what it does
  mooncake-store ls --limit 20                     which blocks it holds
  mooncake-store evict 8gb                         make 8 GiB free
  mooncake-store bench                             how fast it is from here
  mooncake-store top                               the same, as it happens
  mooncake-store verify                            check every checksum; PATH: of a stopped store
  mooncake-store drain --stop                      take nothing new, save DRAM to SSD, end
"""

_SERVE_EPILOG = """\
Everything can also be set in a file (--config store.toml; flags win) or in the environment
(MOONCAKE_STORE_POOL_SIZE_BYTES=64gb). Sizes accept "64gb", durations "30s".

The admin port answers /health, /ready, /metrics (Prometheus) and /stats (JSON).
To let other hosts in: --host 0.0.0.0 together with MOONCAKE_STORE_TOKEN=secret.
"""

_ADDRESS_VARIABLE = f"{ENV_PREFIX}_ADDRESS"
_TOKEN_VARIABLE = f"{ENV_PREFIX}_TOKEN"


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mooncake-store", description=_DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mooncake-store {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run a store", epilog=_SERVE_EPILOG, formatter_class=raw)
    serve.add_argument("--config", metavar="FILE", help="a .toml, .json or .yaml file")
    serve.add_argument("--ready-file", metavar="FILE", help="addresses as JSON, written when listening")
    add_flags(serve, StoreConfig)
    serve.set_defaults(run=_serve)

    def asking(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument(
            "--address",
            default=os.environ.get(_ADDRESS_VARIABLE, "127.0.0.1:50051"),
            help="HOST:PORT, tls://HOST:PORT or unix:///PATH of the store "
            f"(default: ${_ADDRESS_VARIABLE}, or %(default)s)",
        )
        command.add_argument(
            "--token", default=os.environ.get(_TOKEN_VARIABLE, ""), help=f"(default: ${_TOKEN_VARIABLE})"
        )
        for name, text in (
            ("ca", "trust these certificates, for tls:// (default: those of the system)"),
            ("cert", "our own certificate, if the store asks for one"),
            ("key", "its private key"),
        ):
            command.add_argument(f"--tls-{name}", default="", metavar="FILE", help=text)
        command.add_argument("--json", action="store_true", help="for scripts")
        command.set_defaults(run=run)
        return command

    asking("stats", _stats, "how full the store is and what it has done")
    ls = asking("ls", _ls, "the objects in the store, with their state")
    ls.add_argument("prefix", nargs="?", default="", help="hex digits that keys begin with (default: all)")
    ls.add_argument("--limit", type=int, default=100, help="show so many at most, 0: all (default: 100)")
    evict = asking("evict", _evict, "make room; objects in use or pinned hard stay")
    evict.add_argument("size", nargs="?", default="", help="how much is to be free (default: all)")
    evict.add_argument(
        "--strategy",
        choices=[strategy.name.lower() for strategy in EvictStrategy],
        default="save",
        help="save what no lower level has, take only what has copies there, or discard (default: save)",
    )
    bench = asking("bench", _bench, "measure put, get and exists from here; what it stores it removes")
    bench.add_argument("--sizes", default="4kb,64kb,1mb,16mb", help="of values (default: %(default)s)")
    bench.add_argument("--seconds", type=float, default=1.0, help="for each figure (default: 1)")
    bench.add_argument(
        "--plane", choices=("rdma", "shm", "tcp"), default="shm", help="each falls back to tcp"
    )
    top = asking("top", _top, "hit rate, bytes by tier, throughput, evictions, clients, as they change")
    top.add_argument("--interval", type=float, default=1.0, help="seconds between views (default: 1)")
    top.add_argument("--count", type=int, default=0, help="views to show, 0: until Ctrl-C (default: 0)")
    verify = asking("verify", _verify, "check every checksum, on all levels; what is corrupt is dropped")
    verify.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="SSD paths of a stopped store, instead of a running one",
    )
    verify.add_argument(
        "--config",
        metavar="FILE",
        help="of a stopped store: checks its SSD paths and its remote, instead of a running one",
    )
    verify.add_argument(
        "--remote-rate",
        default="100mb",
        metavar="SIZE",
        help="how much of the remote level is read in a second, 0: leave it out (default: %(default)s)",
    )
    drain = asking("drain", _drain, "take no new objects and save DRAM to SSD; readers are still served")
    drain.add_argument("--stop", action="store_true", help="end the store when it is done")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when something failed, 2 for a mistake in flags or configuration."""
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
    except KVError as error:
        print(f"mooncake-store: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        print(missing_package("mooncake-store", "store", error), file=sys.stderr)
        return 2
    except BrokenPipeError:
        return output_closed()
    except OSError as error:
        print(f"mooncake-store: cannot listen: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mooncake-store: interrupted", file=sys.stderr)
        return 130
    return 0


# What a command needs is imported with it: `stats` must not wait for uvloop, nor `serve` for the client.


def _serve(args: argparse.Namespace) -> None:
    from store_server.serve import serve

    config = _config(args, flag_overrides(StoreConfig, args))
    serve(config, Path(args.ready_file) if args.ready_file else None)


def _config(args: argparse.Namespace, overrides: Mapping[str, object] | None = None) -> StoreConfig:
    return load_config(
        StoreConfig,
        file=args.config,
        env_prefix=ENV_PREFIX,
        environ=os.environ,
        others=(_ADDRESS_VARIABLE,),  # of the commands that ask a store
        overrides=overrides or {},
    )


def _connected(
    args: argparse.Namespace, planes: Sequence[str] = ("tcp",)
) -> "contextlib.AbstractContextManager[StoreClient]":
    from store_server import commands

    files = {"tls_ca": args.tls_ca, "tls_cert": args.tls_cert, "tls_key": args.tls_key}
    return commands.connected(args.address, args.token, planes, **files)


def _stats(args: argparse.Namespace) -> None:
    from store_server import commands

    with _connected(args) as client:
        commands.show_stats(client, as_json=args.json)


def _ls(args: argparse.Namespace) -> None:
    from store_server import commands

    with _connected(args) as client:
        commands.list_objects(client, prefix=args.prefix, limit=args.limit, as_json=args.json)


def _evict(args: argparse.Namespace) -> None:
    from store_server import commands

    with _connected(args) as client:
        commands.evict(client, size=args.size, strategy=args.strategy, as_json=args.json)


def _bench(args: argparse.Namespace) -> None:
    from store_server import bench

    sizes = [parse_size_bytes(size) for size in args.sizes.split(",")]
    if min(sizes) < 1 or args.seconds <= 0:
        raise ConfigError("--sizes and --seconds must be greater than nothing")
    planes = tuple(dict.fromkeys((args.plane, "tcp")))
    with _connected(args, planes) as client:
        bench.run(client, sizes, args.seconds, as_json=args.json)


def _top(args: argparse.Namespace) -> None:
    from store_server import top

    if args.interval <= 0 or args.count < 0:
        raise ConfigError("--interval must be greater than nothing, --count not negative")
    with _connected(args) as client:
        top.run(client, args.address, interval_s=args.interval, count=args.count, as_json=args.json)


def _verify(args: argparse.Namespace) -> None:
    if args.paths or args.config:
        from store_server import verify

        if args.paths and args.config:
            raise ConfigError("PATH and --config do not go together: the file names the paths")
        if args.paths:
            verify.verify_paths(args.paths, as_json=args.json)
        else:
            remote_bytes_per_s = parse_size_bytes(args.remote_rate)
            verify.verify_levels(_config(args), remote_bytes_per_s=remote_bytes_per_s, as_json=args.json)
        return
    from store_server import commands

    with _connected(args) as client:
        commands.verify(client, remote_rate=args.remote_rate, as_json=args.json)


def _drain(args: argparse.Namespace) -> None:
    from store_server import commands

    with _connected(args) as client:
        commands.drain(client, stop=args.stop, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
