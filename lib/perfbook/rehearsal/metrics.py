"""``/metrics`` as vLLM 0.32 writes it: the families, labels and buckets that perfbook and its users read."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from perfbook.rehearsal.engine import Engine, Generation, Step, Token

LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEW = (1, 2, 3, 4, 5, 10, 20)
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
REASONS = ("stop", "length", "abort", "error", "repetition")
NS_PER_S = 1e9


def tokens_buckets(longest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to the longest context."""
    steps = (mantissa * 10**exponent for exponent in range(10) for mantissa in (1, 2, 5))
    return [float(step) for step in steps if step <= longest]


class Metrics:
    """The server's own counts; consistent with what was streamed, since both come from the same steps."""

    def __init__(self, served_name: str, longest: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": served_name}
        lengths = tokens_buckets(longest)
        self._running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self._waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            [*self._labels, "reason"],
            registry=self.registry,
        )
        self._waiting_capacity = by_reason.labels(**self._labels, reason="capacity")
        by_reason.labels(**self._labels, reason="deferred").set(0)
        self._usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self._queries = self._counter("prefix_cache_queries", "Prefix cache queries, in queried tokens.")
        self._hits = self._counter("prefix_cache_hits", "Prefix cache hits, in cached tokens.")
        self._preemptions = self._counter("num_preemptions", "Cumulative number of preemptions.")
        self._prompt = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._cached = self._counter("prompt_tokens_cached", "Number of cached prompt tokens.")
        self._by_source = self._counters("prompt_tokens_by_source", "Prompt tokens by source.", "source", SOURCES)
        self._generated = self._counter("generation_tokens", "Number of generation tokens processed.")
        self._success = self._counters(
            "request_success", "Count of successfully processed requests.", "finished_reason", REASONS
        )
        self._iteration = self._histogram("iteration_tokens_total", "Number of tokens per engine step.", PER_STEP)
        self._first = self._histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._gap = self._histogram("inter_token_latency_seconds", "Inter-token latency.", BETWEEN_TOKENS_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Time per output token of a request.", BETWEEN_TOKENS_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "End to end request latency.", LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time spent waiting.", LATENCY_S)
        self._inference = self._histogram("request_inference_time_seconds", "Time spent running.", LATENCY_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time spent in prefill.", LATENCY_S)
        self._decode = self._histogram("request_decode_time_seconds", "Time spent in decode.", LATENCY_S)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prefill tokens of a request.", lengths)
        self._answer_length = self._histogram("request_generation_tokens", "Generated tokens of a request.", lengths)
        self._asked = self._histogram("request_params_max_tokens", "The max_tokens request parameter.", lengths)
        self._request_preemptions = self._histogram("request_num_preemptions", "Preemptions of a request.", FEW)

    def after_step(self, step: Step, tokens: Sequence[Token], now_ns: int) -> None:
        """Count a finished step."""
        computed = 0
        for generation in step.admitted:
            self._queries.inc(len(generation.prompt))
            self._hits.inc(generation.cached)
        for token in tokens:
            generation = token.generation
            if token.gap_ns is None:
                fresh = len(generation.prompt) - generation.cached
                computed += fresh
                self._prompt.inc(len(generation.prompt))
                self._cached.inc(generation.cached)
                self._by_source["local_compute"].inc(fresh)
                self._by_source["local_cache_hit"].inc(generation.cached)
                self._first.observe((now_ns - generation.arrival_ns) / NS_PER_S)
            else:
                self._gap.observe(token.gap_ns / NS_PER_S)
        self._generated.inc(len(tokens))
        self._iteration.observe(computed + len(tokens))
        self._preemptions.inc(step.preempted)

    def ended(self, generation: Generation, now_ns: int) -> None:
        """Count a request that ended; one that was aborted while waiting has no times of its own."""
        self._success[str(generation.finish_reason)].inc()
        scheduled = generation.scheduled_ns or now_ns
        first, last = generation.first_token_ns or now_ns, generation.last_token_ns or now_ns
        for histogram, start_ns, end_ns in (
            (self._e2e, generation.arrival_ns, now_ns),
            (self._queue, generation.arrival_ns, scheduled),
            (self._inference, scheduled, last),
            (self._prefill, scheduled, first),
            (self._decode, first, last),
        ):
            histogram.observe((end_ns - start_ns) / NS_PER_S)
        self._tpot.observe((last - first) / max(generation.generated - 1, 1) / NS_PER_S)
        self._prompt_length.observe(len(generation.prompt))
        self._answer_length.observe(generation.generated)
        self._asked.observe(generation.max_tokens)
        self._request_preemptions.observe(generation.preemptions)

    def text(self, engine: Engine) -> bytes:
        """The exposition; gauges are read from the engine now."""
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._waiting_capacity.set(len(engine.waiting))
        self._usage.set(engine.cache.usage)
        return generate_latest(self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"vllm:{name}", help_text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"vllm:{name}", help_text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counters(self, name: str, help_text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        family = Counter(f"vllm:{name}", help_text, [*self._labels, label], registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", help_text, list(self._labels), registry=self.registry, buckets=buckets)
        return family.labels(**self._labels)
