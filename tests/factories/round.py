"""Rounds, their adapters and deployments, stored as the daemon stores them, and what the worker gets and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, insert, select, update

from flywheel.config.file import Config
from flywheel.config.training import GateSettings
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.records.round import (
    AdapterRef,
    Comparison,
    CriterionComparison,
    GateTest,
    RoundResult,
    RoundSpec,
    Score,
    StageResult,
    SuiteComparison,
)
from flywheel.records.states import LIVE_ROUND, AdapterState, DeploymentState, RoundState
from flywheel.store import gate_tests
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import adapters, deployments, rounds
from flywheel.system.files import tree_sha256
from flywheel.training.gate.gate import decide
from tests.factories.task import round_task
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm

POLICY = Path(__file__).parents[2] / "demo" / "policy"
BOXED = {"version": 1, "id": "boxed", "criteria": [{"id": "boxed", "type": "contains", "value": "\\boxed{"}]}
AT = "2026-11-22T10:00:00.000+00:00"
GATE = GateSettings(min_tasks=8)
GUARDED = GateSettings(min_tasks=8, non_inferiority_margins={"safe": 0.05})
KEEPING = GateSettings.model_validate({"suites": {"math": {"file": "/math.jsonl", "margin": 0.05}}})


def round_spec(**values: Any) -> RoundSpec:
    """What a worker gets, of one task."""
    defaults: dict[str, Any] = {
        "round_id": "r0001", "attempt": 1, "seed": 1, "debug": False, "base_model": str(POLICY), "parent": None,
        "train": [round_task()], "held_out": [], "settings": Config().model_dump(mode="json"),
        "rubric": BOXED,
    }  # fmt: skip
    return RoundSpec(**{**defaults, **values})


def criterion(name: str, gain: float = 0.0, *, half: float = 0.04, tasks: int = 20) -> CriterionComparison:
    return CriterionComparison(
        criterion=name, tasks=tasks, candidate_mean=0.8 + gain, deployed_mean=0.8, gain=gain, lower=gain - half,
        upper=gain + half,
    )  # fmt: skip


def suite(name: str, gain: float = 0.0, *, half: float = 0.04, tasks: int = 20) -> SuiteComparison:
    figures = criterion(name, gain, half=half, tasks=tasks).model_dump(exclude={"criterion"})
    return SuiteComparison(name=name, conversations=tasks, undecided=0, **figures)


def comparison(
    gain: float = 0.2, *, half: float = 0.1, keys: Sequence[str] = (), tasks: int = 20, **values: Any
) -> Comparison:
    scores = [
        Score(task_id=key, candidate=1.0 if number % 2 else 0.25, deployed=0.5) for number, key in enumerate(keys)
    ]
    defaults: dict[str, Any] = {
        "tasks": tasks, "conversations": tasks, "samples": 2, "undecided": 0, "candidate_mean": 0.5 + gain,
        "deployed_mean": 0.5, "gain": gain, "lower": gain - half, "upper": gain + half, "confidence": 0.9951,
        "method": "test", "spread": 0.2, "scores": scores, "criteria": [criterion("correct", 0.1), criterion("safe")],
    }  # fmt: skip
    return Comparison(**(defaults | values))


def put_round(
    conn: Connection,
    number: int = 1,
    state: RoundState = RoundState.PROMOTED,
    path: Path | None = None,
    **values: Any,
) -> str:
    """A round in the directory `path`; its name."""
    name = f"r{number:04d}"
    is_live, has_ended = state in LIVE_ROUND, state not in (*LIVE_ROUND, RoundState.PASSED)
    defaults: dict[str, Any] = {
        "trigger": "test", "config_hash": "c", "rubric_hash": "r", "seed": number,
        "dir": str(path or f"/rounds/{name}"), "created_at": AT, "finished_at": AT if has_ended else None,
        "live": 1 if is_live else None,
    }  # fmt: skip
    conn.execute(insert(rounds).values(id=number, name=name, state=state.value, **{**defaults, **values}))
    return name


def put_adapter(conn: Connection, number: int = 1, path: Path | None = None, **values: Any) -> str:
    """The adapter of that round; its name. If its files exist, their hash is stored."""
    name = f"r{number:04d}"
    defaults: dict[str, Any] = {
        "base_model": "a/base", "path": str(path or f"/rounds/{name}/adapter"), "state": AdapterState.READY.value,
        "sha256": tree_sha256(path) if path and path.exists() else "0" * 64, "created_at": AT,
    }  # fmt: skip
    conn.execute(insert(adapters).values(name=name, round_id=number, **{**defaults, **values}))
    return name


def put_trained(conn: Connection, number: int, path: Path, *servers: FakeVllm, base_model: str = BASE) -> None:
    """A round and its adapter in `path`, which is made if it is missing; `servers` have its weights."""
    if not path.exists():
        path.mkdir()
        (path / "weights").write_text(str(number))
    for server in servers:
        server.weights[str(path)] = PROBE.second.adapter
    put_round(conn, number, RoundState.REJECTED, path)
    put_adapter(conn, number, path, base_model=base_model, probe=PROBE.model_dump(mode="json"))


def put_deployed(conn: Connection, base_model: str, number: int = 1, alias: str = "agent") -> None:
    """A round whose adapter serves as `alias`."""
    put_round(conn, number)
    put_adapter(conn, number, base_model=base_model)
    put_deployment(conn, f"r{number:04d}", alias=alias, active_alias=alias)


def put_tested_round(
    conn: Connection,
    number: int,
    state: RoundState,
    directory: Path,
    seen: Comparison | None = None,
    *,
    gate: GateSettings = GATE,
    reason: str | None = None,
    tail: str = "",
    decided: bool = True,
    parent: str | None = None,
    stages: Sequence[StageResult] = (),
) -> None:
    """A round with a test of the gate; with a comparison it has an adapter, and if `decided` a decision, whose
    reason is the round's."""
    path = directory / f"r{number:04d}"
    trigger = "min_samples: 67 samples are free"
    name = put_round(conn, number, state, path, trigger=trigger, parent=parent, reason=reason or "")
    gate_tests.plan(conn, number, GateTest(epoch=1, number=number, alpha=0.0024 / number**2))
    if seen is None:
        return
    adapter = AdapterRef(name=name, path=str(path / "adapter"), sha256="0" * 64)
    result = RoundResult(round_id=name, outcome="trained", adapter=adapter, comparison=seen, stages=[*stages])
    conn.execute(update(rounds).where(rounds.c.id == number).values(result=result.model_dump(mode="json")))
    gate_tests.spend(conn, number, seen)
    put_adapter(conn, number, path / "adapter", id=number, parent=parent)
    if decided:
        decision = decide(seen, gate)
        gate_tests.record_decision(conn, number, decision)
        text = decision.reason + tail if reason is None else reason.format(reason=decision.reason)
        conn.execute(update(rounds).where(rounds.c.id == number).values(reason=text))


