"""The file that a record is written to."""

from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from router.core.record import Changed
from router.recorder import Recorder

LINE = Changed("http://127.0.0.1:1", "left")


def test_lines_are_there_when_it_is_closed(tmp_path: Path) -> None:
    with Recorder(tmp_path / "record") as recorder:
        recorder.write(LINE)
        recorder.write(LINE)
    assert len((tmp_path / "record").read_bytes().splitlines()) == 2


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "missing" / "record")


@pytest.mark.parametrize("lines", [1, 5000])
def test_a_full_disk_ends_the_record_and_nothing_else(lines: int, caplog: pytest.LogCaptureFixture) -> None:
    with Recorder(Path("/dev/full")) as recorder:
        for _ in range(lines):
            recorder.write(LINE)
    assert [record.message for record in caplog.records] == [
        "--record /dev/full: No space left on device; nothing more is recorded"
    ]
