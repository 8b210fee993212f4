"""02: is the server really working? Known answers, repeatability, streaming, counts, truncation.

A wrong answer makes every rate meaningless, and a server with a broken quantisation or chat template is often fast. So
the answers are checked before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perfbook.desk import Desk, Verdict
from perfbook.params import Question
from perfbook.report.table import Table
from perfbook.server.endpoints import Endpoints
from perfbook.stream.ask import Answer

Status = Literal["right", "wrong", "cut off", "failed"]
THINK_CLOSE = "</think>"
TRUNCATION_TOKENS = 4  # far below any answer: the server must say finish_reason "length"


@dataclass(frozen=True)
class Checked:
    """One question with its answer and what was made of it."""

    question: str
    expected: tuple[str, ...]
    answer: str
    status: Status
    finish_reason: str | None
    output_tokens: int | None


def judge(question: Question, answer: Answer) -> Checked:
    """Hold an answer against what was expected.

    Only answer text counts, never reasoning text: a model that mentions Paris while thinking and then says Lyon is
    wrong. An answer that max_tokens cut before it held what was expected is ``cut off``, not wrong.
    """
    said = answer_text(answer)
    if answer.error is not None:
        status: Status = "failed"
    elif any(word.casefold() in said.casefold() for word in question.expect):
        status = "right"
    elif answer.finish_reason == "length":
        status = "cut off"
    else:
        status = "wrong"
    return Checked(
        question=question.ask,
        expected=tuple(question.expect),
        answer=answer.error or said,
        status=status,
        finish_reason=answer.finish_reason,
        output_tokens=answer.token_count,
    )


def answer_text(answer: Answer) -> str:
    """The answer without reasoning, also where the server left the reasoning inside it (``…</think>answer``)."""
    return answer.text.rpartition(THINK_CLOSE)[2].strip()


def first_difference(one: str, other: str) -> int | None:
    """Index of the first character at which two texts part; None when they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def questions(desk: Desk) -> list[Checked]:
    """Ask every known-answer question once, unstreamed and greedy; one record each."""
    shape = desk.shape(desk.variant.verify.max_tokens, exact=False)
    checked = []
    for number, question in enumerate(desk.variant.verify.questions):
        answer = desk.ask(question.ask, shape)
        result = judge(question, answer)
        checked.append(result)
        desk.record(
            "known_answer",
            {**vars(result), "expected": list(result.expected), "reasoning_chars": len(answer.reasoning)},
            key=str(number),
        )
    return checked


@dataclass(frozen=True)
class Consistency:
    """How far answers to one prompt agree between ways of asking.

    Attributes
    ----------
    repeat_parts_at, stream_parts_at : int or None
        Character at which the repeated, the streamed text parts from the first; None: equal.
    usage_tokens, counted_tokens : int or None
        What the server billed; what its tokenizer finds in the text (reasoning included).
    truncation_recognised : bool
        Whether a max_tokens far too small was answered with finish_reason ``length``.
    reasoning_channel, reasoning_in_answer : bool
        Whether reasoning arrived on its own channel; whether it arrived inside the answer.
    """

    repeat_parts_at: int | None
    stream_parts_at: int | None
    usage_tokens: int | None
    counted_tokens: int | None
    truncation_recognised: bool
    reasoning_channel: bool
    reasoning_in_answer: bool
    errors: tuple[str, ...]

    @property
    def counts_agree(self) -> bool | None:
        """Billed against counted, allowing the end-of-sequence token, whose text is withheld; None: not counted."""
        if self.usage_tokens is None or self.counted_tokens is None:
            return None
        return self.usage_tokens - self.counted_tokens in (0, 1)


def consistency(desk: Desk) -> Consistency:
    """Ask one prompt plain, again, streamed, and with a max_tokens that is too small; record the comparison."""
    endpoint, server = desk.endpoint(), desk.server()
    verify, prompt = desk.variant.verify, desk.variant.workload.prompt

    def answer(tokens: int, *, stream: bool) -> Answer:
        return desk.ask(prompt, desk.shape(tokens, exact=False), stream=stream)

    plain, again = answer(verify.greedy_tokens, stream=False), answer(verify.greedy_tokens, stream=False)
    streamed, short = answer(verify.greedy_tokens, stream=True), answer(TRUNCATION_TOKENS, stream=False)
    result = compare(plain, again, streamed, short, _counter(server.endpoints, endpoint.model))
    desk.record("consistency", {**vars(result), "errors": list(result.errors), "counts_agree": result.counts_agree})
    return result


def compare(
    plain: Answer, again: Answer, streamed: Answer, short: Answer, count: Callable[[str], int | None]
) -> Consistency:
    """The comparison itself (pure but for ``count``, which gives the number of tokens in a text, or None)."""
    answers = (plain, again, streamed, short)
    whole = plain.reasoning + plain.text
    return Consistency(
        repeat_parts_at=first_difference(whole, again.reasoning + again.text),
        stream_parts_at=first_difference(whole, streamed.reasoning + streamed.text),
        usage_tokens=plain.token_count,
        counted_tokens=count(whole),
        truncation_recognised=short.finish_reason == "length",
        reasoning_channel=any(a.reasoning for a in answers),
        reasoning_in_answer=any(THINK_CLOSE in a.text or a.text.lstrip().startswith("<think>") for a in answers),
        errors=tuple(a.error for a in answers if a.error),
    )


