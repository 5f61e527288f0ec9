"""`mooncake-router`: flags, then the event loop until SIGTERM or SIGINT."""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from kvcore import __version__
from kvcore.config import add_flags, flag_overrides, load_config
from kvcore.errors import ConfigError
from kvcore.logs import announce, configure_logging
from router import profile
from router.app import Router
from router.config import RouterConfig
from router.core import algorithm1
from router.core.policies import POLICIES
from router.core.recording import Write
from router.discovery import make_discovery
from router.family_flags import add_family_flags, family_overrides
from router.instance_spec import InstanceSpec
from router.protocols import PD_PROTOCOLS
from router.recorder import Recorder

logger = logging.getLogger(__name__)

_ENV_PREFIX = "MOONCAKE_ROUTER"
# As gc.set_threshold takes them.
_NEW_CONTAINERS, _YOUNG_COLLECTIONS, _COLLECTIONS_BEFORE_FULL = 10_000, 20, 100

_DESCRIPTION = """\
An OpenAI-compatible router in front of vLLM engines. Streams pass through byte for byte.

Engines that each do everything:
  mooncake-router --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 --policy least_loaded

Separate prefill and decode engines that share KV through mooncake-store (each vLLM started with
--kv-transfer-config '{"kv_connector":"MooncakeSuiteConnector", ...}'):
  mooncake-router --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --decode http://10.0.0.3:8000

Requests go where their prefix is cached, unless that queue is too long (the Mooncake paper's Algorithm 1):
  mooncake-router --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 --policy global_cache_aware \\
      --tokenizer-path /models/MODEL --kv-events http://10.0.0.1:8000=tcp://10.0.0.1:5557,tcp://10.0.0.1:5558

Then point any OpenAI client at it:
  curl http://127.0.0.1:30000/v1/completions -H 'content-type: application/json' \\
       -d '{"model": "MODEL", "prompt": "Hello", "max_tokens": 16, "stream": true}'
"""

_EPILOG = """\
Everything can also be set in a file (--config router.toml; flags win) or in the environment
(MOONCAKE_ROUTER_PORT=8080, MOONCAKE_ROUTER_RETRY_MAX_RETRIES=2). Sizes accept "64kb", durations "30s".

mooncake-router profile --url URL --model NAME measures an engine; predictions then start from what it is.
mooncake-router register --url URL --role ROLE keeps an engine registered in Redis (--discovery.source redis).

SIGHUP, or POST /reload, reads the configuration again: engines, policies, SLOs, limits, keys, timeouts.

GET /health answers 200 while the router lives, /ready when an engine can answer, /metrics for Prometheus.
"""


