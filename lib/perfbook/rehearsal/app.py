"""vLLM's endpoints over the engine: what arrives becomes generations, what the engine yields becomes answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

from perfbook.rehearsal import wire
from perfbook.rehearsal.answer import Answer
from perfbook.rehearsal.ask import Refused, check_model, read_ask, read_json, read_messages
from perfbook.rehearsal.engine import Engine, Step
from perfbook.rehearsal.faults import Faults, die, stall_until_ns
from perfbook.rehearsal.http import Exchange
from perfbook.rehearsal.launch import Launch
from perfbook.rehearsal.metrics import Metrics
from perfbook.rehearsal.profiler import Profiler
from perfbook.rehearsal.tokens import Tokenizer
from perfbook.rehearsal.traces import write_traces
from perfbook.rehearsal.truth import Truth

CATCH_UP_NS = 250_000_000
EXPORT_POLL_NS = 20_000_000

Handler = Callable[[Exchange], None]


class App:
    """The served application; all of it runs in the loop's one thread, but for the writing of traces."""

    def __init__(self, launch: Launch, faults: Faults) -> None:
        law = launch.law
        now_ns = time.monotonic_ns()
        self.engine = Engine(law, launch.active, launch.number, now_ns)
        self.metrics = Metrics(launch.served_name, law.model.max_model_len)
        self.truth = Truth(launch.number, now_ns)
        self._launch, self._law, self._faults = launch, law, faults
        self._tokenizer = Tokenizer()
        self._profiler = Profiler(launch.profile_dir, launch.profile_iterations)
        self._export: Thread | None = None
        self._exporting: Exchange | None = None
        self._answers: dict[int, Answer] = {}
        self._asked = self._generated = 0
        self._step: Step | None = None
        self._not_before_ns = 0
        self._created = int(time.time())
        self._routes = self._make_routes()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, or refuse it as vLLM would."""
        handler = self._routes.get((exchange.method, exchange.path))
        try:
            if handler is not None:
                handler(exchange)
            elif any(path == exchange.path for _, path in self._routes):
                exchange.respond_json(405, {"detail": "Method Not Allowed"})
            else:
                exchange.respond_json(404, {"detail": "Not Found"})
        except Refused as refused:
            exchange.respond_json(refused.status, refused.body)

    def deadline_ns(self) -> int | None:
        """End of the step that runs, or the end of a stall or of a trace export."""
        if self._export is not None:
            return time.monotonic_ns() + EXPORT_POLL_NS
        if self._step is not None:
            return max(self._step.end_ns, self._not_before_ns)
        return None

    def advance(self, now_ns: int) -> None:
        """Finish the step when its time is over and begin the next."""
        if self._export is not None:
            if self._export.is_alive():
                return
            self._exported()
        if now_ns < self._not_before_ns:
            return
        if self._step is not None:
            if now_ns < self._step.end_ns:
                return
            self._finish(self._step, now_ns)
            # The next step starts when this one should have ended, so that lateness never adds up; a long one (the
            # process was stopped) is not caught up with a burst of steps that no engine could make.
            start_ns = self._step.end_ns if now_ns - self._step.end_ns < CATCH_UP_NS else now_ns
        else:
            start_ns = now_ns
        self.engine.overhead_ms = self._law.profile.overhead_ms if self._profiler.recording else 0.0
        self._step = self.engine.begin(start_ns)

    def _finish(self, step: Step, now_ns: int) -> None:
        tokens = self.engine.finish(step, now_ns)
        for token in tokens:
            generation = token.generation
            answer = self._answers[generation.number]
            spoil = self._faults.on_token(generation.number, generation.generated - 1)
            if spoil is None:
                answer.token()
            else:
                self.engine.abort(generation, "error")
                spoil(answer.exchange)
            if generation.finish_reason is not None:
                self._ended(answer, now_ns)
        self.metrics.after_step(step, tokens, now_ns)
        self._profiler.record(step)
        self.truth.after_step(step, tokens, now_ns)
        self._generated += len(tokens)
        if fault := self._faults.on_total(self._generated):
            if fault.kind == "die":
                die()
            self._not_before_ns = stall_until_ns(fault, now_ns)

    def _make_routes(self) -> dict[tuple[str, str], Handler]:
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): lambda exchange: exchange.respond(200),
            ("GET", "/ping"): lambda exchange: exchange.respond(200),
            ("GET", "/load"): lambda exchange: exchange.respond_json(200, {"server_load": 0}),
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/openapi.json"): self._openapi,
            ("GET", "/rehearsal"): self._rehearsal,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/v1/chat/completions"): lambda exchange: self._generate(exchange, chat=True),
            ("POST", "/v1/completions"): lambda exchange: self._generate(exchange, chat=False),
        }
        if self._launch.profile_dir is not None:
            routes["POST", "/start_profile"] = self._start_profile
            routes["POST", "/stop_profile"] = self._stop_profile
        if self._launch.dev_mode:
            routes["POST", "/reset_prefix_cache"] = self._reset_prefix_cache
        return routes

    def _version(self, exchange: Exchange) -> None:
        exchange.respond_json(200, {"version": f"{self._law.vllm_version}+rehearsal"})

    def _models(self, exchange: Exchange) -> None:
        launch, longest = self._launch, self._law.model.max_model_len
        exchange.respond_json(200, wire.model_list(launch.served_name, launch.model, self._created, longest))

    def _openapi(self, exchange: Exchange) -> None:
        """Only the routes: clients look there for what is armed."""
        paths: dict[str, dict[str, object]] = {}
        for method, path in self._routes:
            paths.setdefault(path, {})[method.lower()] = {}
        exchange.respond_json(200, {"openapi": "3.1.0", "info": {"title": "rehearsal"}, "paths": paths})

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self.metrics.text(self.engine), "text/plain; version=0.0.4; charset=utf-8")

    def _rehearsal(self, exchange: Exchange) -> None:
        exchange.respond_json(200, self.truth.state())

    def _tokenize(self, exchange: Exchange) -> None:
        values = read_json(bytes(exchange.body))
        check_model(values, self._launch.served_name)
        if isinstance(values.get("prompt"), str):
            ids = self._tokenizer.encode(values["prompt"])
        else:
            prompted = values.get("add_generation_prompt", True) is True
            ids = self._tokenizer.encode_chat(read_messages(values), prompted)
        answer: dict[str, object] = {
            "count": len(ids),
            "max_model_len": self._law.model.max_model_len,
            "tokens": ids,
        }
        answer["token_strs"] = (
            [self._tokenizer.decode([token]) for token in ids] if values.get("return_token_strs") else None
        )
        exchange.respond_json(200, answer)

    def _detokenize(self, exchange: Exchange) -> None:
        values = read_json(bytes(exchange.body))
        ids = values.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise Refused(400, "tokens must be a list of token ids", "tokens")
        exchange.respond_json(200, {"prompt": self._tokenizer.decode(ids)})

    def _generate(self, exchange: Exchange, chat: bool) -> None:
        now_ns = time.monotonic_ns()
        launch, law = self._launch, self._law
        ask = read_ask(bytes(exchange.body), chat, self._tokenizer, launch.served_name, law.model.max_model_len)
        self._asked += 1
        if spoil := self._faults.on_request(self._asked):
            spoil(exchange)
            return
        answer = Answer(exchange, ask, self._asked, launch.served_name, law.text, now_ns)
        if exchange.connection.gone:
            return
        self._answers[self._asked] = answer
        exchange.on_gone = lambda: self._client_gone(answer)
        self.engine.submit(answer.generation)

    def _client_gone(self, answer: Answer) -> None:
        self.engine.abort(answer.generation)
        self._ended(answer, time.monotonic_ns())

    def _ended(self, answer: Answer, now_ns: int) -> None:
        """Count the end of an answer, once, whoever notices it first."""
        if self._answers.pop(answer.generation.number, None) is not None:
            self.metrics.ended(answer.generation, now_ns)

    def _start_profile(self, exchange: Exchange) -> None:
        values = read_json(bytes(exchange.body))
        iterations = values.get("max_iterations")
        now_ns = time.monotonic_ns()
        self._profiler.start(
            now_ns, str(values.get("profile_prefix") or ""), iterations if isinstance(iterations, int) else None
        )
        exchange.respond(200)

    def _stop_profile(self, exchange: Exchange) -> None:
        """Answered when the traces are written; meanwhile the engine stands still, as the workers do."""
        if self._export is not None:
            raise Refused(409, "the traces are being written")
        prefix, steps = self._profiler.stop()
        if not steps or self._profiler.folder is None:
            exchange.respond(200)
            return
        self._exporting = exchange
        self._export = Thread(target=write_traces, args=(self._law, self._profiler.folder, prefix, steps))
        self._export.start()

    def _exported(self) -> None:
        exchange, self._exporting, self._export = self._exporting, None, None
        if exchange is not None:
            exchange.respond(200)

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        exchange.respond_json(200, {"success": self.engine.cache.forget()})
