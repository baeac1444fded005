"""What commands say of a configuration of Trinity-RFT, which is for `flywheel.tune`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.config.file import load
from flywheel.errors import ConfigError
from tests.cli.conftest import Run

FILE = """\
project: mine
algorithm: {algorithm_type: ppo}
model: {model_path: "${oc.env:A_MODEL}"}
buffer: {batch_size: 16}
monitor: {monitor_args: {api_key: hidden-by-all-means}}
"""


def test_commands_point_to_tune_and_config_show_says_what_the_file_means(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_MODEL", "/models/one")
    file = tmp_path / "trinity.yaml"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=r"configuration of Trinity-RFT.*flywheel\.tune"):
        load(file)
    for command in (["run", "--once"], ["ingest"]):
        ran = flywheel(*command, "-c", str(file))
        assert ran.code == 78
        assert "flywheel.tune(config_path=" in ran.err
    shown = {each["key"]: each for each in flywheel("config", "show", "-c", str(file), "--json").json["trinity"]}
    assert shown["model.model_path"] == {
        "key": "model.model_path",
        "value": "/models/one",
        "here": "used as model.base",
    }
    assert shown["algorithm.algorithm_type"]["here"].startswith("refused: ")
    assert shown["project"]["here"].startswith("without effect: ")
    text = flywheel("config", "show", "-c", str(file)).out
    assert "used as training.prompts_per_step" in text
    assert "hidden-by-all-means" not in text
