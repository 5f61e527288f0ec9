import pytest
from storebench.plan import Cell
from storebench.stats import PhaseResult, percentile, speedup, summarise

GET = Cell("get", 1000, 1, 1)


def result(latencies_us, window_s=1.0, cpu_s=0.0, failures=0, wrong_bytes=0) -> PhaseResult:
    return PhaseResult(tuple(us * 1000 for us in latencies_us), window_s, cpu_s, failures, wrong_bytes)


def test_percentiles_are_nearest_ranks() -> None:
    values = list(range(101))
    assert [percentile(values, p) for p in (0, 10, 50, 99, 100)] == [0, 10, 50, 99, 100]
    assert percentile([7], 99) == 7


def test_p50_is_the_median_over_rounds_so_that_one_disturbed_round_does_not_show() -> None:
    figure = summarise("x", GET, [result([10] * 9), result([11] * 9), result([5000] * 9)])
    assert figure.p50_us == 11
    assert figure.p50_us_by_round == (10, 11, 5000)
    assert figure.p99_us == 5000


def test_rates_come_from_the_window_of_all_clients_and_cpu_from_all_processes() -> None:
    figure = summarise("x", GET, [result([1] * 100, window_s=0.001, cpu_s=0.002)])
    assert figure.gb_per_s == pytest.approx(0.1)
    assert figure.calls_per_s == pytest.approx(100_000)
    assert figure.cpu_s_per_gb == pytest.approx(20)
    assert figure.cpu_us_per_call == pytest.approx(20)


def test_failures_and_wrong_bytes_of_all_rounds_are_summed() -> None:
    figure = summarise("x", GET, [result([1], failures=1), result([1], failures=2, wrong_bytes=3)])
    assert (figure.failures, figure.wrong_bytes) == (3, 3)


def test_nothing_moves_for_exists() -> None:
    figure = summarise("x", Cell("exists", 4096, 128, 1), [result([5])])
    assert figure.gb_per_s == 0
    assert figure.cpu_s_per_gb is None


def test_speedup_of_one_client_compares_latencies_of_the_same_round() -> None:
    # The machine was 100 times slower in the third round, for both.
    ours = summarise("ours", GET, [result([10]), result([20]), result([2000])])
    peer = summarise("peer", GET, [result([30]), result([60]), result([6000])])
    assert speedup(ours, peer) == pytest.approx(3)


def test_speedup_of_many_clients_compares_rates() -> None:
    cell = GET._replace(num_clients=4)
    ours = summarise("ours", cell, [result([10] * 4, window_s=1)])
    peer = summarise("peer", cell, [result([10] * 4, window_s=4)])
    assert speedup(ours, peer) == pytest.approx(4)
