import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.clock import VirtualClock, WallClock
from kvcore.errors import ConfigError
from kvcore.units import format_size, parse_duration_ms, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("17", 17), ("4gb", 4 << 30), ("4 GiB", 4 << 30), ("1.5k", 1536), ("2TB", 2 << 40), (5, 5)],
)
def test_sizes(text, expected):
    assert parse_size_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("250ms", 250), ("30s", 30_000), ("1.5m", 90_000), ("2 h", 7_200_000), ("7", 7), (1.5, 1.5), (3, 3)],
)
def test_durations(text, expected):
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize("text", ["", "gb", "-1", "4 apples", "1e3", "4 g b"])
def test_what_is_neither_says_how_to_write_it(text):
    with pytest.raises(ConfigError, match=r"not a size: .* for example"):
        parse_size_bytes(text)
    with pytest.raises(ConfigError, match=r"not a duration: .* for example"):
        parse_duration_ms(text)


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_are_read_back_about_right(size_bytes):
    again = parse_size_bytes(format_size(size_bytes))
    assert abs(again - size_bytes) <= max(0.06 * size_bytes, 1)


def test_virtual_time_moves_only_when_told_and_never_back():
    clock = VirtualClock(5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
    assert WallClock().now() <= WallClock().now()
