"""What a measurement was made on, for the JSON of a benchmark."""

import datetime
import os
import platform
from pathlib import Path
from typing import Any


def machine_record(load_before: float) -> dict[str, Any]:
    """`load_before`: the 1-minute load average when the run began: was the machine quiet?"""
    return {
        "cpus": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min_before": load_before,
        "measured_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
