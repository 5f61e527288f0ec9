"""What scheduling is told about a request."""

import json

import pytest

from router.core.view import RequestView
from router.http.request import Request
from router.request_body import NO_BODY
from router.request_view import BadInput, read_body, read_request_view


def view(body: bytes = b"{}", generates: bool = True, **headers: str) -> RequestView:
    lines = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    request = Request(b"POST", b"/v1/completions", b"/v1/completions", lines, b"", body, True, False)
    return read_request_view("id", request, read_body(body) if generates else NO_BODY)


def test_an_empty_request_asks_for_nothing_special() -> None:
    assert view() == RequestView("id")


def test_what_the_client_says_is_read() -> None:
    body = json.dumps({"max_tokens": 7, "priority": -2, "messages": [{"role": "user"}]}).encode()
    seen = view(body, x_session_id="s", x_slo_ttft_ms="250", x_slo_tpot_ms="40.5")
    assert seen == RequestView(
        "id", max_tokens=7, priority=-2, session_id="s", ttft_slo_ms=250, tbt_slo_ms=40.5
    )


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert view(b'{"max_tokens": 7, "max_completion_tokens": 9}').max_tokens == 9


@pytest.mark.parametrize("odd", [b"null", b'"7"', b"-1", b"1.5", b"true", b"99999999999999999999"])
def test_odd_values_are_the_engines_to_refuse(odd: bytes) -> None:
    assert view(b'{"max_tokens": %b, "priority": "high"}' % odd) == RequestView("id")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"a": 1}}', b"\xff"])
def test_a_body_that_is_no_object_is_the_clients_mistake(body: bytes) -> None:
    with pytest.raises(BadInput, match="JSON object"):
        view(body)


def test_other_endpoints_bodies_are_not_looked_at() -> None:
    assert view(b"--multipart", generates=False) == RequestView("id")


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_a_bad_slo_names_its_header(text: str) -> None:
    with pytest.raises(BadInput, match="x-slo-ttft-ms"):
        view(x_slo_ttft_ms=text)
