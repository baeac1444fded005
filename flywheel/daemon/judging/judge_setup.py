"""The rubric and the judge that apply: the configuration and its filter chain together.

The judge must be independent of the trained model, which would reward its own mistakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from flywheel.config.file import Config
from flywheel.config.judge import JudgeSettings
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import Chain, chain_of
from flywheel.judge.filters.llm_evaluate import AGENTJET_CRITERIA, AGENTJET_TEMPERATURE
from flywheel.judge.rubric.file import load_rubric, parse_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.task import trace_parts
from flywheel.records.verdict import Exchange
from flywheel.system.server_limits import address_of

log = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}


def exchange_of(line: dict[str, Any]) -> Exchange:
    """The part of a task that the judge sees."""
    parts = trace_parts(line)
    return Exchange(
        query=line["main_query"],
        answer=line["answer"],
        history=tuple(line["init_messages"]),
        trajectory=parts.steps,
        tools=parts.tools,
        line=line,
    )


def rubric_of(config: Config, chain: Chain | None = None) -> Rubric:
    """The rubric of the chain (AgentJet's `custom_rubrics`), else the configured file. Raises ConfigError."""
    chain = chain or chain_of(config)
    step = chain.judge if chain else None
    if chain is None or step is None or step.custom_rubrics is None:
        rubric = load_rubric(config.filter.rubric, config.correction("filter", "rubric"))
    else:
        if "rubric" in config.filter.model_fields_set:
            log.info("filter.rubric is not used: the chain %s has its own custom_rubrics", config.filter.chain)
        criteria = list(AGENTJET_CRITERIA) if step.builtin else []
        raw = {"id": chain.id, "custom_rubrics": step.custom_rubrics, "criteria": criteria}
        rubric = parse_rubric(raw, f"custom_rubrics of {config.filter.chain}")
    if not config.targets or any(target.rubric is None for target in config.targets.values()):
        _check_margins(config, rubric)
    return rubric


def _check_margins(config: Config, rubric: Rubric) -> None:
    """Raise ConfigError for a criterion with a margin that the rubric does not have."""
    ids = [criterion.id for criterion in rubric.every]
    for criterion in config.gate.non_inferiority_margins:
        if criterion not in ids:
            raise ConfigError(
                "use gate.non_inferiority_margins",
                f"the rubric {rubric.id} has no criterion {criterion}",
                f"Its criteria are {', '.join(ids)}.",
            )


def rubric_of_target(config: Config, rubric: Rubric) -> Rubric:
    """The rubric of the target whose settings these are: its own file, else `rubric`. Raises ConfigError."""
    return own_rubric_of(config) or rubric


def own_rubric_of(config: Config) -> Rubric | None:
    """The file of the target whose settings these are; None if it has none. Raises ConfigError."""
    given = config.targets[config.target].rubric if config.target else None
    if given is None:
        return None
    own = load_rubric(given, config.correction("targets", config.target, "rubric"))
    _check_margins(config, own)
    return own


def judge_settings(config: Config, chain: Chain | None) -> JudgeSettings:
    """The judge of the configuration, with the settings of the chain's `llm_evaluate`, if it has one."""
    step = chain.judge if chain else None
    if step is None:
        return config.judge
    temperature = step.temperature
    if temperature is None and step.custom_rubrics is not None and config.judge.temperature is None:
        temperature = AGENTJET_TEMPERATURE
    given = {"temperature": temperature, "max_thread": step.max_thread, "max_tokens": step.max_tokens}
    return config.judge.model_copy(update={name: value for name, value in given.items() if value is not None})


def check_independence(
    config: Config, rubric: Rubric | None = None, warn: Callable[[str], object] = log.warning
) -> None:
    """Raise ConfigError if the judge, or its backup, is the trained model; warn of what else makes it dependent.

    `rubric` may name a judge model of its own. The alias and its adapters are names that only our servers serve: they
    are an error at any endpoint. The base model is an error at our servers and a warning elsewhere. Any other model
    at our servers is a warning.
    """
    if config.judge.allow_self:
        return
    # Imported here: `status` and the pages ask no judge, and its client takes 16 MB.
    from flywheel.judge.client import endpoints_of, settings_for

    servers = {server_address(url) for url in config.serving.urls}
    aliases, base = config.aliases, config.model.base.rstrip("/")
    for endpoint in endpoints_of(settings_for(rubric, config.judge) if rubric else config.judge):
        is_ours = server_address(endpoint.base_url) in servers
        is_alias = endpoint.model.partition("@")[0] in aliases
        is_base = endpoint.model.rstrip("/") in (base, base.rpartition("/")[2])
        if is_alias or (is_base and is_ours):
            raise ConfigError(
                f"judge with {endpoint}",
                "it is the model that is trained",
                f"Set {endpoint.section}.model to an independent model, or judge.allow_self: true if intended.",
            )
        if is_base or is_ours:
            why = "is the base of the trained model" if is_base else "is at the trained model's own server"
            warn(f"the judge {endpoint} {why}: use an independent model")


def server_address(url: str) -> tuple[str, int, str]:
    """Host, port and path of a URL in a normal form. All names of this machine are "loopback"."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return url, 0, ""
    path = "/".join(part for part in parts.path.split("/") if part).removesuffix("v1").rstrip("/")
    is_here = host == "localhost" or host.endswith(".localhost")
    if (given := address_of(host)) is not None:
        address = getattr(given, "ipv4_mapped", None) or given
        is_here = address.is_loopback or address.is_unspecified
    return "loopback" if is_here else host, port, path
