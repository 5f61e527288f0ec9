#!/usr/bin/env python3
"""Entry point of scripts/demo; runs in the engine environment. The parts are in demo_lib/."""

from demo_lib.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
