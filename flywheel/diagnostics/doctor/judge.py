"""What judges: chain and rubric load, the judge is somebody else, and its endpoints answer.

The models that an endpoint lists cost nothing. A question to a model does, and is only asked when it is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import orjson

from flywheel.config import Config, JudgeSettings
from flywheel.daemon.judge_setup import judge_settings, rubric_of
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.errors import ConfigError, FlywheelError, JudgeError
from flywheel.filtering.chain import Chain, load_chain
from flywheel.judge.client import KEY_REFUSED, Endpoint, EndpointConfig, JudgeClient, judge_of, judges
from flywheel.judge.independence import doubts
from flywheel.model_http_client import HttpAnswer
from flywheel.rubric import FIT_FOR_ROLLOUTS, Rubric
from flywheel.rubric.examples import contradictions
from flywheel.rubric.file import read_rubric

PATIENCE_SECONDS: Final = 10.0
"""Longest wait for an endpoint that only lists its models."""
LISTED: Final = 6
"""Models that are named when the right one is not among them."""
_ASK: Final = "`flywheel doctor --ask-judge` asks it one question."
_FORM: Final[dict[str, Any]] = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    },
}
_ANSWER_TOKENS: Final = 64


@dataclass(slots=True)
class Judging:
    """The checks of one configuration. `server_time` is what an endpoint said the time is, in seconds since 1970."""

    config: Config
    ask: bool = False
    server_time: float | None = None
    rubric: Rubric | None = None

    def findings(self) -> Iterator[Finding]:
        """Chain, rubric, and each judge."""
        chain: Chain | None = None
        if (path := self.config.filter.chain) is not None:
            try:
                chain = load_chain(path)
            except ConfigError as error:
                yield Finding.of("filters", error)
                why = "the filter chain may name another rubric, or settings of the judge"
                yield from (Finding(name, Result.SKIPPED, why) for name in ("rubric", "judge"))
                return
            told = f"chain {chain.id}: {len(chain.before)} before the judge, {len(chain.after)} after it"
            yield Finding("filters", Result.OK, "; ".join((told, *chain.notices)))
        yield self._rubric(chain)
        settings = judge_settings(self.config, chain)
        if self.rubric is not None:
            settings = judge_of(self.rubric, settings)
        try:
            for doubt in doubts(self.config.model_copy(update={"judge": settings})):
                yield Finding("judge", Result.WARNING, doubt, "Set judge.model to an independent model.")
        except ConfigError as error:
            yield Finding.of("judge", error)
        for who in judges(settings):
            yield self._judge(who, settings)

    def _rubric(self, chain: Chain | None) -> Finding:
        try:
            self.rubric = rubric = rubric_of(self.config, chain)
        except ConfigError as error:
            return Finding.of("rubric", error)
        asked = sum(criterion.asks_the_judge for criterion in rubric.every)
        told = (
            f"{rubric.id}: {len(rubric.every)} criteria, {asked} of them by the judge, threshold {rubric.threshold:g}"
        )
        if chain is None or chain.judge is None or chain.judge.custom_rubrics is None:
            read = read_rubric(self.config.filter.rubric)
            wrong = contradictions(read.rubric, read.places) if read.rubric and read.places else []
            if wrong:
                remedy = f"flywheel rubric check {self.config.filter.rubric}"
                return Finding("rubric", Result.WARNING, f"{told}; {'; '.join(map(str, wrong))}", remedy)
        if unfit := rubric.unfit_for_rollouts:
            return Finding(
                "rubric", Result.WARNING, f"{told}; no round can be graded by it: {unfit}", FIT_FOR_ROLLOUTS
            )
        return Finding("rubric", Result.OK, told)

    def _judge(self, who: EndpointConfig, settings: JudgeSettings) -> Finding:
        finding = self._listed(who, settings)
        return self._asked(who, settings, finding) if self.ask else finding

    def _listed(self, who: EndpointConfig, settings: JudgeSettings) -> Finding:
        patience = min(settings.timeout_seconds, PATIENCE_SECONDS)
        endpoint = Endpoint(who, settings.model_copy(update={"timeout_seconds": patience}))
        try:
            anybody, *by_key = endpoint.listings()
        except JudgeError as error:
            return Finding.of(who.section, error, subject=str(who))
        finally:
            endpoint.close()
        self._note_time(anybody)
        return _told(who, anybody, by_key)

    def _note_time(self, answer: HttpAnswer) -> None:
        try:
            self.server_time = parsedate_to_datetime(answer.headers["date"]).timestamp()
        except (KeyError, ValueError, OverflowError):
            return

    def _asked(self, who: EndpointConfig, settings: JudgeSettings, listed: Finding) -> Finding:
        alone = {
            "model": who.model,
            "base_url": who.base_url,
            "api_key_env": who.api_key_env,
            "backup": None,
            "max_attempts": 1,
        }
        client = JudgeClient(settings.model_copy(update=alone))
        try:
            reply = client.ask(
                [
                    {
                        "role": "user",
                        "content": 'Is 2 plus 2 equal to 4? Reply with {"answer": "yes"} or {"answer": "no"}.',
                    }
                ],
                response_format=_FORM,
                temperature=0.0,
                max_tokens=_ANSWER_TOKENS,
            )
        except FlywheelError as error:
            return Finding.of(who.section, error, subject=str(who))
        finally:
            client.close()
        if not reply.calls:
            return Finding(
                who.section, Result.FAILED, reply.problem, "Correct judge.model or its endpoint.", str(who)
            )
        figures = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        tokens = f"{reply.prompt_tokens} tokens sent, {reply.completion_tokens} received"
        told = f"it answers (asked by {reply.means.value}; {tokens})"
        if listed.result is not Result.OK:
            told = f"{told}, although {listed.found}"
        return Finding(who.section, Result.OK, told, subject=str(who), figures=figures)


def _told(who: EndpointConfig, anybody: HttpAnswer, by_key: list[HttpAnswer]) -> Finding:
    name, subject = who.section, str(who)
    key = f"${who.api_key_env}"
    has_key = bool(os.environ.get(who.api_key_env, "").strip())
    refused = [place for place, answer in enumerate(by_key, start=1) if answer.status in KEY_REFUSED]
    if refused:
        which = (
            f"key {', '.join(map(str, refused))} of {len(by_key)} in {key}"
            if len(by_key) > 1
            else f"the key in {key}"
        )
        what = f"it refuses {which}" if has_key else f"it wants a key, and {key} is not set"
        told = f"{what} (HTTP {by_key[refused[0] - 1].status})"
        remedy = f"Put the right key into {who.api_key_env} ({who.section}.api_key_env names it)."
        result = Result.FAILED if len(refused) == len(by_key) else Result.WARNING
        return Finding(name, result, told, remedy, subject)
    answer = by_key[0]
    if answer.status in (404, 405, 501):
        told = f"it is there, but lists no models (HTTP {answer.status}): whether it has {who.model} is not known"
        return Finding(name, Result.WARNING, told, f"Check {who.section}.base_url. {_ASK}", subject)
    if answer.status == 429:
        return Finding(name, Result.WARNING, "it asks to slow down (HTTP 429)", "Wait, and look again.", subject)
    if answer.status != 200:
        remedy = f"Check {who.section}.base_url and that the endpoint runs."
        return Finding(
            name, Result.FAILED, f"it answers HTTP {answer.status} when asked for its models", remedy, subject
        )
    models = _models(answer)
    if models is None:
        told = "what it answers is no list of models"
        remedy = f"Set {who.section}.base_url to the API's root, which often ends in /v1."
        return Finding(name, Result.FAILED, told, remedy, subject)
    if who.model not in models:
        some = ", ".join(models[:LISTED]) + (f" and {len(models) - LISTED} more" if len(models) > LISTED else "")
        remedy = f"Correct {who.section}.model. If it takes names that it does not list: {_ASK}"
        told = f"{who.model} is not among the {len(models)} models it lists ({some or 'none'})"
        return Finding(name, Result.FAILED, told, remedy, subject)
    told = f"it answers and lists {who.model}"
    if has_key:
        is_proven = anybody.status in KEY_REFUSED
        told += (
            f"; the key in {key} is accepted" if is_proven else f"; whether it takes the key in {key} is not known"
        )
        return Finding(name, Result.OK, told, "" if is_proven else f"It lists its models to anybody: {_ASK}", subject)
    return Finding(name, Result.OK, f"{told}; it wants no key", subject=subject)


def _models(answer: HttpAnswer) -> list[str] | None:
    try:
        cards = orjson.loads(answer.body)["data"]
        return [str(card["id"]) for card in cards]
    except (ValueError, KeyError, TypeError):
        return None
