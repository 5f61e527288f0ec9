#!/usr/bin/env python3
"""The program behind scripts/rdma-vm."""

from rdma_guest.cli import main
from rdma_guest.machine import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()
    raise SystemExit(main())
