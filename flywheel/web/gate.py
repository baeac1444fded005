"""The gate: the list of its decisions, one decision with its evidence, and the answers of both sides about a task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from flywheel.config.file import Config
from flywheel.daemon import evaluation_log
from flywheel.daemon.rounds.gate_planning import NextTest, next_test
from flywheel.errors import StoreError
from flywheel.records.round import (
    EVALUATION_FILE,
    Comparison,
    CriterionComparison,
    GateDecision,
    Score,
    SuiteComparison,
)
from flywheel.records.states import LIVE_ROUND
from flywheel.store.views import round_list, task_list
from flywheel.store.views.round_list import RoundFacts
from flywheel.training.data.rollout_file import read_answers
from flywheel.training.gate.gate import TRIPWIRES, misses_of
from flywheel.web import plots
from flywheel.web.gate_sentence import compared_with, later, level, sentence
from flywheel.web.site import position, site_of

PER_PAGE: Final = 30
PAIRS: Final = 3
"""Tasks with the largest gains, and with the largest losses, that a decision shows."""
SIDES: Final = ("deployed", "candidate")


async def show_list(request: Request) -> Response:
    """The decisions, the newest first, a page of them; and the next test."""
    site = site_of(request)
    found = await site.read(partial(_page, site.config, position(request.query_params, "before")))
    by_hand = await asyncio.to_thread(lambda: evaluation_log.sentence(evaluation_log.read(site.config.state_dir)))
    return site.page("gate_list.html", level=level, by_hand=by_hand, result_of=plots.result_of, **found)


def _page(config: Config, before: int | None, conn: Connection) -> dict[str, Any]:
    found = round_list.listed(conn, PER_PAGE + 1, before)
    shown = found[:PER_PAGE]
    seen = [each.comparison for each in shown if each.comparison is not None]
    coming = None
    if before is None:
        live = next((each for each in shown if each.state in LIVE_ROUND), None)
        coming = [of_live(live)] if live is not None else _of_next_tests(conn, config)
    return {
        "rows": [(each, sentence(each), later(each)) for each in shown],
        "axis": plots.axis_of(bound for each in seen for bound in (each.lower, each.upper)),
        "older": shown[-1].id if len(found) > PER_PAGE else None,
        "before": before,
        "coming": coming,
    }


def _of_next_tests(conn: Connection, config: Config) -> list[str]:
    """About the next test of each target."""
    told = {name: of_next(next_test(conn, own)) for name, own in config.by_target().items()}
    return [f"{name}: {text}" if name else text for name, text in told.items()]


def of_live(outcome: RoundFacts) -> str:
    """What test an unfinished round takes."""
    test = outcome.test
    taken = "has taken" if outcome.is_spent else "takes"
    at = f"whose one-sided level is {level(test.alpha)}"
    return f"{outcome.name} {taken} test {test.number} of epoch {test.epoch}, {at}."


def of_next(coming: NextTest) -> str:
    """Whether a round could be tested now."""
    if coming.shortfall:
        return f"No round starts now, because its test would detect too little: {coming.shortfall}."
    return (
        f"The next round takes test {coming.test.number} of epoch {coming.test.epoch}, whose one-sided level is"
        f" {level(coming.test.alpha)}. With {coming.conversations:,} held-out conversations, it would detect a"
        f" gain of 10 points {coming.power:.0%} of the time."
    )


class Bar(NamedTuple):
    """A row of the forest plot. `limit` is what the lower bound must be above; None without a requirement."""

    name: str
    figures: Comparison | CriterionComparison | SuiteComparison
    limit: float | None = None
    needed: int = 0
    is_total: bool = False

    @property
    def result(self) -> str:
        """What the interval shows: `better`, `worse` or `open`; of a row with a limit, `few` where fewer tasks than
        `needed` were compared, and `missed` where the lower bound is not above the limit."""
        if self.limit is not None and self.figures.tasks < self.needed:
            return "few"
        if self.limit is not None and self.figures.lower <= self.limit:
            return "missed"
        return plots.result_of(self.figures.lower, self.figures.upper)


def bars(comparison: Comparison, decision: GateDecision | None) -> list[Bar]:
    """The total, each criterion and each suite, with the limits of the decision, and the tripwires."""
    needed, total, limits, of_suites = 0, None, dict[str, float](), dict[str, float]()
    if decision is not None:
        needed, total = decision.min_tasks, decision.min_gain
        limits, of_suites = (
            {name: -margin for name, margin in margins.items()}
            for margins in (decision.margins, decision.suite_margins)
        )
    return [
        Bar("Total score", comparison, total, needed, is_total=True),
        *(Bar(each.criterion, each, limits.get(each.criterion), needed) for each in comparison.criteria),
        *(Bar(f"Suite {each.name}", each, of_suites.get(each.name), needed) for each in comparison.suites),
        *(Bar(f"Tripwire: {TRIPWIRES[each.criterion].label}", each) for each in comparison.tripwires),
    ]


async def show(request: Request) -> Response:
    """One decision with its evidence."""
    outcome, questions = await _outcome(request)
    comparison = outcome.comparison
    rows = bars(comparison, outcome.decision) if comparison is not None else []
    scores = plots.ranked(comparison.scores) if comparison is not None else []
    best, worst = extremes(scores)
    answers, why = await _answers(outcome, [score.task_id for score in (*best, *worst)])
    return site_of(request).page(
        "gate.html",
        outcome=outcome,
        sentence=sentence(outcome),
        later=later(outcome),
        compared_with=compared_with(outcome),
        level=level,
        comparison=comparison,
        bars=rows,
        axis=plots.axis_of(b for row in rows for b in (row.figures.lower, row.figures.upper, row.limit or 0.0)),
        dots=plots.paired_dots(scores),
        plot_width=plots.dots_width(len(scores)),
        scores=scores,
        questions=questions,
        misses=misses_of(comparison) if comparison is not None else "",
        best=[(score, pair_of(answers.get(score.task_id, ()), 1)) for score in best],
        worst=[(score, pair_of(answers.get(score.task_id, ()), -1)) for score in worst],
        without_answers=why,
    )


async def _outcome(request: Request) -> tuple[RoundFacts, dict[str, str]]:
    """The round that is asked for, and the questions of the tasks of its comparison. Raises HTTPException."""
    found = await site_of(request).read(partial(_decision, name := request.path_params["round"]))
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no round {name}.")
    return found


def _decision(name: str, conn: Connection) -> tuple[RoundFacts, dict[str, str]] | None:
    outcome = round_list.with_scores(conn, name)
    if outcome is None:
        return None
    scores = outcome.comparison.scores if outcome.comparison is not None else []
    return outcome, task_list.questions(conn, [score.task_id for score in scores])


def extremes(scores: Sequence[Score]) -> tuple[list[Score], list[Score]]:
    """The tasks with the largest gains, and those with the largest losses, of ranked ones; only such that differ."""
    gains = [score for score in scores if plots.difference_of(score) > 0]
    losses = [score for score in reversed(scores) if plots.difference_of(score) < 0]
    return gains[:PAIRS], losses[:PAIRS]


Answer = Mapping[str, Any]


async def _answers(outcome: RoundFacts, keys: Sequence[str]) -> tuple[dict[str, list[Answer]], str]:
    """The answers about these tasks, and why there are none."""
    path = Path(outcome.dir) / EVALUATION_FILE
    try:
        found = await asyncio.to_thread(read_answers, path, set(keys))
    except StoreError as error:
        return {}, str(error)
    if not found:
        return {}, f"There are no answers in {path}: retention has removed them."
    return {
        key: [each for each in found if each["task_id"] == key] for key in {each["task_id"] for each in found}
    }, ""


def pairs_of(answers: Sequence[Answer]) -> list[tuple[Answer | None, Answer | None]]:
    """The answers of both sides (deployed, candidate), one pair for each seed."""
    by_seed: dict[Any, dict[str, Answer]] = {}
    for answer in answers:
        by_seed.setdefault(answer["seed"], {})[answer["side"]] = answer
    return [(sides.get(SIDES[0]), sides.get(SIDES[1])) for sides in by_seed.values()]


def pair_of(answers: Sequence[Answer], sign: int) -> tuple[Answer, Answer] | None:
    """The pair that differs most in one direction: with `sign` 1, where the candidate is better."""
    whole = [(old, new) for old, new in pairs_of(answers) if old is not None and new is not None]
    return max(whole, key=lambda pair: sign * (_reward(pair[1]) - _reward(pair[0])), default=None)


def _reward(answer: Answer) -> float:
    return answer["reward"] if answer["reward"] is not None else 0.0


async def show_pair(request: Request) -> Response:
    """All answers of both sides about one task."""
    key = request.path_params["task"]
    outcome, questions = await _outcome(request)
    scores = plots.ranked(outcome.comparison.scores) if outcome.comparison is not None else []
    place = next((place for place, score in enumerate(scores) if score.task_id == key), None)
    answers, why = await _answers(outcome, [key])
    if place is None and key not in answers:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"The gate of {outcome.name} has no task {key}.")
    return site_of(request).page(
        "gate_pair.html",
        outcome=outcome,
        compared_with=compared_with(outcome),
        key=key,
        question=questions.get(key, ""),
        score=scores[place] if place is not None else None,
        better=scores[place - 1].task_id if place else None,
        worse=scores[place + 1].task_id if place is not None and place + 1 < len(scores) else None,
        pairs=pairs_of(answers.get(key, ())),
        without_answers=why,
    )
