"""The command both verify scripts are."""

import argparse
import importlib.util
import secrets
import sys
import time
from collections.abc import Callable, Sequence

from kvcore.verify import report as reports
from kvcore.verify.engine import Engine, HttpJson, VerifyError
from kvcore.verify.run import Settings, verify
from kvcore.verify.verdict import Limits

EPILOG = """
Exit status: 0 the KV came from the store and is right; 1 it did not come, or is wrong; 2 it cannot be said
(the engine is not reachable, not idle, or does not tell). Progress goes to stderr.
"""


def main(
    name: str,
    description: str,
    make_engine: Callable[[HttpJson, HttpJson], Engine],
    default_url: str,
    argv: Sequence[str] | None,
) -> int:
    """`make_engine` gets the connection for requests and the one for flushing. Returns the exit status."""
    parser = _parser(name, description, default_url)
    args = parser.parse_args(argv)
    if not args.json and importlib.util.find_spec("rich") is None:
        parser.error("the table needs the package rich: pip install rich, or use --json")
    settings = Settings(
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        settle_s=args.settle_s,
        tries=args.tries,
        limits=Limits(min_hit_percent=args.min_hit_percent, logprob_tolerance=args.logprob_tolerance),
    )

    def connect(url: str) -> Engine:
        requests = HttpJson(url, args.api_key, args.timeout_s)
        return make_engine(requests, HttpJson(url, args.admin_key or args.api_key, args.timeout_s))

    def say(line: str) -> None:
        print(f"  {line} ...", file=sys.stderr, flush=True)

    try:
        first = connect(args.url)
        second = connect(args.second_url) if args.second_url else None
        report = verify(first, second, settings, secrets.token_hex(16), time.sleep, say)
    except VerifyError as error:
        if args.json:
            print(reports.error_json(error))
        print(f"cannot say: {error}\n  {error.advice}", file=sys.stderr)
        return reports.EXIT_STATUS["undecided"]
    if args.json:
        print(reports.to_json(report))
    else:
        reports.print_report(report)
    return reports.EXIT_STATUS[report.verdict.outcome]


def _parser(name: str, description: str, default_url: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "url", nargs="?", default=default_url, help="the engine's HTTP server (default: %(default)s)"
    )
    parser.add_argument(
        "--second-url",
        metavar="URL",
        help="another engine on the same store, asked instead of flushing the first: nobody's cache is lost",
    )
    parser.add_argument("--api-key", default="", metavar="KEY", help="bearer token for requests")
    parser.add_argument(
        "--admin-key", default="", metavar="KEY", help="for flushing, if that needs another one"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_positive(int),
        default=1000,
        metavar="N",
        help="about how long (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive(int),
        default=16,
        metavar="N",
        help="tokens compared (default: %(default)s)",
    )
    parser.add_argument(
        "--min-hit-percent",
        type=_positive(float),
        default=80.0,
        metavar="P",
        help="of the prompt, from the store (default: %(default)s; the last, partial block never comes)",
    )
    parser.add_argument(
        "--logprob-tolerance",
        type=_positive(float),
        default=0.02,
        metavar="X",
        help="beyond what the engine itself varies by (default: %(default)s)",
    )
    parser.add_argument(
        "--settle-s",
        type=_positive(float),
        default=2.0,
        metavar="S",
        help="time to save (default: %(default)s)",
    )
    parser.add_argument(
        "--tries",
        type=_positive(int),
        default=3,
        metavar="N",
        help="flushes until it counts (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-s",
        type=_positive(float),
        default=120.0,
        metavar="S",
        help="for each request (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = kind.__name__
    return convert
