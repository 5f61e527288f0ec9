"""The package is plain Python, described in pyproject.toml; this adds what mypyc may compile.

    MOONCAKE_COMPILE=1 pip install '.[router]'      # takes a C compiler and a minute or two

compiles the router's hot path: the same modules, typed as they are, in about half the CPU time. Nothing else
changes, and without the variable nothing is compiled.
"""

import os
import sys
from pathlib import Path

import setuptools

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What every request goes through. Modules of msgspec structs stay as they are: mypyc would drop the arguments
# of their classes, and their speed is msgspec's. So does core/block_hash.py, whose loop over what struct cuts
# is faster in plain Python. A class is compiled together with all of its subclasses.
COMPILED = (
    "router/cluster.py",
    "router/decisions.py",
    "router/endpoints.py",
    "router/ids.py",
    "router/instance.py",
    "router/metrics.py",
    "router/request_view.py",
    "router/core/algorithm1.py",
    "router/core/block_table.py",
    "router/core/chain_memo.py",
    "router/core/cluster_book.py",
    "router/core/correction.py",
    "router/core/decode_clock.py",
    "router/core/demand.py",
    "router/core/forecast.py",
    "router/core/instance_book.py",
    "router/core/length_history.py",
    "router/core/levels.py",
    "router/core/placement.py",
    "router/core/prefix_index.py",
    "router/core/recording.py",
    "router/core/scheduler.py",
    "router/core/admission/*.py",
    "router/core/policies/*.py",
    "router/dashboard/heat.py",
    "router/dashboard/watch.py",
    "router/http/answer_meter.py",
    "router/http/cached_tokens.py",
    "router/http/known_heads.py",
    "router/http/leg.py",
    "router/http/parser.py",
    "router/http/server.py",
    "router/http/upstream.py",
    "router/prompts/reader.py",
    "router/protocols/base.py",
    "router/protocols/bodies.py",
    "router/protocols/mooncake.py",
    "router/protocols/nixl.py",
    "router/protocols/pair.py",
    "router/protocols/prefill.py",
    "router/protocols/prefilled.py",
    "router/protocols/sglang.py",
    "router/protocols/suite.py",
    "router/protocols/transferring.py",
)
_ROOT = Path(__file__).resolve().parent


def compiled_paths() -> list[str]:
    """Relative to the project."""
    found = [path for pattern in COMPILED for path in sorted(_ROOT.glob(pattern))]
    return [str(path.relative_to(_ROOT)) for path in found]


def _requirements() -> list[str]:
    """mypyc, and what it must see to know the types of."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return ["mypy>=2,<3", *project["dependencies"], *project["optional-dependencies"]["router"]]


def _extensions() -> list[setuptools.Extension]:
    if "egg_info" in sys.argv or "dist_info" in sys.argv:
        return []  # pip only asks what is needed; mypyc may not be there yet
    from mypyc.build import mypycify

    # The strict settings of pyproject.toml are for checking the project, with everything installed.
    flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    return mypycify([*flags, *compiled_paths()], opt_level="3", debug_level="0", group_name="mooncake_router")


if __name__ == "__main__":
    if os.environ.get("MOONCAKE_COMPILE") == "1":
        setuptools.setup(ext_modules=_extensions(), setup_requires=_requirements())
    else:
        setuptools.setup()
