"""Adapters whose matrices fit no layer of the base model, with which vLLM would answer as the base model does."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.serving.base_layers import UnknownLayersError, why_misfit
from tests.conftest import POLICY
from tests.factories.adapter import put_matrices
from tests.serving.fake_vllm import FakeVllm, running, with_middleware

pytestmark = [pytest.mark.slow, pytest.mark.training, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
"""vLLM's models import what warns."""

LAYER = "model.layers.0.self_attn"
Q, K, DOWN = (128, 128), (64, 128), (128, 224)
FIT: Mapping[str, tuple[int, int]] = {
    f"{LAYER}.q_proj": Q,
    f"{LAYER}.k_proj": K,
    "model.layers.1.mlp.down_proj": DOWN,
}
WRONG: list[tuple[Mapping[str, tuple[int, int]], str]] = [
    ({**FIT, "model.layers.7.self_attn.q_proj": Q}, "has no layer model.layers.7.self_attn.q_proj"),
    ({f"language_model.{name}": sides for name, sides in FIT.items()}, f"has no layer language_model.{LAYER}.q_proj"),
    ({name.removeprefix("model."): sides for name, sides in FIT.items()}, "has no layer layers.0.self_attn.q_proj"),
    ({f"{LAYER}.qkv_proj": Q}, f"has no layer {LAYER}.qkv_proj"),
    ({f"{LAYER}.q_norm": Q}, f"has no layer {LAYER}.q_norm"),
    ({**FIT, f"{LAYER}.k_proj": Q}, f"and {LAYER}.k_proj of {POLICY} is [64, 128]"),
    ({**FIT, f"{LAYER}.q_proj": (128, 64)}, f"and {LAYER}.q_proj of {POLICY} is [128, 128]"),
    ({"model.layers.0.mlp.experts.0.gate_proj": Q}, "has no layer model.layers.0.mlp.experts.0.gate_proj"),
    ({}, "holds no matrix of an adapter"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves the configuration of a small model of this class, without weights."""

    def made(kind: str, architecture: str, **sides: Any) -> str:
        import transformers

        folder = tmp_path_factory.mktemp("base")
        config = getattr(transformers, kind)(**sides)
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return str(folder)

    return made


@pytest.fixture(scope="module")
def experts(base: Any) -> str:
    return base(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, vocab_size=99,
    )  # fmt: skip


@pytest.mark.parametrize(("layers", "why"), WRONG)
def test_matrices_that_fit_no_layer(tmp_path: Path, layers: Mapping[str, tuple[int, int]], why: str) -> None:
    assert why in why_misfit(str(POLICY), put_matrices(tmp_path / "a", layers))


def test_matrices_that_fit(tmp_path: Path) -> None:
    assert why_misfit(str(POLICY), put_matrices(tmp_path / "a", FIT), must_be_finite=True) == ""
    patterns = put_matrices(tmp_path / "b", FIT, 4, r=8, rank_pattern={"q_proj": 4, "k_proj": 4, "down_proj": 4})
    assert why_misfit(str(POLICY), patterns) == ""


def test_matrices_of_another_rank_or_alone(tmp_path: Path) -> None:
    assert "of rank 16, and" in why_misfit(str(POLICY), put_matrices(tmp_path / "a", FIT, 8, r=16))
    alone = put_matrices(tmp_path / "b", FIT)
    weights = alone / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"q_proj.lora_B.weight", b"q_proj.other.weight_"))
    assert f"of {LAYER}.q_proj it has no lora_B" in why_misfit(str(POLICY), alone)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    folder = put_matrices(tmp_path / "a", FIT, value=value)
    assert f"{LAYER}.k_proj.lora_A.weight has values that are not finite" in why_misfit(
        str(POLICY), folder, must_be_finite=True
    )


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_files_that_hold_no_adapter(tmp_path: Path, damage: bytes) -> None:
    folder = put_matrices(tmp_path / "a", FIT)
    (folder / "adapter_model.safetensors").write_bytes(damage)
    assert "holds no" in why_misfit(str(POLICY), folder)


def test_experts_have_numbers_or_one_matrix_for_all(experts: str, tmp_path: Path) -> None:
    mlp = "model.layers.0.mlp"
    by_number = {
        f"{mlp}.experts.3.gate_proj": (16, 32),
        f"{mlp}.experts.0.down_proj": (32, 16),
        f"{mlp}.gate": (4, 32),
    }
    assert why_misfit(experts, put_matrices(tmp_path / "a", by_number)) == ""
    assert "is [16, 32]" in why_misfit(
        experts, put_matrices(tmp_path / "b", {f"{mlp}.experts.3.gate_proj": (32, 32)})
    )
    outside = put_matrices(tmp_path / "c", {f"{mlp}.experts.4.gate_proj": (16, 32)})
    assert f"has no layer {mlp}.experts.4.gate_proj" in why_misfit(experts, outside)


def by_parameters(base: str, folder: Path, *names: str) -> Path:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=[f"mlp.experts.{n}" for n in names])
    peft.get_peft_model(model, settings).save_pretrained(folder)
    return folder


def test_target_parameters_of_peft(experts: str, base: Any, tmp_path: Path) -> None:
    both = by_parameters(experts, tmp_path / "a", "gate_up_proj", "down_proj")
    assert why_misfit(experts, both, must_be_finite=True) == ""
    other = shutil.copytree(experts, tmp_path / "other") / "config.json"
    other.write_text(re.sub(r'("num_(local_)?experts"): 4', r"\1: 8", other.read_text()))
    assert "of 8 experts" in why_misfit(str(other.parent), both)
    # vLLM takes the matrices of the first layer alone for those of the last one.
    assert "is [32, 16] of 4 experts" in why_misfit(experts, by_parameters(experts, tmp_path / "b", "gate_up_proj"))
    turned = base(
        "GptOssConfig", "GptOssForCausalLM", hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, vocab_size=99,
    )  # fmt: skip
    assert why_misfit(turned, by_parameters(turned, tmp_path / "c", "gate_up_proj", "down_proj")) == ""


def test_names_are_those_that_vllm_maps(base: Any, tmp_path: Path) -> None:
    """Those of an older version of transformers, and vLLM's own."""
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
    old = base("OPTConfig", "OPTForCausalLM", **text, ffn_dim=64, word_embed_proj_dim=32)
    more = {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64, "model_type": "gemma"}
    images = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    seeing = base(
        "PaliGemmaConfig", "PaliGemmaForConditionalGeneration", text_config={**text, **more}, vision_config=images
    )
    names = {old: ("model.decoder.", "decoder."), seeing: ("model.language_model.", "language_model.model.")}
    for model, starts in names.items():
        for start in ("", "language_model.", "model.", *starts):
            folder = tmp_path / Path(model).name / f"from {start}"
            why = why_misfit(model, put_matrices(folder, {f"{start}layers.0.self_attn.q_proj": (32, 32)}))
            assert ("has no layer" in why) == (start not in starts), start


def test_how_vllm_names_layers_may_be_unknown(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", None)
    own = base(
        "OPTConfig",
        "OPTForCausalLM",
        hidden_size=32,
        num_hidden_layers=1,
        word_embed_proj_dim=32,
        num_attention_heads=4,
    )
    assert why_misfit(own, put_matrices(tmp_path / "a", {"model.decoder.layers.0.self_attn.q_proj": (32, 32)})) == ""
    with pytest.raises(UnknownLayersError, match="how vLLM names the layers of"):
        why_misfit(own, put_matrices(tmp_path / "b", {"decoder.layers.0.self_attn.q_proj": (32, 32)}))


def test_a_base_model_that_cannot_be_built_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "of-somebody", "architectures": ["OfSomebody"]}')
    adapter = put_matrices(tmp_path / "a", FIT)
    with pytest.raises(UnknownLayersError, match=f"{tmp_path / 'base'} cannot be built: "):
        why_misfit(str(tmp_path / "base"), adapter)
    app = FakeVllm()
    with running(with_middleware(app, base_path=str(tmp_path / "base"))) as url:
        assert load(url, adapter).status_code == 200
    assert f"the adapter in {adapter} is not compared with the base model" in caplog.text


def load(url: str, folder: Path) -> httpx2.Response:
    wanted = {"lora_name": "agent@r0001", "lora_path": str(folder)}
    return httpx2.post(f"{url}/v1/load_lora_adapter", json=wanted, timeout=120)


def test_a_server_loads_what_fits_alone(tmp_path: Path) -> None:
    app = FakeVllm()
    with running(with_middleware(app, base_path=str(POLICY))) as url:
        for number, (layers, why) in enumerate(WRONG):
            refused = load(url, put_matrices(tmp_path / str(number), layers))
            assert refused.status_code == 400
            assert why in refused.json()["error"]["message"]
        assert "POST /v1/load_lora_adapter" not in app.calls
        assert load(url, put_matrices(tmp_path / "a", FIT)).status_code == 200
