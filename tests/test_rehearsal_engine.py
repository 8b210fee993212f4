"""Continuous batching on a virtual clock: the law obeyed to the nanosecond, queueing, cache, preemption, chance."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfbook.rehearsal.engine import Engine, Generation, Step
from perfbook.rehearsal.kv import KVCache
from perfbook.rehearsal.law import Law, make_law
from perfbook.rehearsal.predict import closed_loop_tok_s

MS = 1_000_000


def law(**sections: object) -> Law:
    step = {"decode_ms": [[1, 10.0], [4, 16.0]], "prefill_floor_ms": 12.0, "prefill_tok_s": 1000.0}
    return make_law({"step": step, **sections}, "test")


def ask(number: int, prompt: int = 20, tokens: int = 3, stop_after: int | None = None, at_ns: int = 0) -> Generation:
    # prompts differ from the first token on, so that none hits another's prefix
    return Generation(number, range(number * 10_000, number * 10_000 + prompt), tokens, stop_after, at_ns)


def drain(engine: Engine, now_ns: int = 0) -> list[Step]:
    """Run until idle; every step must end."""
    steps = []
    while (step := engine.begin(now_ns)) is not None:
        now_ns = step.end_ns
        engine.finish(step, now_ns)
        steps.append(step)
        assert len(steps) < 10_000
    return steps


def test_one_request_takes_prefill_then_a_token_per_step() -> None:
    engine = Engine(law())
    request = ask(1, prompt=20, tokens=3)
    engine.submit(request)
    steps = drain(engine)
    assert [step.end_ns - step.start_ns for step in steps] == [32 * MS, 10 * MS, 10 * MS]
    assert request.first_token_ns == 32 * MS
    assert request.last_token_ns == 52 * MS
    assert request.finish_reason == "length"
    assert engine.cache.used_blocks == 0


def test_position_counts_the_prompt_and_the_answer_so_far() -> None:
    step = {"decode_ms": [[1, 10.0]], "context_us_per_token": 100.0, "prefill_floor_ms": 12.0, "prefill_tok_s": 1000.0}
    engine = Engine(law(step=step))
    engine.submit(ask(1, prompt=20, tokens=3))
    assert [each.mean_position for each in drain(engine)] == [0.0, 21.0, 22.0]


def test_a_newcomer_joins_the_next_step_and_its_prefill_delays_the_others() -> None:
    engine = Engine(law())
    engine.submit(ask(1, tokens=5))
    first = engine.begin(0)
    assert first is not None
    engine.submit(ask(2, prompt=8, tokens=1))
    engine.finish(first, first.end_ns)
    mixed = engine.begin(first.end_ns)
    assert mixed is not None
    assert (mixed.decoding, mixed.prefill_tokens) == (1, 8)
    assert mixed.end_ns - mixed.start_ns == (12 + 8) * MS


def test_long_prompts_are_cut_to_the_token_budget() -> None:
    engine = Engine(law(limits={"max_num_batched_tokens": 16}))
    engine.submit(ask(1, prompt=40, tokens=1))
    assert [step.prefill_tokens for step in drain(engine)] == [16, 16, 8]


def test_no_more_run_than_there_are_slots() -> None:
    engine = Engine(law(limits={"max_num_seqs": 2}))
    requests = [ask(number, tokens=4) for number in range(1, 6)]
    for request in requests:
        engine.submit(request)
    step = engine.begin(0)
    assert step is not None
    assert (len(engine.running), len(engine.waiting)) == (2, 3)
    engine.finish(step, step.end_ns)
    drain(engine, step.end_ns)
    assert all(request.generated == 4 for request in requests)
    assert requests[4].scheduled_ns > requests[0].last_token_ns


def test_end_of_sequence_is_one_token_after_the_spoken_ones() -> None:
    engine = Engine(law())
    request = ask(1, tokens=50, stop_after=7)
    engine.submit(request)
    drain(engine)
    assert (request.generated, request.finish_reason) == (8, "stop")


def test_out_of_cache_the_youngest_is_preempted_and_computes_again() -> None:
    engine = Engine(law(limits={"kv_cache_tokens": 80}))  # five blocks; two requests of 32 + 16 tokens need six
    old, young = ask(1, prompt=32, tokens=16), ask(2, prompt=32, tokens=16)
    engine.submit(old)
    engine.submit(young)
    steps = drain(engine)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert sum(step.preempted for step in steps) == 1
    assert (old.generated, young.generated) == (16, 16)
    assert max(step.prefill_tokens for step in steps[1:]) > 32 - 16  # what was known of it is computed again


def test_repeated_prompts_hit_whole_blocks_but_never_the_last_token() -> None:
    engine = Engine(law())
    for number, prompt in enumerate((range(40), range(40), range(32), range(1, 41)), start=1):
        request = Generation(number, prompt, 1, None, 0)
        engine.submit(request)
        drain(engine)
        assert request.cached == (0, 32, 16, 0)[number - 1]
    assert engine.cache.hit_tokens == 48
    assert engine.cache.forget()
    assert engine.cache.match(range(40)) == 0


def test_prefixes_are_kept_while_blocks_are_held() -> None:
    cache = KVCache(64)
    assert cache.grow(1, 17)
    assert (cache.used_blocks, cache.usage) == (2, 0.5)
    assert not cache.forget()
    assert not cache.grow(2, 33)
    cache.release(1)
    assert cache.forget()


def test_abort_frees_slot_and_cache_whether_running_or_waiting() -> None:
    engine = Engine(law(limits={"max_num_seqs": 1}))
    running, waiting = ask(1), ask(2)
    engine.submit(running)
    engine.submit(waiting)
    step = engine.begin(0)
    assert step is not None
    engine.abort(running)
    engine.abort(waiting)
    assert engine.finish(step, step.end_ns) == []
    assert engine.begin(step.end_ns) is None
    assert engine.cache.used_blocks == 0
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")


def test_warm_up_lengthens_the_first_steps_only() -> None:
    engine = Engine(law(warmup={"prefill_extra_ms": 100.0, "decode_extra_ms": 30.0, "decode_steps": 2}))
    engine.submit(ask(1, prompt=20, tokens=4))
    times = [step.end_ns - step.start_ns for step in drain(engine)]
    assert times == [132 * MS, 30 * MS, 20 * MS, 10 * MS]
    engine.submit(ask(2, prompt=20, tokens=2))
    assert [step.end_ns - step.start_ns for step in drain(engine)] == [32 * MS, 10 * MS]


def decode_times_ms(variation: dict[str, object], launch: int, tokens: int, start_ns: int = 0) -> list[float]:
    engine = Engine(law(variation=variation), launch=launch)
    engine.submit(ask(1, tokens=tokens))
    return [(step.end_ns - step.start_ns) / MS for step in drain(engine, start_ns)][1:]


def test_noise_is_seeded_unbiased_and_of_the_stated_size() -> None:
    times = decode_times_ms({"noise_pct": 2.0}, 1, 4001)
    assert times == decode_times_ms({"noise_pct": 2.0}, 1, 4001)
    assert times != decode_times_ms({"noise_pct": 2.0}, 2, 4001)
    assert statistics.fmean(times) == pytest.approx(10.0, rel=0.002)
    assert statistics.stdev(times) == pytest.approx(0.2, rel=0.1)


def test_launches_scatter_by_the_stated_size() -> None:
    means = [decode_times_ms({"launch_pct": 3.0}, launch, 2)[0] for launch in range(400)]
    assert statistics.fmean(means) == pytest.approx(10.0, rel=0.01)
    assert statistics.stdev(means) == pytest.approx(0.3, rel=0.15)


def test_drift_counts_from_ready() -> None:
    minute_ns = 60_000_000_000
    assert decode_times_ms({"drift_pct_per_min": 1.0}, 1, 2, start_ns=5 * minute_ns)[0] == pytest.approx(10.5, rel=1e-3)


def closed_loop(known: Law, streams: int, prompt: int, output: int, waves: int) -> float:
    """Tokens per second of the middle waves, every finished request replaced at once."""
    engine, number, now_ns, done = Engine(known), streams, 0, 0
    for place in range(1, streams + 1):
        # the first wave has lengths of all phases, as a loop that has run for a while
        engine.submit(ask(place, prompt, max(1, output * place // streams)))
    counted, start_ns = 0, 0
    while done < streams * waves:
        step = engine.begin(now_ns)
        assert step is not None
        now_ns = step.end_ns
        tokens = engine.finish(step, now_ns)
        for token in tokens:
            if token.generation.finish_reason:
                done, number = done + 1, number + 1
                engine.submit(ask(number, prompt, output, at_ns=now_ns))
        if done >= streams:
            start_ns = start_ns or now_ns
            counted += len(tokens) if now_ns > start_ns else 0
    return counted / (now_ns - start_ns) * 1e9


@pytest.mark.parametrize(
    ("streams", "limits"),
    [(1, {}), (4, {}), (16, {}), (16, {"max_num_seqs": 8})],
)
def test_closed_loop_throughput_is_the_predicted_one(streams: int, limits: dict[str, int]) -> None:
    step = {"decode_ms": [[1, 10.0], [16, 20.0]], "prefill_floor_ms": 5.0, "prefill_tok_s": 20000.0}
    known = law(step=step, limits=limits)
    expected = closed_loop_tok_s(known, streams, 32, 64)
    assert closed_loop(known, streams, 32, 64, waves=6) == pytest.approx(expected, rel=0.06)


def test_a_full_cache_limits_throughput_but_to_no_less_than_predicted() -> None:
    step = {"decode_ms": [[1, 10.0], [16, 20.0]], "prefill_floor_ms": 5.0, "prefill_tok_s": 20000.0}
    known = law(step=step, limits={"kv_cache_tokens": 16 * 6 * 8})
    limited = closed_loop(known, 16, 32, 64, waves=6)
    assert closed_loop_tok_s(known, 16, 32, 64) < limited < closed_loop_tok_s(law(step=step), 16, 32, 64)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    slots=st.integers(1, 6),
    blocks=st.integers(6, 20),
    budget=st.integers(4, 64),
)
def test_every_request_gets_exactly_its_tokens(
    lengths: list[tuple[int, int]], slots: int, blocks: int, budget: int
) -> None:
    limits = {"max_num_seqs": slots, "kv_cache_tokens": 16 * blocks, "max_num_batched_tokens": budget}
    engine = Engine(law(limits=limits))
    requests = [ask(number, prompt, tokens) for number, (prompt, tokens) in enumerate(lengths, start=1)]
    for request in requests:
        engine.submit(request)
    steps = drain(engine)
    assert [request.generated for request in requests] == [tokens for _, tokens in lengths]
    assert engine.cache.used_blocks == 0
    assert all(len(step.parts) <= slots for step in steps)
    assert all(sum(count for _, count in step.parts) <= budget for step in steps)
    assert all(left.end_ns == right.start_ns for left, right in pairwise(steps))