def _counter(endpoints: Endpoints, model: str) -> Callable[[str], int | None]:
    def count(text: str) -> int | None:
        tokens = endpoints.tokenize(model, text, add_special_tokens=False)
        return None if tokens is None else len(tokens)

    return count


def question_table(checked: Sequence[Checked]) -> Table:
    """Question, answer and verdict of every known answer."""
    rows = [
        (c.question, " or ".join(c.expected), c.answer[:200], c.status, c.finish_reason, c.output_tokens)
        for c in checked
    ]
    return Table(
        ["question", "expected", "answer", "verdict", "finish reason", "output tokens"],
        rows,
        caption="Known answers",
    )


def consistency_table(agreed: Consistency) -> Table:
    """What agrees between ways of asking, and where texts part."""

    def at(position: int | None) -> str:
        return "equal" if position is None else f"part at character {position}"

    counts = {True: "agree", False: "differ", None: "unknown (no /tokenize)"}[agreed.counts_agree]
    return Table(
        ["check", "result"],
        [
            ("greedy text, repeated", at(agreed.repeat_parts_at)),
            ("streamed text against plain", at(agreed.stream_parts_at)),
            ("billed tokens against counted", f"{counts}: {agreed.usage_tokens} and {agreed.counted_tokens}"),
            (
                "too small max_tokens",
                "recognised (length)" if agreed.truncation_recognised else "NOT recognised",
            ),
            ("reasoning on a channel of its own", "yes" if agreed.reasoning_channel else "none seen"),
            ("reasoning inside the answer", "YES" if agreed.reasoning_in_answer else "no"),
        ],
        caption="Consistency between ways of asking",
    )


def conclude(desk: Desk, checked: Sequence[Checked], agreed: Consistency) -> Verdict:
    """Record the verdict and the findings; returns the sentence that the notebook ends with."""
    right = sum(item.status == "right" for item in checked)
    cut = sum(item.status == "cut off" for item in checked)
    failed = sum(item.status == "failed" for item in checked)
    wrong = sum(item.status == "wrong" for item in checked)
    ok = wrong == 0 and failed == 0 and right > 0 and not agreed.errors
    record = desk.record(
        "verdict_on_answers", {"ok": ok, "right": right, "wrong": wrong, "cut_off": cut, "failed": failed}
    )
    evidence = "; ".join(f"{item.question!r} → {item.answer[:80]!r} ({item.status})" for item in checked)
    shown: dict[str, Any] = {"evidence": evidence, "records": [record]}
    desk.find(
        "answers_right" if ok else "answers_wrong",
        right=right,
        asked=len(checked),
        verdict="verified" if ok else "wrong",
        **shown,
    )
    if cut:
        desk.find(
            "answers_truncated",
            count=cut,
            asked=len(checked),
            max_tokens=desk.variant.verify.max_tokens,
            **shown,
        )
    if agreed.repeat_parts_at is not None:
        desk.find("not_repeatable", position=agreed.repeat_parts_at, evidence="two greedy answers, same prompt")
    elif agreed.stream_parts_at is not None:
        desk.find("stream_differs", position=agreed.stream_parts_at, evidence="one plain, one streamed, same prompt")
    if agreed.counts_agree is False:
        desk.find(
            "token_count_differs",
            usage=agreed.usage_tokens,
            counted=agreed.counted_tokens,
            evidence="usage.completion_tokens against /tokenize of the same text",
        )
    if agreed.reasoning_in_answer:
        desk.find("reasoning_in_answer", evidence="a closing think tag stands in the content channel")
    verdict = "Working" if ok else "NOT working"
    notes = [f"{right} of {len(checked)} known answers right"]
    notes += [f"{wrong} wrong"] * bool(wrong) + [f"{cut} cut off"] * bool(cut) + [f"{failed} failed"] * bool(failed)
    return desk.conclude(f"{verdict}: {', '.join(notes)}; {_agreement(agreed)}.")


def _agreement(agreed: Consistency) -> str:
    if agreed.errors:
        return f"a request failed ({agreed.errors[0]})"
    parts = []
    for what, at in (("repeated", agreed.repeat_parts_at), ("streamed", agreed.stream_parts_at)):
        parts.append(f"the {what} text " + ("is equal" if at is None else f"parts at character {at}"))
    counts = {True: "token counts agree", False: "token counts differ", None: "tokens could not be counted"}
    parts.append(counts[agreed.counts_agree])
    parts.append("truncation is recognised" if agreed.truncation_recognised else "truncation is NOT recognised")
    return ", ".join(parts)
