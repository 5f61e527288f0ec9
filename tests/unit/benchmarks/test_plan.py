from storebench.plan import (
    FULL,
    MANY_CLIENTS,
    MAX_PHASE_BYTES,
    POOL_BYTES,
    QUICK,
    Budget,
    groups,
)


def cells(budget: Budget, num_clients: int):
    return [cell for group in groups(budget, num_clients) for cell in group.cells]


def test_every_size_is_put_and_got_by_one_and_by_many_clients() -> None:
    for num_clients in (1, MANY_CLIENTS):
        singles = {(c.op, c.size_bytes) for c in cells(FULL, num_clients) if c.num_keys == 1}
        assert singles >= {(op, size) for op in ("put", "get") for size in FULL.sizes_bytes}


def test_one_client_also_asks_for_batches_and_existence() -> None:
    asked = {(c.op, c.num_keys) for c in cells(FULL, 1)}
    assert {
        ("put", 32),
        ("get", 32),
        ("exists", 1),
        ("exists", 16),
        ("exists", 128),
        ("exists", 1000),
    } <= asked


def test_the_values_of_a_group_fit_every_pool() -> None:
    for budget in (FULL, QUICK):
        for num_clients in (1, MANY_CLIENTS):
            for group in groups(budget, num_clients):
                for cell in group.cells:
                    if cell.op == "put":
                        client_bytes = group.max_calls * cell.call_bytes
                        assert client_bytes <= MAX_PHASE_BYTES
                        assert client_bytes * num_clients <= POOL_BYTES * 0.6


def test_values_are_put_before_they_are_read_and_the_largest_question_comes_first() -> None:
    for group in groups(FULL, 1):
        ops = [cell.op for cell in group.cells]
        if "exists" in ops:
            num_keys = [cell.num_keys for cell in group.cells]
            assert num_keys == sorted(num_keys, reverse=True)
        else:
            assert ops == ["put", "get"]


def test_quick_is_a_part_of_full() -> None:
    assert set(cells(QUICK, 1)) < set(cells(FULL, 1))