def put_deployment(conn: Connection, adapter: str | None, reason: str = "test", **values: Any) -> None:
    """A deployment that is active, or retired if `retired_at` is given."""
    is_retired = "retired_at" in values
    report = {
        "alias": "agent", "target": f"agent@{adapter}",
        "replicas": [
            {"url": "http://127.0.0.1:8000", "previous": "base", "loaded": True, "pointed": True, "error": "",
             "serves": f"agent@{adapter}", "condition": "ok",
             "probe": {"tokens": 64, "parent_slope": None, "adapter_slope": 0.97, "standard_error": 0.0421,
                       "noise": 0.0001, "residual": 0.00015, "indistinct": False, "passed": True}}
        ],
    }  # fmt: skip
    state = DeploymentState.RETIRED if is_retired else DeploymentState.ACTIVE
    defaults = {
        "alias": "agent", "active_alias": None if is_retired else "agent", "endpoints": ["http://127.0.0.1:8000"],
        "state": state.value, "report": report, "created_at": AT, "activated_at": AT,
    }  # fmt: skip
    conn.execute(insert(deployments).values(adapter=adapter, reason=reason, **(defaults | values)))


def put_answers(directory: Path, keys: Sequence[str], text: str = "{side} says {key}") -> None:
    """Two answers of each side about each task, as the worker writes them. The candidate's second one is right."""
    directory.mkdir(parents=True, exist_ok=True)
    criteria = [{"criterion": "correct", "choice": "yes", "value": 1.0, "passed": True, "reason": "it fits"}]
    lines = [
        {
            "task_id": key, "side": side, "seed": seed, "steps": [], "answer": text.format(side=side, key=key),
            "truncated": False, "reward": float(seed if side == "candidate" else not seed), "error": "",
            "criteria": criteria,
        }
        for key in keys
        for side in ("candidate", "deployed")
        for seed in (0, 1)
    ]  # fmt: skip
    (directory / "evaluation.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


async def planned_round(store: Store, config: Config) -> RoundSpec:
    """What the worker of a round gets that is planned now."""
    rubric = rubric_of(config)
    row = await store.write(planner.plan, config, rubric, config.state_dir / "rounds", "test")
    return await store.read(planner.spec_of, row, config, rubric)


async def spec_again(store: Store, config: Config) -> RoundSpec:
    """What the worker of the only round gets with this configuration."""
    row = await store.read(lambda conn: conn.execute(select(rounds)).one())
    return await store.read(planner.spec_of, row, config, rubric_of(config))


async def debug_round(store: Store, config: Config) -> RoundSpec:
    return await store.read(planner.debug_spec, config, rubric_of(config))
