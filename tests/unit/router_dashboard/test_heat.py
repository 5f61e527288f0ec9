"""Which prefixes are hot: against a plain count, and at the edges of windows and memory."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.dashboard.heat import WINDOW_S, PrefixHeat


def chain(*choices: int) -> tuple[int, ...]:
    """Block hashes of a prompt: each stands for all the choices up to it, as a hash chain does."""
    return tuple(hash(choices[: depth + 1]) for depth in range(len(choices)))


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda c: chain(*c)), max_size=60)


@given(prompts)
def test_counts_every_prefix_of_a_power_of_two_of_blocks(asked: list[tuple[int, ...]]) -> None:
    heat = PrefixHeat()
    plain: Counter[tuple[int, int]] = Counter()
    for hashes in asked:
        heat.note(hashes, 0)
        plain.update((hashes[depth - 1], depth) for depth in (1, 2, 4, 8) if depth <= len(hashes))
    hottest = heat.hottest(1000, 0.0)
    for found in hottest:
        assert found.requests_per_min == plain[found.block_hash, found.num_blocks]
    blocks = [found.requests_per_min * found.num_blocks for found in hottest]
    assert blocks == sorted(blocks, reverse=True)
    # What is not listed was asked for once, or nearly always goes on to something longer that is listed.
    listed = {found.block_hash for found in hottest}
    for (block_hash, depth), count in plain.items():
        if count >= 2 and block_hash not in listed:
            longer = [
                plain[hashes[2 * depth - 1], 2 * depth]
                for hashes in asked
                if len(hashes) >= 2 * depth and hashes[depth - 1] == block_hash
            ]
            assert max(longer) >= 0.8 * count


def test_a_shared_beginning_is_listed_beside_what_goes_on_from_it() -> None:
    heat = PrefixHeat()
    for number in range(10):
        heat.note(chain(0, 0, number, number), 2 if number else 0)
    heat.note(chain(7), 0)
    (shared,) = heat.hottest(10, 0.0)
    assert (shared.num_blocks, shared.requests_per_min) == (2, 10.0)
    assert shared.hit_share == 0.9


def test_heat_fades_over_the_next_window_and_is_forgotten_in_the_one_after() -> None:
    heat = PrefixHeat()
    for _ in range(100):
        heat.note(chain(1), 0)
    heat.tidy(WINDOW_S)
    assert [p.requests_per_min for p in heat.hottest(1, WINDOW_S * 1.25)] == [75.0]
    heat.tidy(WINDOW_S * 2)
    assert heat.hottest(1, WINDOW_S * 2) == [] and len(heat) == 0


def test_after_a_long_silence_nothing_is_hot() -> None:
    heat = PrefixHeat()
    for _ in range(100):
        heat.note(chain(1), 0)
    heat.tidy(WINDOW_S * 5)
    assert len(heat) == 0


def test_memory_is_bounded_and_the_hot_survive_a_flood_of_cold_ones() -> None:
    heat = PrefixHeat(max_prefixes=64)
    hot = chain(-1, -1)
    for number in range(10_000):
        heat.note(hot, 2)
        heat.note(chain(number), 0)
        if number % 50 == 0:
            heat.tidy(1.0)
        assert len(heat) <= 64
    heat.tidy(1.0)
    (found,) = heat.hottest(5, 1.0)
    assert found.block_hash == hot[1] and found.requests_per_min == 10_000 and found.hit_share == 1.0
