"""Every shape that a streamed response can take: literal bytes in, literal times out."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfbook.stream import response, sse, timing

MS = 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def delta(finish: str | None = None, usage: dict[str, int] | None = None, **fields: object) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return event(choices=[choice]) if usage is None else event(choices=[choice], usage=usage)


def used(completion: int, prompt: int = 5) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


DONE = b"data: [DONE]\n\n"
ROLE = delta(role="assistant", content="")


class Timed:
    """One response, its reads given as (milliseconds after the start, body bytes); HTTP framing is added."""

    def __init__(self, *reads: tuple[float, bytes], head: bytes = HEAD, tail: bytes = b"0\r\n\r\n", raw: bool = False):
        self.reads = [(at, body if raw else chunk(body)) for at, body in reads]
        if not raw:
            self.reads[0] = (self.reads[0][0], head + self.reads[0][1])
            self.reads[-1] = (self.reads[-1][0], self.reads[-1][1] + tail)
        whole = b"".join(data for _, data in self.reads)
        ends = np.cumsum([len(data) for _, data in self.reads]).tolist()
        self.parsed = response.parse(whole, ends, closed=True)
        stamps = np.array([int(at * MS) for at, _ in self.reads], np.int64)
        read = np.array(self.parsed.read, np.int64)
        count = len(read)
        self.events = timing.Events(
            np.zeros(count, np.int64),
            stamps[read] if count else np.zeros(0, np.int64),
            np.where(read > 0, stamps[read - 1], 0) if count else np.zeros(0, np.int64),
            self.parsed.answer,
            self.parsed.reasoning,
            np.array(self.parsed.counted, np.int64),
            np.array(self.parsed.has_choices, bool),
            np.array(self.parsed.finished, bool),
            np.array(self.parsed.later, bool),
        )
        told = -1 if self.parsed.completion_tokens is None else self.parsed.completion_tokens
        self.times = timing.measure_times(self.events, np.zeros(1, np.int64), np.array([told], np.int64))
        rows = self.times.row
        self.gaps = timing.gaps(
            self.events.request[rows], self.events.arrival_ns[rows], self.times.tokens, self.events.later[rows]
        )

    def value(self, name: str) -> float:
        return float(getattr(self.times, name)[0])

    @property
    def text(self) -> str:
        return "".join(self.parsed.answer)


def test_an_empty_role_chunk_is_not_the_first_token():
    seen = Timed((5, ROLE), (60, delta(content="Hi")), (80, delta(content="!", finish="stop")), (81, DONE))
    assert seen.parsed.error is None
    assert seen.value("ttft_ms") == 60.0
    assert seen.value("tpot_ms") == 20.0
    assert seen.value("e2e_ms") == 80.0
    assert seen.value("output_tokens") == 2


@pytest.mark.parametrize("continuous", [True, False])
def test_two_chunks_of_four_tokens_are_twenty_ms_a_token(continuous: bool):
    counts = [used(0), used(4), used(8), used(8)] if continuous else [None] * 4
    seen = Timed(
        (5, delta(role="assistant", content="", usage=counts[0])),
        (60, delta(content="a b c d", usage=counts[1])),
        (140, delta(content=" e f g h", usage=counts[2])),
        (150, delta(finish="length", usage=counts[3])),
        (151, event(choices=[], usage=used(8))),
        (152, DONE),
    )
    assert seen.value("ttft_ms") == 60.0
    assert seen.value("tpot_ms") == 20.0
    assert seen.value("e2e_ms") == 150.0
    assert seen.times.tokens.tolist() == [4, 4]
    assert seen.gaps.gap_ms[1:].tolist() == [80.0]
    assert seen.gaps.itl_ms[1:].tolist() == [20.0]
    assert seen.times.token_source == ["continuous_usage" if continuous else "usage"]
    assert seen.value("blended_tok_s") == pytest.approx(8 / 0.150)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_the_first_token_and_the_answer_comes_later(name: str):
    seen = Timed((2, ROLE), (30, delta(**{name: "hm"})), (40, delta(content="Paris", finish="stop")), (41, DONE))
    assert (seen.value("ttft_ms"), seen.value("ttfa_ms")) == (30.0, 40.0)
    assert seen.parsed.reasoning == ["", "hm", ""]
    assert seen.text == "Paris"


def test_reasoning_under_both_names_counts_once():
    seen = Timed((30, delta(reasoning="hm", reasoning_content="hm")), (41, DONE))
    assert seen.parsed.reasoning == ["hm"]


def test_an_error_inside_the_stream_is_a_failure_and_keeps_the_tokens_before_it():
    error = event(error={"message": "engine died", "type": "server_error", "code": 500})
    seen = Timed((10, delta(content="a")), (20, error), (21, DONE))
    assert (seen.parsed.error, seen.parsed.detail) == ("stream_error", "engine died")
    assert seen.text == "a"
    assert Timed((10, error)).parsed.error == "stream_error"
    assert Timed((10, event(object="error", message="no"))).parsed.error == "stream_error"
    assert Timed((10, event(object="error"))).parsed.detail == "error object without a message"
    assert Timed((10, event(object="list", message="error") + DONE)).parsed.error is None
    assert Timed((10, event(object=5, message="error"))).parsed.error == "bad_event"
    assert Timed((10, delta(content="error") + event(choices=[], error=None)), (11, DONE)).parsed.error is None
    assert Timed((10, b"event: error\ndata: boom\n\n")).parsed.error == "stream_error"
    assert Timed((10, event(error="boom"))).parsed.detail == "boom"


def test_comments_ids_and_both_forms_of_data():
    body = b": ping\n\nevent: message\nid: 7\nretry: 10\ndata:" + delta(content="x")[6:] + b"data\n\n" + DONE
    seen = Timed((10, b": ping\n\n"), (20, body))
    assert seen.parsed.error is None
    assert seen.text == "x"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_line_ends_bom_and_multi_line_data(newline: bytes):
    body = b'\xef\xbb\xbfdata: {"choices":\ndata: [{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n'
    assert Timed((10, body.replace(b"\n", newline))).text == "x"


def test_a_cr_blank_line_completes_with_its_cr():
    assert [e.end for e in sse.parse(b"data: x\r\n\r\n")] == [10]
    assert [e.end for e in sse.parse(b"data: x\n\n")] == [9]
    assert [e.end for e in sse.parse(b"data: x\r\r")] == [9]
    assert [e.end for e in sse.parse(b"data: x\n\n\n\ndata: y\n\n\n")] == [9, 20]
    parser = sse.SseParser()
    pieces = [b"data: x\r", b"", b"\n", b"", b"\r", b"\n"]
    assert [e for piece in pieces for e in parser.feed(piece)] == sse.parse(b"data: x\r\n\r\n")


def test_unicode_line_separators_are_text():
    text = "a\u2028b\u2029c\u0085d"
    raw = b'data: {"choices":[{"delta":{"content":"' + text.encode() + b'"}}]}\n\n' + DONE
    assert Timed((10, raw)).text == text


def test_usage_alone_with_the_last_choices_with_every_chunk_or_never():
    tokens = [(10, delta(content="a")), (20, delta(content="b"))]
    alone = Timed(*tokens, (30, delta(finish="stop")), (31, event(choices=[], usage=used(3))), (32, DONE))
    last = Timed(*tokens, (30, delta(finish="stop", usage=used(3))), (32, DONE))
    every = Timed(
        (10, delta(content="a", usage=used(1))),
        (20, delta(content="b", usage=used(2))),
        (30, delta(finish="stop", usage=used(3))),
        (31, event(choices=[], usage=used(3))),
        (32, DONE),
    )
    never = Timed(*tokens, (30, delta(finish="stop")), (32, DONE))
    assert [s.value("output_tokens") for s in (alone, last, every, never)] == [3, 3, 3, 2]
    assert [s.times.token_source[0] for s in (alone, last, every, never)] == [
        "usage", "usage", "continuous_usage", "events",
    ]  # fmt: skip
    assert [s.value("tpot_ms") for s in (alone, last, every, never)] == [10.0, 10.0, 10.0, 10.0]
    assert every.times.tokens.tolist() == [1, 1, 1], "the end-of-sequence token arrived with the finish chunk"
    assert (alone.times.tokens.tolist(), never.times.tokens.tolist()) == ([1, 1, 1], [1, 1])
    assert alone.parsed.prompt_tokens == 5


def test_an_answer_of_no_token_has_no_ttft():
    seen = Timed((10, ROLE), (20, delta(finish="stop")), (21, event(choices=[], usage=used(0))), (22, DONE))
    assert seen.parsed.error is None
    assert seen.parsed.finish_reason == "stop"
    assert np.isnan(seen.value("ttft_ms"))
    assert np.isnan(seen.value("tpot_ms"))
    assert seen.value("e2e_ms") == 20.0
    assert seen.value("output_tokens") == 0


@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_finish_reasons(reason: str):
    assert Timed((10, delta(content="a", finish=reason)), (11, DONE)).parsed.finish_reason == reason


def test_the_end_without_done_is_incomplete_and_done_without_a_finish_chunk_is_not():
    assert Timed((10, delta(content="a", finish="stop"))).parsed.error == "incomplete"
    assert Timed((10, delta(content="a")), (11, DONE), tail=b"").parsed.error == "incomplete"
    plain = Timed((10, delta(content="a")), (11, DONE))
    assert (plain.parsed.error, plain.parsed.finish_reason) == (None, None)
    assert Timed((10, delta(content="a")), (11, b"data: [DONE]")).parsed.error is None


def test_several_tokens_per_event():
    seen = Timed(
        (10, delta(content="ab", usage=used(2))),
        (40, delta(content="cde", usage=used(5))),
        (50, delta(content="f", usage=used(6))),
        (51, DONE),
    )
    assert seen.value("tpot_ms") == 10.0
    assert seen.gaps.itl_ms[1:].tolist() == [10.0, 10.0]


def test_a_text_withheld_inside_a_character_is_a_token():
    seen = Timed(
        (10, delta(content="a", usage=used(1))),
        (20, delta(content="", usage=used(2))),
        (30, delta(content="é", usage=used(3))),
        (31, DONE),
    )
    assert seen.gaps.gap_ms[1:].tolist() == [10.0, 10.0]
    assert seen.value("tpot_ms") == 10.0


def test_error_statuses_with_json_html_and_nothing():
    def answer(status: bytes, body: bytes) -> response.Parsed:
        raw = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
        return response.parse(raw, [len(raw)])

    json_body = answer(b"400 Bad Request", b'{"error":{"message":"max_tokens is too large"}}')
    assert (json_body.error, json_body.detail) == ("http_400", "max_tokens is too large")
    assert answer(b"422 Unprocessable", b'{"detail":"bad"}').detail == "bad"
    html = answer(b"503 Service Unavailable", b"<html>\n<b>loading</b></html>")
    assert (html.error, html.detail) == ("http_503", "<html> <b>loading</b></html>")
    assert answer(b"500 Oops", b"").detail == "no body"


def test_chunk_extensions_trailers_content_length_and_close():
    token = delta(content="x")
    body = token + DONE
    extended = HEAD + b"%x;name=value\r\n%s\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(body), body)
    sized = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    closed = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body
    informed = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + sized
    for raw in (extended, sized, closed, informed):
        parsed = response.parse(raw, [len(raw)], closed=True)
        assert (parsed.error, parsed.answer) == (None, ["x"])
    assert response.parse(closed[:-3], [len(closed) - 3], closed=False).error == "incomplete"


def test_bytes_that_are_not_http_json_bodies_and_garbage():
    assert response.parse(b"SSH-2.0-OpenSSH\r\n", [17]).error == "bad_http"
    whole = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"choices": []}'
    assert response.parse(whole, [len(whole)]).error == "not_streamed"
    assert Timed((10, b"data: \xff\xfe{]\n\n"), (11, DONE)).parsed.error == "bad_event"
    assert Timed((10, b'data: {"choices": 7}\n\n'), (11, DONE)).parsed.error == "bad_event"
    assert Timed((10, b"data: " + b"[" * 100_000 + b"\n\n"), (11, DONE)).parsed.error == "bad_event"


def test_choices_beside_the_first_tool_calls_logprobs_and_null():
    two = event(choices=[{"index": 1, "delta": {"content": "b"}}, {"index": 0, "delta": {"content": "a"}}])
    call = delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}])
    arguments = delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])
    logprobs = event(choices=[{"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": -0.1}]}}])
    seen = Timed((5, delta(content=None)), (10, call), (20, arguments), (30, logprobs), (40, two), (41, DONE))
    assert seen.parsed.error is None
    assert seen.value("ttft_ms") == 10.0
    assert seen.parsed.answer == ["", "f", "{}", "x", "ba"]


def test_completions_text():
    seen = Timed((10, event(choices=[{"index": 0, "text": "x", "finish_reason": "stop"}])), (11, DONE))
    assert (seen.text, seen.parsed.finish_reason, seen.value("ttfa_ms")) == ("x", "stop", 10.0)


def test_ten_thousand_tokens_in_one_event():
    seen = Timed((10, delta(content="a " * 10_000, usage=used(10_000))), (11, DONE))
    assert seen.value("output_tokens") == 10_000
    assert np.isnan(seen.value("tpot_ms"))


def test_an_endless_line_is_refused():
    parser = sse.SseParser(max_event_bytes=1000)
    with pytest.raises(sse.EventTooLongError):
        for _ in range(20):
            parser.feed(b"data: " + b"x" * 100)
    big = HEAD + chunk(b"data: " + b"x" * (sse.MAX_EVENT_BYTES + 1))
    assert response.parse(big, [len(big)]).error == "oversized"


def test_merged_reads_are_marked_bounded_and_kept_out_of_gaps():
    seen = Timed(
        (10, delta(content="a", usage=used(1))),
        (20, delta(content="b", usage=used(2))),
        (40, delta(content="c", usage=used(3)) + delta(content="d", usage=used(4))),
        (50, delta(content="e", usage=used(5))),
        (60, delta(content="f", usage=used(6)) + event(choices=[], usage=used(6)) + DONE),
    )
    assert seen.events.later.tolist() == [False, False, True, False, False, True, True]
    assert seen.events.earliest_ns[2] == 20 * MS
    assert seen.gaps.gap_ms[seen.gaps.clean].tolist() == [10.0, 10.0]
    assert seen.gaps.merged_share == pytest.approx(1 / 6)
    first = Timed((5, ROLE), (10, delta(content="a") + delta(content="b")), (20, DONE))
    assert first.times.first_merged.tolist() == [True]
    assert (first.value("ttft_low_ms"), first.value("ttft_ms")) == (5.0, 10.0)


SHAPES = [
    Timed((5, ROLE), (60, delta(content="Hi é\u2028")), (80, delta(finish="stop", usage=used(2))), (81, DONE)),
    Timed((5, (ROLE + delta(reasoning="x") + delta(content="ÿ😀") + DONE).replace(b"\n", b"\r\n"))),
    Timed((5, b"\xef\xbb\xbf" + delta(content="a") + b": ping\n\n" + event(error="no") + DONE)),
    Timed((5, (delta(content="a") + DONE).replace(b"\n", b"\r")), tail=b"0\r\nX: 1\r\n\r\n"),
    Timed((5, b"data: {}\n\n\n\n\ndata\n\nevent: x\n\ndata: [DONE]\n\n")),
]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(SHAPES), st.data())
def test_events_do_not_depend_on_where_the_bytes_are_cut(shape: Timed, data: st.DataObject):
    whole = b"".join(part for _, part in shape.reads)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=40))
    ends = sorted({*cuts, len(whole)} - {0})
    parsed = response.parse(whole, ends, closed=True)
    for name in ("status", "error", "answer", "reasoning", "counted", "finished", "finish_reason", "done"):
        assert getattr(parsed, name) == getattr(shape.parsed, name)
    completing = response.parse(whole, range(1, len(whole) + 1), closed=True).read + 1
    assert parsed.read.tolist() == np.searchsorted(ends, completing).tolist()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from([b"", b"", b"", b"00", b";x=1"])), min_size=1, max_size=8),
    st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]),
    st.booleans(),
    st.data(),
)
def test_bytes_of_body_by_each_read(parts: list[tuple[int, bytes]], before: bytes, ended: bool, data: st.DataObject):
    """Counted byte by byte as the response is made; chunks of odd framing and ends that are missing go the long way."""
    head = before + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw, is_body = bytearray(head), [False] * len(head)
    for size, oddity in parts:
        digits = b"%x" % size
        line = (digits + oddity if oddity.startswith(b";") else oddity + digits) + b"\r\n"
        raw += line + b"x" * size + b"\r\n"
        is_body += [False] * len(line) + [True] * size + [False] * 2
    if ended:
        raw += b"0\r\n\r\n"
    cuts = data.draw(st.lists(st.integers(1, len(raw)), max_size=30))
    ends = sorted({*cuts, len(raw)})
    _, body_ends, broken = response._read_http(raw, ends)
    assert broken == ""
    assert body_ends.tolist() == np.cumsum([*is_body, *[False] * 5])[np.array(ends) - 1].tolist()


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([b"data: a", b"data:b", b":c", b"id: 1", b"", b"data", b"\n", b"\r", b"\r\n"])), st.data()
)
def test_offsets_do_not_depend_on_the_cut_either(parts: list[bytes], data: st.DataObject):
    body = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=20)))
    parser = sse.SseParser()
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    events = sse.parse(body)
    assert [e for piece in pieces for e in parser.feed(piece)] == events
    plain = sse.parse_plain(body)
    if plain is not None:
        assert [(e.data, e.end, e.name) for e in events] == [(d, e, b"") for d, e in zip(*plain, strict=True)]


def test_a_body_of_single_data_lines_needs_no_grammar():
    for body in (b"data: a\n\ndata: \n\n", b"data: a\n\n" * 3, b"data: \n\n"):
        payloads, ends = sse.parse_plain(body) or ([], [])
        assert [(e.data, e.end) for e in sse.parse(body)] == list(zip(payloads, ends, strict=True))
        assert payloads
    unended = (b"", b"data: a\n", b"data: a\n\n\n", b"data: a\n\n\ndata: b\n\n", b"data: a\r\n\n")
    richer = (b"id: 1\ndata: a\n\n", b"data: a\n\n: ping\n\n", b"data: a\ndata: b\n\n")
    assert [sse.parse_plain(body) for body in unended + richer] == [None] * 8
    assert sse.parse_plain(b"data: " + b"x" * sse.MAX_EVENT_BYTES + b"\n\n") is None


def test_the_plateau_ends_when_a_stream_has_nothing_left():
    start, end = np.array([0, 1, 10, 12]), np.array([10, 12, 20, 25])
    assert timing.plateau(start, end, 2) == (1, 20)
    assert timing.plateau(start[:2], end[:2], 2) == (1, 10), "one wave: from the last start to the first end"
    assert timing.plateau(start, end, 8) is None


def test_distribution_is_linear_and_null_without_values():
    assert timing.distribution(np.array([1.0, 2.0, 3.0, np.nan])) == {
        "mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p95": pytest.approx(2.9), "p99": pytest.approx(2.98),
        "min": 1.0, "max": 3.0,
    }  # fmt: skip
    assert set(timing.distribution(np.array([np.nan])).values()) == {None}
