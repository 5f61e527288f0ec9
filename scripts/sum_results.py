#!/usr/bin/env python3
"""Add up pytest's JUnit files of one folder and close with the plain line `N passed, N failed`.

sum_results.py FOLDER       exit status 1 when anything failed, or when no test ran at all

Tests that ran once more under other conditions count once; what failed of them counts.
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

AGAIN = {"compiled": "with the router's hot path compiled"}


def main(argv: list[str]) -> int:
    total = failed = skipped = 0
    for path in sorted(Path(argv[0]).glob("*.xml")):
        for suite in ET.parse(path).getroot().iter("testsuite"):
            tests, wrong = (
                int(suite.get("tests", 0)),
                int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
            )
            failed += wrong
            if path.stem in AGAIN:
                total += wrong
                print(f"{tests - wrong} of them passed once more, {wrong} failed {AGAIN[path.stem]}")
            else:
                total += tests
                skipped += int(suite.get("skipped", 0))
    passed = total - failed - skipped
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