def make_parser() -> argparse.ArgumentParser:
    # "resolve": the list flags below replace the one-value form that the schema gives.
    parser = argparse.ArgumentParser(
        "mooncake-router",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    build = "plain Python" if str(algorithm1.__file__).endswith(".py") else "compiled"
    parser.add_argument("--version", action="version", version=f"mooncake-router {__version__} ({build})")
    engines = parser.add_argument_group("engines")
    basics = parser.add_argument_group("running")
    add_flags(parser, RouterConfig)
    engines.add_argument(
        "--worker-urls", nargs="+", metavar="URL", help="engines that prefill and decode, http://HOST:PORT"
    )
    engines.add_argument(
        "--prefill",
        action="append",
        nargs="+",
        metavar=("URL", "BOOTSTRAP_PORT"),
        help="a prefill engine, with its bootstrap port where the protocol has one; repeat it",
    )
    engines.add_argument("--decode", action="append", metavar="URL", help="a decode engine; repeat it")
    engines.add_argument(
        "--kv-events",
        "--kv-event-source",
        action="append",
        dest="kv_events",
        metavar="URL=ENDPOINT[,REPLAY]",
        help="where the engine at URL publishes KV events (its --kv-events-config); repeat it",
    )
    engines.add_argument(
        "--store-kv-events",
        action="append",
        metavar="ENDPOINT[,REPLAY][=ADDRESS]",
        help="where a mooncake-store node publishes them (its --events.endpoint), and its address; repeat it",
    )
    names = ", ".join(POLICIES)
    engines.add_argument("--policy", metavar="NAME", help=f"{names} (default: round_robin)")
    engines.add_argument("--prefill-policy", metavar="NAME", help="for the prefill pool (default: --policy)")
    engines.add_argument("--decode-policy", metavar="NAME", help="for the decode pool (default: --policy)")
    engines.add_argument(
        "--pd-protocol", metavar="NAME", help=f"{', '.join(sorted(PD_PROTOCOLS))} (default: suite)"
    )
    basics.add_argument("--config", metavar="FILE", help="a .toml, .json or .yaml file")
    basics.add_argument(
        "--ready-file", metavar="FILE", help='written when listening: {"pid", "host", "port", "url"}'
    )
    basics.add_argument(
        "--record",
        metavar="FILE",
        help="write every decision and what it came from, for mooncake-sim (*.record)",
    )
    basics.add_argument(
        "--api-key", action="append", dest="api_keys", metavar="KEY", help="a key clients must send; repeat"
    )
    add_family_flags(parser)
    return parser


def read_config(argv: Sequence[str] | None = None) -> tuple[RouterConfig, argparse.Namespace]:
    """Raises ConfigError; leaves through argparse for --help and flags it does not know."""
    args = make_parser().parse_args(argv)
    overrides: dict[str, Any] = flag_overrides(RouterConfig, args)
    if args.prefill is not None:
        overrides["prefill"] = tuple(" ".join(given) for given in args.prefill)
    overrides |= family_overrides(args)
    config = load_config(
        RouterConfig, file=args.config, env_prefix=_ENV_PREFIX, environ=os.environ, overrides=overrides
    )
    return config, args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain, 2 for a mistake in the configuration, 1 when it cannot listen."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["profile"]:
        return profile.main(given[1:])
    if given[:1] == ["register"]:
        return _register(given[1:])
    try:
        config, args = read_config(given)
        specs = config.instance_specs()
        configure_logging(config.log_level, as_json=config.log_json)
        with contextlib.ExitStack() as stack:
            write = stack.enter_context(Recorder(Path(args.record))).write if args.record else None
            status: int = uvloop.run(
                _serve(config, specs, args.ready_file, lambda: read_config(given)[0], write)
            )
        return status
    except ConfigError as error:
        print(f"mooncake-router: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise  # our output's, not a socket's: router.start
    except OSError as error:
        print(f"mooncake-router: cannot listen: {error.strerror or error}", file=sys.stderr)
        return 1


async def _serve(
    config: RouterConfig,
    specs: Sequence[InstanceSpec],
    ready_file: str | None,
    reread: Callable[[], RouterConfig],
    record: Write | None = None,
) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    router = Router(config, make_discovery(config.discovery, specs), record, reread)
    loop.add_signal_handler(signal.SIGHUP, _reload, router)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        host, port = await router.start()
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if ready_file is not None:
            write_ready_file(Path(ready_file), {"pid": os.getpid(), "host": host, "port": port, "url": url})
        calm_garbage_collector()
        announce(f"mooncake-router ready on {url} ({summary(config)})")
        await stopping.wait()
        stopping.clear()
        announce("mooncake-router draining (once more to stop at once)")
        draining = loop.create_task(router.drain())
        impatient = loop.create_task(stopping.wait())
        await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, impatient):
            task.cancel()
        await asyncio.gather(draining, impatient, return_exceptions=True)
    finally:
        await router.stop()
        if ready_file is not None:
            _remove(Path(ready_file))
    return 0


def calm_garbage_collector() -> None:
    """What lives as long as the process need not be looked at again and again. Requests leave no cycles, a
    connection one of its own objects when it ends: rare collections are enough for those."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_CONTAINERS, _YOUNG_COLLECTIONS, _COLLECTIONS_BEFORE_FULL)


def _register(argv: Sequence[str]) -> int:
    try:
        from router import register  # its library comes with an extra of its own
    except ImportError as error:
        print(
            f"mooncake-router register: {error}; pip install 'mooncake-kv-suite[discovery]'", file=sys.stderr
        )
        return 2
    return register.main(argv)


def _reload(router: Router) -> None:
    """SIGHUP."""
    try:
        router.reload()
    except ConfigError as error:
        logger.error("the configuration stays as it was: %s", error)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def summary(config: RouterConfig) -> str:
    if config.discovery.source != "static":
        return f"engines from {config.discovery.source}, {config.policy}"
    if config.worker_urls:
        return f"{len(config.worker_urls)} engines, {config.policy}"
    prefill = config.prefill_policy or config.policy
    decode = config.decode_policy or config.policy
    return (
        f"{len(config.prefill)} prefill by {prefill}, {len(config.decode)} decode by {decode}, "
        f"protocol {config.pd_protocol}"
    )


def write_ready_file(path: Path, content: dict[str, Any]) -> None:
    """Renamed into place: whoever waits for the file never reads half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
