"""Checks of filter chain, rubric and judge: files load, the judge is independent, its endpoints answer.

Listing an endpoint's models costs nothing. A question to the model costs tokens and is asked on request only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Final

import orjson

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import Config, JudgeSettings
from flywheel.daemon.judging.judge_setup import check_independence, judge_settings, rubric_of, rubric_of_target
from flywheel.errors import ConfigError, FlywheelError, JudgeError
from flywheel.judge.client import KEY_REJECTED, Endpoint, EndpointConfig, JudgeClient, endpoints_of, settings_for
from flywheel.judge.filters.chain import Chain, chain_of
from flywheel.judge.rubric import Rubric
from flywheel.judge.rubric.file import read_rubric
from flywheel.judge.rubric.lint import contradictions
from flywheel.system.model_http_client import HttpAnswer

TIMEOUT_SECONDS: Final = 10.0
"""Longest wait for a list of models."""
LISTED: Final = 6
"""Models that are named when the configured one is not among them."""
_ASK: Final = "`flywheel doctor --ask-judge` asks it one question."
_QUESTION: Final = 'Is 2 plus 2 equal to 4? Reply with {"answer": "yes"} or {"answer": "no"}.'
_ANSWER_TOKENS: Final = 64
_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class JudgeChecks:
    """The checks of one configuration. `server_time` is the time that an endpoint reported, in seconds since 1970."""

    config: Config
    ask: bool = False
    server_time: float | None = None

    def findings(self) -> Iterator[Finding]:
        """Filter chain, rubric, independence, and each endpoint."""
        try:
            chain = chain_of(self.config)
        except ConfigError as error:
            yield Finding.of("filters", error)
            why = "the filter chain may name another rubric, or settings of the judge"
            yield from (Finding(name, Result.SKIPPED, why) for name in ("rubric", "judge"))
            return
        if chain is not None:
            text = f"chain {chain.id}: {len(chain.before)} before the judge, {len(chain.after)} after it"
            yield Finding("filters", Result.OK, "; ".join((text, *chain.notices)))
        settings = judge_settings(self.config, chain)
        try:
            rubric = rubric_of(self.config, chain)
            settings = settings_for(rubric, settings)
            yield self._rubric(rubric, chain)
            yield from self._rubrics_of_targets(rubric)
        except ConfigError as error:
            yield Finding.of("rubric", error)
        try:
            warnings: list[str] = []
            check_independence(self.config.model_copy(update={"judge": settings}), warn=warnings.append)
            for warning in warnings:
                yield Finding("judge", Result.WARNING, warning, "Set judge.model to an independent model.")
        except ConfigError as error:
            yield Finding.of("judge", error)
        for endpoint in endpoints_of(settings):
            listed = self._listed(endpoint, settings)
            yield _asked(endpoint, settings, listed) if self.ask else listed

    def _rubrics_of_targets(self, shared: Rubric) -> Iterator[Finding]:
        """Those that targets have of their own."""
        for name, own in self.config.by_target().items():
            if name and self.config.targets[name].rubric is not None:
                try:
                    rubric = rubric_of_target(own, shared)
                    yield replace(replace(self, config=own)._rubric(rubric, None), subject=name)
                except ConfigError as error:
                    yield Finding.of("rubric", error, subject=name)

    def _rubric(self, rubric: Rubric, chain: Chain | None) -> Finding:
        asked = sum(criterion.asks_the_judge for criterion in rubric.every)
        text = f"{rubric.id}: {len(rubric.every)} criteria, {asked} by the judge, threshold {rubric.threshold:g}"
        is_file = chain is None or chain.judge is None or chain.judge.custom_rubrics is None
        if is_file and (wrong := contradictions(read_rubric(self.config.filter.rubric))):
            remedy = f"flywheel rubric check {self.config.filter.rubric}"
            return Finding("rubric", Result.WARNING, f"{text}; {'; '.join(map(str, wrong))}", remedy)
        return Finding("rubric", Result.OK, text)

    def _listed(self, who: EndpointConfig, settings: JudgeSettings) -> Finding:
        """What the endpoint answers when it is asked for its models, without a key and with each key."""
        timeout = min(settings.timeout_seconds, TIMEOUT_SECONDS)
        endpoint = Endpoint(who, settings.model_copy(update={"timeout_seconds": timeout}))
        try:
            without_key, *by_key = endpoint.model_listings()
        except JudgeError as error:
            return Finding.of(who.section, error, subject=str(who))
        finally:
            endpoint.close()
        with contextlib.suppress(KeyError, ValueError, OverflowError):
            self.server_time = parsedate_to_datetime(without_key.headers["date"]).timestamp()
        return Finding(who.section, *_models(who, without_key, by_key), str(who))


def _models(who: EndpointConfig, without_key: HttpAnswer, by_key: list[HttpAnswer]) -> tuple[Result, str, str]:
    answer, url, key = by_key[0], f"{who.section}.base_url", f"${who.api_key_env}"
    has_key = bool(os.environ.get(who.api_key_env, "").strip())
    if refused := [number for number, each in enumerate(by_key, start=1) if each.status in KEY_REJECTED]:
        text = f"it refuses the key in {key}" if has_key else f"it requires a key, and {key} is not set"
        if len(by_key) > 1:
            text = f"it refuses key {', '.join(map(str, refused))} of {len(by_key)} in {key}"
        result = Result.FAILED if len(refused) == len(by_key) else Result.WARNING
        remedy = f"Put the right key into {who.api_key_env} ({who.section}.api_key_env names it)."
        return result, f"{text} (HTTP {by_key[refused[0] - 1].status})", remedy
    if answer.status in (404, 405, 501):
        text = f"it can be reached, but lists no models (HTTP {answer.status}), so it may not have {who.model}"
        return Result.WARNING, text, f"Check {url}. {_ASK}"
    if answer.status == 429:
        return Result.WARNING, "it is rate-limiting (HTTP 429)", "Wait, and try again."
    if answer.status != 200:
        text = f"it answers HTTP {answer.status} when asked for its models"
        return Result.FAILED, text, f"Check {url} and that the endpoint runs."
    try:
        models = [str(card["id"]) for card in orjson.loads(answer.body)["data"]]
    except (ValueError, KeyError, TypeError):
        return (
            Result.FAILED,
            "its answer is not a list of models",
            f"Set {url} to the API's root, often /v1.",
        )
    if who.model not in models:
        more = f" and {len(models) - LISTED} more" if len(models) > LISTED else ""
        text = f"{who.model} is not among the {len(models)} models it lists ({', '.join(models[:LISTED])}{more})"
        return Result.FAILED, text, f"Correct {who.section}.model. If it accepts names that it does not list: {_ASK}"
    text, remedy = f"it answers and lists {who.model}; it requires no key", ""
    if has_key and without_key.status in KEY_REJECTED:
        text = f"it answers and lists {who.model}; the key in {key} is accepted"
    elif has_key:
        text = f"it answers and lists {who.model}; whether it accepts the key in {key} is not known"
        remedy = f"It lists its models without a key: {_ASK}"
    return Result.OK, text, remedy


def _asked(who: EndpointConfig, settings: JudgeSettings, listed: Finding) -> Finding:
    """The answer to one short question, in one attempt."""
    alone = {name: getattr(who, name) for name in ("model", "base_url", "api_key_env")}
    client = JudgeClient(settings.model_copy(update=alone | {"backup": None, "max_attempts": 1}))
    schema = {"name": "answer", "strict": True, "schema": _ANSWER}
    try:
        reply = client.ask(
            [{"role": "user", "content": _QUESTION}],
            response_format={"type": "json_schema", "json_schema": schema},
            temperature=0.0,
            max_tokens=_ANSWER_TOKENS,
        )
    except FlywheelError as error:
        return Finding.of(who.section, error, subject=str(who))
    finally:
        client.close()
    if not reply.calls:
        return Finding(who.section, Result.FAILED, reply.problem, "Correct judge.model or its endpoint.", str(who))
    figures = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    tokens = f"{reply.prompt_tokens} tokens sent, {reply.completion_tokens} received"
    text = f"it answers (asked by {reply.format.value}; {tokens})"
    if listed.result is not Result.OK:
        text = f"{text}, although {listed.found}"
    return Finding(who.section, Result.OK, text, subject=str(who), figures=figures)
