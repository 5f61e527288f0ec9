from hypothesis import given
from hypothesis import strategies as st

from store_server.core.deadlines import NEVER, Agenda, Deadlines


def test_the_earliest_deadline_is_known_and_due_ones_come_in_order() -> None:
    agenda = Agenda()
    deadlines = Deadlines[str](agenda)
    for item, when in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        deadlines.set(item, when)
    assert agenda.earliest == 1.0 == deadlines.next()
    assert deadlines.pop_due(2.0) == ["a", "b"]
    assert deadlines.next() == 3.0
    deadlines.drop("c")
    assert deadlines.next() == NEVER and len(deadlines) == 0


def test_dropped_items_do_not_pile_up() -> None:
    deadlines = Deadlines[int](Agenda())
    for number in range(10_000):
        deadlines.set(number, 1e9)
        deadlines.drop(number)
    assert len(deadlines._heap) < 200


@given(st.lists(st.tuples(st.sampled_from("sdp"), st.integers(0, 6), st.integers(0, 30)), max_size=60))
def test_it_is_a_dict_of_times(history: list[tuple[str, int, int]]) -> None:
    deadlines, model = Deadlines[int](Agenda()), dict[int, float]()
    for action, item, when in history:
        if action == "s":
            deadlines.set(item, when)
            model[item] = when
        elif action == "d":
            deadlines.drop(item)
            model.pop(item, None)
        else:
            due = deadlines.pop_due(when)
            assert set(due) == {other for other, at in model.items() if at <= when}
            times = [model.pop(other) for other in due]
            assert times == sorted(times)
        assert len(deadlines) == len(model)
        assert deadlines.next() == min(model.values(), default=NEVER)
