"""The files of docs/operate/ are right: Prometheus reads them, and alerts fire when they should.

`promtool` is in Debian's package `prometheus`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from tests.factories.metrics import needs_promtool, promtool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "operate"
ALERTS = FOLDER / "flywheel-alerts.yml"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["expr"]


def named(expression: str) -> set[str]:
    names = set(re.findall(r"\bflywheel_\w+", expression))
    return {re.sub(r"(_seconds)_(?:bucket|count|sum)$", r"\1", name) for name in names}


def test_rules_and_panels_name_metrics_that_are() -> None:
    page = set(re.findall(r"^- `(flywheel_\w+)", (ROOT / "docs" / "reference" / "files.md").read_text(), re.M))
    used = set().union(*map(named, [*expressions(), *(rule["expr"] for rule in RULES)]))
    assert used - page == set()
    for series in ("phase", "step", "reward", "kl", "tokens_per_second"):
        assert f"flywheel_live_round_{series}" in used
    assert {"flywheel_judge_call_seconds", "flywheel_swaps_total", "flywheel_gate_decisions_total"} < used


def test_the_dashboard_can_be_imported() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    areas = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in panels
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(set(areas)) == len(areas), "panels overlap"
    assert max(x for x, _ in areas) < 24
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", "it would ask a data source of its author"
            assert panel["targets"]


def test_every_alert_says_what_and_what_to_do() -> None:
    for rule in RULES:
        assert rule["alert"].startswith("Flywheel")
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    commands = re.findall(r"`flywheel ([a-z-]+)", ALERTS.read_text())
    assert set(commands) <= {"run", "audit", "status", "dead-letters", "why", "docs"}


@needs_promtool
def test_prometheus_reads_the_configuration_and_the_rules() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")
    promtool("check", "rules", "--lint-fatal", ALERTS)


@needs_promtool
def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "5m", "$instance": ".*"}
    rules = []
    for index, expression in enumerate(expressions()):
        filled = reduce(lambda text, pair: text.replace(*pair), variables.items(), expression)
        rules.append({"record": f"panel:{index}", "expr": filled})
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", file)


SELDOM = "0x60 "
"""An hour without anything."""
FIRES: dict[str, dict[str, str]] = {
    "FlywheelDown": {'up{job="flywheel"}': "1x60 0x60"},
    "FlywheelNotBalanced": {"flywheel_balanced": "1x60 0x60"},
    "FlywheelJudgeFailing": {"flywheel_judge_failing": SELDOM + "1x60"},
    "FlywheelJudgeCallsFail": {
        'flywheel_judge_call_seconds_count{endpoint="judge",outcome="failed"}': "0+1x120",
        'flywheel_judge_call_seconds_count{endpoint="judge",outcome="answered"}': "0+3x120",
    },
    "FlywheelJudgeSlow": {
        'flywheel_judge_call_seconds_bucket{endpoint="judge",outcome="answered",le="32"}': "0+1x120",
        'flywheel_judge_call_seconds_bucket{endpoint="judge",outcome="answered",le="64"}': "0+10x120",
        'flywheel_judge_call_seconds_bucket{endpoint="judge",outcome="answered",le="+Inf"}': "0+10x120",
    },
    "FlywheelDeadLetters": {"flywheel_dead_letters_open": "2x90 3x30"},
    "FlywheelSource": {'flywheel_source_condition{source="a",condition="locked"}': "_x60 1x60"},
    "FlywheelSlowRead": {'flywheel_source_longest_read_seconds{source="a"}': "0.004x90 0.2x30"},
    "FlywheelServer": {'flywheel_replica_condition{replica="a",condition="wrong weights"}': "_x60 1x60"},
    "FlywheelCallsLost": {'flywheel_calls_dropped_total{replica="a"}': "0x90 4x30"},
    "FlywheelSwapFailed": {'flywheel_swaps_total{outcome="failed"}': "1x90 2x30"},
    "FlywheelRolledBack": {'flywheel_swaps_total{outcome="rolled_back"}': "0x90 1x30"},
    "FlywheelRoundFailed": {'flywheel_rounds{state="failed"}': "0x90 1x30"},
    "FlywheelRoundPaused": {"flywheel_live_round_paused": SELDOM + "1x60"},
}
"""Series of a sample a minute that make each alert fire after two hours."""
CALM = {
    'up{job="flywheel"}': "1x120",
    "flywheel_daemon_up": "1x120",
    "flywheel_balanced": "1x120",
    "flywheel_judge_failing": "0x120",
    'flywheel_judge_call_seconds_count{endpoint="judge",outcome="failed"}': "0x120",
    'flywheel_judge_call_seconds_count{endpoint="judge",outcome="answered"}': "0+9x120",
    'flywheel_judge_call_seconds_bucket{endpoint="judge",outcome="answered",le="1.0"}': "0+9x120",
    'flywheel_judge_call_seconds_bucket{endpoint="judge",outcome="answered",le="+Inf"}': "0+9x120",
    "flywheel_dead_letters_open": "3x120",
    'flywheel_source_condition{source="a",condition="ok"}': "1x120",
    'flywheel_source_longest_read_seconds{source="a"}': "0.2x120",
    'flywheel_replica_condition{replica="a",condition="ok"}': "1x120",
    'flywheel_swaps_total{outcome="done"}': "0x60 1x60",
    'flywheel_swaps_total{outcome="failed"}': "2x120",
    'flywheel_rounds{state="failed"}': "2x120",
    "flywheel_live_round_paused": "0x120",
}


def case(series: dict[str, str], wanted: str) -> dict[str, Any]:
    """That of all alerts only `wanted` fires, or none."""
    listed = [{"series": name, "values": values} for name, values in series.items()]
    checks = [
        {"eval_time": "120m", "alertname": rule["alert"], "exp_alerts": []}
        for rule in RULES
        if rule["alert"] != wanted
    ]
    # promtool compares labels and texts too; that it fires is an expression.
    fires = {"expr": f'count(ALERTS{{alertname="{wanted}",alertstate="firing"}})', "eval_time": "120m"}
    found = [{"labels": "{}", "value": 1}] if wanted else []
    return {
        "interval": "1m",
        "input_series": listed,
        "alert_rule_test": checks,
        "promql_expr_test": [{**fires, "exp_samples": found}],
    }


@needs_promtool
def test_each_alert_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    assert set(FIRES) == {rule["alert"] for rule in RULES}
    cases = [case(CALM, ""), *(case(series, wanted) for wanted, series in FIRES.items())]
    file = tmp_path / "alerts_test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", file)
