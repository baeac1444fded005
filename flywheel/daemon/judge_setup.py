"""What tasks are judged by: the rubric and the judge, as the configuration and its chain say together."""

from __future__ import annotations

import logging
from typing import Any

import orjson

from flywheel.config import Config, JudgeSettings
from flywheel.errors import ConfigError
from flywheel.filtering.chain import Chain, load_chain
from flywheel.filtering.llm_evaluate import AGENTJET_CRITERIA, AGENTJET_TEMPERATURE
from flywheel.rubric import Rubric
from flywheel.rubric.file import load_rubric, parse_rubric
from flywheel.verdict import Exchange

log = logging.getLogger(__name__)


def exchange_of(line: dict[str, Any]) -> Exchange:
    """What the judge is shown of a task."""
    metadata = line["metadata"]
    return Exchange(
        query=line["main_query"],
        answer=line["answer"],
        history=tuple(line["init_messages"]),
        trajectory=tuple(orjson.loads(metadata["trajectory_json"])),
        tools=tuple(orjson.loads(metadata["tools_json"])),
        line=line,
    )


def chain_of(config: Config) -> Chain | None:
    """The configured chain, if there is one. Raises ConfigError."""
    return load_chain(config.filter.chain) if config.filter.chain is not None else None


def rubric_of(config: Config, chain: Chain | None = None) -> Rubric:
    """The rubric that applies: AgentJet's text in the chain, else the configured file. Raises ConfigError."""
    rubric = _rubric_of(config, chain or chain_of(config))
    ids = [criterion.id for criterion in rubric.every]
    for criterion in config.gate.non_inferiority_margins:
        if criterion not in ids:
            raise ConfigError(
                "use gate.non_inferiority_margins",
                f"the rubric {rubric.id} has no criterion {criterion}",
                f"Its criteria are {', '.join(ids)}.",
            )
    return rubric


def _rubric_of(config: Config, chain: Chain | None) -> Rubric:
    said = chain.judge if chain else None
    if chain is None or said is None or said.custom_rubrics is None:
        return load_rubric(config.filter.rubric)
    if "rubric" in config.filter.model_fields_set:
        log.info("filter.rubric is not used: the chain %s has custom_rubrics of its own", config.filter.chain)
    criteria = list(AGENTJET_CRITERIA) if said.builtin else []
    raw = {"id": chain.id, "custom_rubrics": said.custom_rubrics, "criteria": criteria}
    return parse_rubric(raw, f"custom_rubrics of {config.filter.chain}")


def judge_settings(config: Config, chain: Chain | None) -> JudgeSettings:
    """The judge as configured, with what the chain's `llm_evaluate` says of it, if there is one."""
    said = chain.judge if chain else None
    if said is None:
        return config.judge
    temperature = said.temperature
    if temperature is None and said.custom_rubrics is not None and config.judge.temperature is None:
        temperature = AGENTJET_TEMPERATURE
    given = {"temperature": temperature, "max_thread": said.max_thread, "max_tokens": said.max_tokens}
    return config.judge.model_copy(update={name: value for name, value in given.items() if value is not None})
