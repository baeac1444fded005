"""Checks of filter chain, rubric and judge: files load, the judge is independent, its endpoints answer.

Listing an endpoint's models costs nothing. A question to the model costs tokens and is asked on request only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import httpx2

from flywheel.cli.doctor import Finding, Result
from flywheel.config.file import Config
from flywheel.config.judge import JudgeSettings
from flywheel.daemon.judging.judge_setup import check_independence, judge_settings, rubric_of, rubric_of_target
from flywheel.daemon.rounds.suites import suites_of
from flywheel.errors import ConfigError, FlywheelError, JudgeError
from flywheel.judge.answer import UnreadableError, object_in
from flywheel.judge.chat_completions import AUTOMATIC, JudgeReply, ResponseFormat, strict_format
from flywheel.judge.client import (
    SHORT_QUESTION,
    EndpointConfig,
    JudgeClient,
    JudgeEndpoint,
    endpoints_of,
    settings_for,
)
from flywheel.judge.filters.chain import Chain, chain_of
from flywheel.judge.limits import KEY_REJECTED
from flywheel.judge.rubric.file import contradictions, read_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.system.terminal import quantity

TIMEOUT_SECONDS: Final = 10.0
"""Longest wait for a list of models."""
LISTED: Final = 6
"""Models that are named when the configured one is not among them."""
_ASK: Final = "`flywheel doctor --ask-judge` asks it a question."
_ANSWER_TOKENS: Final = 1024
"""Room for the thoughts of a reasoning model."""
_OPINIONS: Final = ("agree", "disagree")
_ANSWER: Final = strict_format("answer", {"opinion": {"type": "string", "enum": list(_OPINIONS)}})
"""Names that the question does not have: a model that sees no schema does not use them."""
_OBEYED: Final = "obeyed"


def check_judge(config: Config, *, ask: bool = False) -> Iterator[Finding]:
    """Filter chain, rubrics, independence, and each endpoint. `ask` sends each endpoint a question."""
    try:
        chain = chain_of(config)
    except ConfigError as error:
        yield Finding.from_error("filters", error)
        return
    if chain is not None:
        text = f"chain {chain.id}: {len(chain.before)} before the judge, {len(chain.after)} after it"
        yield Finding("filters", Result.OK, "; ".join((text, *chain.notices)))
    settings, is_asked = judge_settings(config, chain), chain is None or not chain.decides
    try:
        rubric = rubric_of(config, chain)
        settings, is_asked = settings_for(rubric, settings), is_asked and bool(rubric.asked)
        yield _rubric(config, rubric, chain)
        for name, own in config.by_target().items():
            if name and config.targets[name].rubric is not None:
                yield replace(_rubric(own, rubric_of_target(own, rubric), None), subject=name)
        yield from _suites(config, rubric)
    except ConfigError as error:
        yield Finding.from_error("rubric", error)
    try:
        warnings: list[str] = []
        check_independence(config.model_copy(update={"judge": settings}), warn=warnings.append)
        for warning in warnings:
            yield Finding("judge", Result.WARNING, warning, "Set judge.model to an independent model.")
    except ConfigError as error:
        yield Finding.from_error("judge", error)
    endpoints = endpoints_of(settings)
    try:
        endpoints[0].require()
    except ConfigError as error:
        if is_asked:
            yield Finding.from_error("judge", error)
        return
    for endpoint in endpoints:
        listed = _listed(endpoint, settings)
        yield _asked(endpoint, settings, listed) if ask else listed


def _rubric(config: Config, rubric: Rubric, chain: Chain | None) -> Finding:
    asked = sum(criterion.asks_the_judge for criterion in rubric.every)
    text = f"{rubric.id}: {len(rubric.every)} criteria, {asked} by the judge, threshold {rubric.threshold:g}"
    is_file = chain is None or chain.judge is None or chain.judge.custom_rubrics is None
    if is_file and (wrong := contradictions(read_rubric(config.filter.rubric))):
        remedy = f"flywheel rubric check {config.filter.rubric}"
        return Finding("rubric", Result.WARNING, f"{text}; {'; '.join(map(str, wrong))}", remedy)
    return Finding("rubric", Result.OK, text)


def _suites(config: Config, rubric: Rubric) -> Iterator[Finding]:
    try:
        for suite in suites_of(config, rubric):
            margin = f"margin {suite.margin:g}" if suite.margin is not None else "reported only"
            text = f"{quantity(len(suite.tasks), 'task')}, {margin}"
            yield Finding("suite", Result.OK, text, subject=suite.name)
    except ConfigError as error:
        yield Finding.from_error("suite", error)


def _listed(who: EndpointConfig, settings: JudgeSettings) -> Finding:
    """What the endpoint answers when it is asked for its models, without a key and with each key."""
    timeout = min(settings.timeout_seconds, TIMEOUT_SECONDS)
    endpoint = JudgeEndpoint(who, settings.model_copy(update={"timeout_seconds": timeout}))
    try:
        without_key, *by_key = endpoint.model_listings()
    except JudgeError as error:
        return Finding.from_error(who.section, error, subject=str(who))
    finally:
        endpoint.close()
    return Finding(who.section, *_models(who, without_key, by_key), str(who))


def _models(
    who: EndpointConfig, without_key: httpx2.Response, by_key: list[httpx2.Response]
) -> tuple[Result, str, str]:
    answer, key = by_key[0], f"${who.api_key_env}"
    has_key = bool(os.environ.get(who.api_key_env, "").strip())
    if refused := [number for number, reply in enumerate(by_key, start=1) if reply.status_code in KEY_REJECTED]:
        text = f"it refuses the key in {key}" if has_key else f"it requires a key, and {key} is not set"
        if len(by_key) > 1:
            text = f"it refuses key {', '.join(map(str, refused))} of {len(by_key)} in {key}"
        result = Result.FAILED if len(refused) == len(by_key) else Result.WARNING
        remedy = f"Put the right key into {who.api_key_env} ({who.section}.api_key_env names it)."
        return result, f"{text} (HTTP {by_key[refused[0] - 1].status_code})", remedy
    try:
        models = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"it lists no models (HTTP {answer.status_code}), so it may not have {who.model}"
        result = Result.FAILED if answer.status_code >= 500 else Result.WARNING
        return result, text, f"Check that {who.section}.base_url is the API's root, often /v1. {_ASK}"
    if who.model not in models:
        more = f" and {len(models) - LISTED} more" if len(models) > LISTED else ""
        text = f"{who.model} is not among the {len(models)} models it lists ({', '.join(models[:LISTED])}{more})"
        return Result.FAILED, text, f"Correct {who.section}.model. If it accepts names that it does not list: {_ASK}"
    text = "it requires no key"
    if has_key:
        is_checked = without_key.status_code in KEY_REJECTED
        text = f"the key in {key} is accepted" if is_checked else f"whether it accepts the key in {key} is not known"
    return Result.OK, f"it answers and lists {who.model}; {text}", ""


def _asked(who: EndpointConfig, settings: JudgeSettings, listed: Finding) -> Finding:
    """The answers to one short question in each response format, in one attempt each."""
    said: dict[ResponseFormat, str] = {}
    refused: set[ResponseFormat] = set()
    figures = {"prompt_tokens": 0, "completion_tokens": 0}
    for form in reversed(ResponseFormat):
        try:
            reply = _answer(who, settings, form)
        except FlywheelError as error:
            if form is ResponseFormat.TEXT:
                return Finding.from_error(who.section, error, subject=str(who))
            refused.add(form)
            said[form] = error.why
        else:
            figures = {name: number + getattr(reply, name) for name, number in figures.items()}
            said[form] = reply.problem or (_OBEYED if _obeys(form, reply.text) else "ignored")
    tokens = f"{figures['prompt_tokens']} tokens sent, {figures['completion_tokens']} received"
    text = f"it answers ({', '.join(f'{form}: {said[form]}' for form in ResponseFormat)}; {tokens})"
    if listed.result is not Result.OK:
        text = f"{text}, although {listed.text}"
    used = next(form for form in AUTOMATIC if form not in refused)
    if settings.response_format != "auto":
        used = ResponseFormat(settings.response_format)
    result, remedy = Result.OK, ""
    if said[used] != _OBEYED:
        best = next((form for form in ResponseFormat if said[form] == _OBEYED), ResponseFormat.TEXT)
        result, remedy = Result.WARNING, f"Set judge.response_format: {best}; tasks are asked by {used}."
    return Finding(who.section, result, text, remedy, str(who), figures=figures)


def _answer(who: EndpointConfig, settings: JudgeSettings, form: ResponseFormat) -> JudgeReply:
    """Raises FlywheelError where the endpoint does not answer."""
    alone = {name: getattr(who, name) for name in ("model", "base_url", "api_key_env")}
    once = {"backup": None, "max_attempts": 1, "response_format": form.value}
    client = JudgeClient(settings.model_copy(update=alone | once))
    try:
        reply = client.ask(SHORT_QUESTION, response_format=_ANSWER, temperature=0.0, max_tokens=_ANSWER_TOKENS)
    finally:
        client.close()
    if not reply.calls:
        raise JudgeError(f"ask the judge {who}", reply.problem, "Correct judge.model or its endpoint.")
    return reply


def _obeys(form: ResponseFormat, text: str) -> bool:
    try:
        answer = object_in(text)
    except UnreadableError:
        return form is ResponseFormat.TEXT
    return form in (ResponseFormat.TEXT, ResponseFormat.JSON) or answer.get("opinion") in _OPINIONS
