"""scripts/lib.sh: what the scripts ask of the system."""

import subprocess
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[3] / "scripts" / "lib.sh"


@pytest.mark.parametrize(("wanted", "is_there"), [("libnuma.so.1", True), ("libnuma.so.2", False)])
def test_a_library_is_found_in_a_list_longer_than_a_pipe_holds(
    tmp_path: Path, wanted: str, is_there: bool
) -> None:
    ldconfig = tmp_path / "ldconfig"
    ldconfig.write_text("#!/bin/sh\necho '\tlibnuma.so.1 (libc6) => /lib/libnuma.so.1'\nseq 100000\n")
    ldconfig.chmod(0o755)
    script = f'set -euo pipefail; source {LIB}; PATH="{tmp_path}:$PATH"; has_library {wanted}'
    found = subprocess.run(["bash", "-c", script], timeout=60)
    assert (found.returncode == 0) == is_there
