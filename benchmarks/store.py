"""Benchmark of the store: `benchmarks/store.py --help`."""

import sys

from storebench.cli import main

sys.exit(main())
