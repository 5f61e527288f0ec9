"""Bookkeeping of one instance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.estimator import DecodeModel
from router.core.instance_book import InstanceBook
from router.core.load_report import LoadReport
from router.core.view import Role


def report(at: float, running: int = 0, waiting: int = 0, **fields: int) -> LoadReport:
    return LoadReport(sampled_at=at, running_requests=running, waiting_requests=waiting, **fields)


class TestQueue:
    def test_prefills_stand_one_behind_the_other(self) -> None:
        book = InstanceBook("a")
        assert book.prefill_sent("r1", 100, now=10.0) == pytest.approx(10.1)
        assert book.prefill_sent("r2", 50, now=10.02) == pytest.approx(10.15)
        assert book.state(10.02).queue_ms(10.05) == pytest.approx(100)

    def test_a_prefill_that_is_late_holds_up_those_behind_it(self) -> None:
        book = InstanceBook("a")
        book.prefill_sent("r1", 100, now=0.0)
        book.prefill_sent("r2", 70, now=0.0)
        assert book.state(0.0).queue_ms(9.0) == pytest.approx(70)

    def test_a_prefill_done_early_brings_the_others_forward(self) -> None:
        book = InstanceBook("a")
        book.prefill_sent("r1", 100, now=0.0)
        book.prefill_sent("r2", 70, now=0.0)
        book.prefill_ended("r1", now=0.02, completed=True)
        assert book.state(0.02).queue_ms(0.02) == pytest.approx(70)
        book.prefill_ended("r2", now=0.05, completed=False)
        assert book.state(0.05).queue_ms(0.05) == 0
        assert book.num_legs == 0

    def test_a_poll_adds_only_what_is_not_ours(self) -> None:
        book = InstanceBook("a")
        for n in range(3):
            book.prefill_sent(f"r{n}", 100, now=0.0)
        book.prefill_sent("late", 100, now=2.0)
        book.polled(report(1.0, waiting=5, waiting_prefill_tokens=500), prefill_ms_per_token=1.0)
        state = book.state(2.0)
        assert (state.in_flight_requests, state.foreign_requests) == (4, 2)
        assert state.load == 6
        # Ours: the late one (the others are overdue: 300 ms have not begun). Foreign: 200 ms from 1.0 on.
        assert state.queue_ms(2.0) == pytest.approx(300)
        book.polled(report(2.0, waiting=3, waiting_prefill_tokens=300), prefill_ms_per_token=1.0)
        assert book.state(2.0).foreign_requests == 0

    def test_foreign_waiting_without_tokens_is_taken_at_our_mean(self) -> None:
        book = InstanceBook("a")
        for n in range(100):
            book.prefill_sent(f"r{n}", 80, now=0.0)
            book.prefill_ended(f"r{n}", now=0.0, completed=False)
        book.polled(report(5.0, waiting=3), prefill_ms_per_token=1.0)
        assert book.state(5.0).queue_ms(5.0) == pytest.approx(240, rel=0.01)

    def test_eight_in_a_row_do_not_pile_up_on_a_stale_poll(self) -> None:
        # vllm-project/router#178.
        book = InstanceBook("a")
        book.polled(report(0.0), prefill_ms_per_token=1.0)
        queues = []
        for n in range(8):
            queues.append(book.state(0.0).queue_ms(0.0))
            book.prefill_sent(f"r{n}", 10, now=0.0)
        assert queues == pytest.approx([0, 10, 20, 30, 40, 50, 60, 70])


class TestCorrections:
    def test_a_slow_instance_is_noticed_from_its_prefills(self) -> None:
        book = InstanceBook("a")
        now = 0.0
        for n in range(100):
            book.prefill_sent(f"a{n}", 100, now)
            book.prefill_sent(f"b{n}", 100, now)  # begins when the first is done
            book.prefill_ended(f"a{n}", now + 0.2, completed=True)
            book.prefill_ended(f"b{n}", now + 0.4, completed=True)
            now += 1.0
        assert book.state(now).prefill_scale == pytest.approx(2.0, rel=0.01)
        assert book.prefill_sent("next", 100, now) == pytest.approx(now + 0.2, rel=0.01)

    def test_failures_say_nothing_about_speed(self) -> None:
        book = InstanceBook("a")
        book.prefill_sent("r", 100, 0.0)
        book.prefill_ended("r", 50.0, completed=False)
        book.prefill_ended("r", 50.0, completed=True)
        book.decode_sent("r", 10, 10, 0.0)
        book.decode_ended("r", 50.0, output_tokens=0)
        assert (book.state(50.0).prefill_scale, book.state(50.0).tbt_scale) == (1.0, 1.0)

    def test_tbt_is_measured_from_the_first_token(self) -> None:
        book = InstanceBook("a", decode_model=DecodeModel(20.0, 0.0, 0.0))
        for n in range(100):
            began_at = 10.0 * n + 5.0
            book.decode_sent(f"r{n}", 10, 10, now=10.0 * n)
            book.decode_started(f"r{n}", began_at)
            book.decode_ended(f"r{n}", began_at + 0.9, output_tokens=31)
        assert book.state(0.0).tbt_scale == pytest.approx(1.5, rel=0.01)

    def test_an_instance_as_fast_as_its_model_keeps_its_scale_whatever_waits_for_it(self) -> None:
        """200 ms a token alone, 300 ms for two; a hundred more are on their way and never begin."""
        book = InstanceBook("a", decode_model=DecodeModel(100.0, 100.0, 0.0))
        for n in range(100):
            book.decode_sent(f"waits{n}", 10, 10, now=0.0)
        for n in range(50):
            at = 10.0 * n
            for name in "ab":
                book.decode_sent(f"{name}{n}", 10, 10, at)
            book.decode_started(f"a{n}", at)
            book.decode_started(f"b{n}", at + 0.4)  # a has its third token
            book.decode_ended(f"a{n}", at + 1.0, output_tokens=5)
            book.decode_ended(f"b{n}", at + 1.4, output_tokens=5)
        assert book.state(0.0).tbt_scale == pytest.approx(1.0)

    def test_what_only_the_instance_knows_of_is_in_its_batch(self) -> None:
        book = InstanceBook("a", decode_model=DecodeModel(100.0, 100.0, 0.0))
        for n in range(50):
            at = 10.0 * n
            book.decode_sent("r", 10, 10, at)
            book.decode_started("r", at)
            book.polled(report(at, running=3), prefill_ms_per_token=1.0)
            book.decode_ended("r", at + 1.2, output_tokens=4)
        assert book.state(0.0).tbt_scale == pytest.approx(1.0)

    @pytest.mark.parametrize(("role", "scale"), [(Role.DECODE, 1.0), (Role.MIXED, 1.5)])
    def test_prefills_lent_to_a_decode_instance_do_not_make_it_slow(self, role: Role, scale: float) -> None:
        book = InstanceBook("a", decode_model=DecodeModel(100.0, 0.0, 0.0), role=role)
        for n in range(60):
            at = 10.0 * n
            book.decode_sent("r", 10, 10, at)
            book.decode_started("r", at)
            book.prefill_sent("p", 400.0, at)
            book.prefill_ended("p", at + 0.4, completed=True)
            book.decode_ended("r", at + 1.2, output_tokens=9)  # 0.8 s of it decoding
        assert book.state(0.0).tbt_scale == pytest.approx(scale, rel=0.01)

    def test_another_model_counts_from_then_on(self) -> None:
        book = InstanceBook("a", decode_model=DecodeModel(100.0, 0.0, 0.0))
        book.configure(DecodeModel(50.0, 0.0, 0.0))
        book.decode_sent("r", 10, 10, 0.0)
        book.decode_started("r", 0.0)
        book.decode_ended("r", 1.0, output_tokens=21)
        assert book.state(0.0).tbt_scale == pytest.approx(1.0)


class TestDecodeLoad:
    def test_kv_is_reserved_until_the_end(self) -> None:
        book = InstanceBook("a", kv_capacity_tokens=1000)
        book.decode_sent("r1", 300, 250, now=0.0)
        book.decode_sent("r2", 200, 150, now=0.0)
        state = book.state(0.0)
        assert (state.running_requests, state.kv_used_tokens, state.kv_capacity_tokens) == (2, 500, 1000)
        book.decode_ended("r1", 1.0, output_tokens=9)
        assert book.state(1.0).kv_used_tokens == 200

    def test_the_load_of_the_moment_leaves_out_what_has_not_begun(self) -> None:
        book = InstanceBook("a")
        book.decode_sent("r1", 300, 250, now=0.0)
        book.decode_sent("r2", 200, 150, now=0.0)
        book.decode_started("r1", 1.0)
        state = book.state(1.0)
        assert (state.decoding_requests, state.decoding_kv_tokens) == (1, 250)
        book.polled(report(2.0, running=3, kv_used_tokens=900), prefill_ms_per_token=1.0)
        assert (book.state(2.0).decoding_requests, book.state(2.0).decoding_kv_tokens) == (3, 900)
        book.polled(report(3.0, running=3), prefill_ms_per_token=1.0)  # it does not say: as long as ours
        assert book.state(3.0).decoding_kv_tokens == 750
        book.decode_ended("r1", 4.0, output_tokens=0)
        book.polled(report(5.0, running=0), prefill_ms_per_token=1.0)
        assert (book.state(5.0).decoding_requests, book.state(5.0).decoding_kv_tokens) == (0, 0)

    def test_foreign_decodes_come_from_the_poll(self) -> None:
        book = InstanceBook("a")
        book.decode_sent("r1", 300, 250, now=0.0)
        book.polled(
            report(1.0, running=4, kv_used_tokens=900, kv_capacity_tokens=5000), prefill_ms_per_token=1.0
        )
        state = book.state(1.0)
        assert (state.running_requests, state.foreign_requests) == (4, 3)
        assert (state.kv_used_tokens, state.kv_capacity_tokens) == (900, 5000)

    def test_a_request_that_does_both_counts_once(self) -> None:
        book = InstanceBook("a")
        book.prefill_sent("r", 10, 0.0)
        book.decode_sent("r", 10, 10, 0.0)
        book.polled(report(1.0, running=1), prefill_ms_per_token=1.0)  # it runs, we thought it waits
        assert (book.state(1.0).in_flight_requests, book.state(1.0).foreign_requests) == (1, 0)

    def test_sending_again_replaces(self) -> None:
        book = InstanceBook("a")
        book.decode_sent("r", 100, 100, 0.0)
        book.decode_sent("r", 150, 150, 0.0)
        assert book.state(0.0).kv_used_tokens == 150


def test_a_state_is_remade_only_when_something_changed() -> None:
    book = InstanceBook("a")
    first = book.state(0.0)
    assert book.state(5.0) is first
    book.prefill_sent("r", 1, 5.0)
    assert book.state(5.0) is not first


@given(
    st.lists(
        st.tuples(st.sampled_from(["ps", "pe", "ds", "de"]), st.sampled_from("abc")),
        max_size=40,
    )
)
def test_legs_are_counted_once_whatever_the_order(steps: list[tuple[str, str]]) -> None:
    book = InstanceBook("i")
    prefills: set[str] = set()
    decodes: set[str] = set()
    for step, request_id in steps:
        if step == "ps":
            book.prefill_sent(request_id, 1.0, now=0.0)
            prefills.add(request_id)
        elif step == "pe":
            book.prefill_ended(request_id, now=0.0, completed=False)
            prefills.discard(request_id)
        elif step == "ds":
            book.decode_sent(request_id, 1, 1.0, now=0.0)
            decodes.add(request_id)
        else:
            book.decode_ended(request_id, now=0.0, output_tokens=0)
            decodes.discard(request_id)
        assert book.num_legs == book.state(0.0).in_flight_requests == len(prefills | decodes)
