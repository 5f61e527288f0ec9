"""Benchmark of the router: `benchmarks/router.py --help`."""

import sys

from routerbench.cli import main

sys.exit(main())
