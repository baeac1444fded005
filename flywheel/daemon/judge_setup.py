"""The rubric and the judge that apply: the configuration and its filter chain together."""

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
    """The part of a task that the judge sees."""
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
    """The rubric of the chain (AgentJet's `custom_rubrics`), else the configured file. Raises ConfigError."""
    chain = chain or chain_of(config)
    step = chain.judge if chain else None
    if chain is None or step is None or step.custom_rubrics is None:
        rubric = load_rubric(config.filter.rubric)
    else:
        if "rubric" in config.filter.model_fields_set:
            log.info("filter.rubric is not used: the chain %s has its own custom_rubrics", config.filter.chain)
        criteria = list(AGENTJET_CRITERIA) if step.builtin else []
        raw = {"id": chain.id, "custom_rubrics": step.custom_rubrics, "criteria": criteria}
        rubric = parse_rubric(raw, f"custom_rubrics of {config.filter.chain}")
    ids = [criterion.id for criterion in rubric.every]
    for criterion in config.gate.non_inferiority_margins:
        if criterion not in ids:
            raise ConfigError(
                "use gate.non_inferiority_margins",
                f"the rubric {rubric.id} has no criterion {criterion}",
                f"Its criteria are {', '.join(ids)}.",
            )
    return rubric


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
