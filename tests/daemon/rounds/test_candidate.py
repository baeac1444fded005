"""Adapters that another trainer made: which are refused, which data is held out, and the round that compares one."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds import candidate
from flywheel.daemon.rounds.candidate import UNKNOWN, misfit, take
from flywheel.daemon.rounds.planner import spec_of
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.errors import ConfigError, TrainError
from flywheel.judge.rubric.file import load_rubric
from flywheel.records.round import AdapterRef, Candidate, RoundResult, RoundSpec
from flywheel.records.states import RoundState, Split
from flywheel.serving.base_layers import compared
from flywheel.sources.jsonl.data_set import answer_of
from flywheel.store import gate_tests, rounds
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import adapters, round_samples
from flywheel.store.views import balance, lineage
from flywheel.system.files import tree_sha256, write_json
from flywheel.training.data.round_directory import identity_of
from flywheel.training.engine.policy import check_candidate, rank
from tests.conftest import POLICY
from tests.daemon.rounds.workers import works
from tests.factories.config import BOXED_RUBRIC, make_config, with_settings
from tests.factories.round import put_deployed
from tests.factories.trace import replies_on, reply, write_lines
from tests.factories.verdict import put_judged, put_tasks
from tests.factories.web import client
from tests.factories.wheel import comparison
from tests.serving.fake_vllm import PROBE, FakeVllm

pytestmark = [pytest.mark.slow, pytest.mark.training, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
"""Adapters are made by PEFT. vLLM's models import what warns."""

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def compared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has loaded transformers."""
    monkeypatch.setattr(candidate, "answer_of", lambda python, module, request, attempted: compared(request))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Has PEFT make an adapter on the tiny policy, with a configuration of this type and these options."""

    def made(kind: str = "LoraConfig", **options: Any) -> Path:
        import peft
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(POLICY))
        defaults: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
        if kind == "LoraConfig":
            defaults |= {"r": 8, "lora_alpha": 16}
        folder = tmp_path_factory.mktemp("adapter")
        with warnings.catch_warnings():
            # PEFT warns of what is refused here.
            warnings.simplefilter("ignore")
            peft.get_peft_model(model, getattr(peft, kind)(**{**defaults, **options})).save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def plain(make: Make) -> Path:
    return make()


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    """A plain adapter that a test may change."""
    return Path(shutil.copytree(plain, tmp_path / "trl" / "checkpoint-9"))


@pytest.fixture
def config(tmp_path: Path, server: tuple[FakeVllm, str]) -> Config:
    return make_config(
        tmp_path,
        model={"base": str(POLICY), "alias": "agent"},
        serving={"urls": [server[1]], "drain_seconds": 0, "max_lora_rank": 64},
        gate={"min_tasks": 2, "min_power": 0},
        daemon={"round_attempts": 1},
    )


def rounds_of(store: Store, config: Config) -> Rounds:
    return Rounds(store, config, load_rubric(BOXED_RUBRIC), Deployer(store, config))


@pytest.fixture
async def filled(store: Store) -> Store:
    """Two accepted samples and four held-out tasks."""
    await store.write(put_tasks, 2, 4)
    return store


def taken(folder: Path, config: Config) -> Candidate:
    """What is known of the adapter in a folder once it is copied and checked."""
    return take(folder, config.state_dir / "stage", config, UNKNOWN, None, "compare it")


def changed(folder: Path, **values: Any) -> None:
    """Another `adapter_config.json`; None removes a key."""
    path = folder / "adapter_config.json"
    kept = {key: value for key, value in {**json.loads(path.read_text()), **values}.items() if value is not None}
    path.write_text(json.dumps(kept))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_dora": True}, "has use_dora, which vLLM does not serve"),
        ({"bias": "all"}, "has bias all, which vLLM does not serve"),
        ({"lora_bias": True}, "has lora_bias, which vLLM does not serve"),
        ({"modules_to_save": ["norm"]}, "has modules_to_save, which vLLM does not serve"),
        ({"trainable_token_indices": [5, 6]}, "has trainable_token_indices, which vLLM does not serve"),
        ({"target_modules": ["lm_head", "q_proj"]}, "it adapts lm_head: "),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "it adapts embed_tokens: "),
        ({"target_modules": "model.embed_tokens"}, "it adapts embed_tokens: "),
        ({"init_lora_weights": "olora"}, "has init_lora_weights olora, which vLLM does not serve"),
        ({"r": 12}, "its rank is 12, and vLLM supports 1, 8, 16"),
        ({"rank_pattern": {"q_proj": 12}}, "its rank is 12"),
        ({"r": 128}, "rank 128 > serving.max_lora_rank 64"),
        ({"kind": "IA3Config", "feedforward_modules": []}, "its peft_type is IA3, and only LoRA is served"),
    ],
)
def test_adapters_that_would_not_be_served_as_trained_are_refused_by_name(
    make: Make, config: Config, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(TrainError) as refused:
        taken(make(**options), config)
    assert why in refused.value.why
    assert refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "olora"}])
def test_vllm_refuses_them_too(make: Make, options: dict[str, Any]) -> None:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    with pytest.raises(ValueError, match="vLLM does not"):
        PEFTHelper.from_local_dir(str(make(**options)), None).validate_legal(LoRAConfig(max_lora_rank=64))


def test_rslora_is_served_with_its_own_scale(make: Make, config: Config) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    folder = make(use_rslora=True)
    assert taken(folder, config).source == str(folder)
    assert PEFTHelper.from_local_dir(str(folder), None).vllm_lora_scaling_factor == 16 / math.sqrt(8)


def only_pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def whole_model(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(POLICY, folder)


def empty(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def cut_short(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def no_safetensors(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_text("PK")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (only_pickled, "its weights are in adapter_model.bin, a format that can run code"),
        (whole_model, "it holds a whole model, not a LoRA adapter"),
        (empty, "it has no adapter_config.json"),
        (shutil.rmtree, "there is no such folder"),
        (cut_short, "is cut short"),
        (no_safetensors, "it holds no adapter that can be copied and read"),
    ],
)
def test_other_files_are_refused_by_name(
    adapter: Path, config: Config, damage: Callable[[Path], object], why: str
) -> None:
    damage(adapter)
    with pytest.raises(TrainError) as refused:
        taken(adapter, config)
    assert why in refused.value.why
    assert refused.value.hint


def shifted(folder: Path) -> None:
    """Every layer is one that this model does not have."""
    renamed(folder, b"layers.0.", b"layers.7.")


def renamed(folder: Path, old: bytes, new: bytes) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(old, new))


def not_finite(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\xc0\x7f")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (shifted, "has no layer model.layers.7.self_attn."),
        (lambda folder: renamed(folder, b"base_model.model.model.", b"language_model.model__."), "has no layer"),
        (not_finite, "has values that are not finite"),
        (lambda folder: changed(folder, r=16), "of rank 16, and model.layers.0.self_attn."),
    ],
)
def test_matrices_that_would_not_be_served_are_refused(
    adapter: Path, config: Config, damage: Callable[[Path], object], why: str
) -> None:
    damage(adapter)
    with pytest.raises(TrainError, match=why) as refused:
        taken(adapter, config)
    assert refused.value.hint


@pytest.mark.parametrize("targets", ["null", "7", "{}"])
def test_target_modules_that_name_no_layer_are_refused(adapter: Path, config: Config, targets: str) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": json.loads(targets)}))
    with pytest.raises(
        TrainError, match=r"^cannot compare it: target_modules in its adapter_config\.json is "
    ) as refused:
        taken(adapter, config)
    assert refused.value.why.endswith(f"is {targets}, which names no layer")


def test_a_base_model_that_cannot_be_built_is_said(adapter: Path, config: Config, tmp_path: Path) -> None:
    own = shutil.copytree(POLICY, tmp_path / "own")
    (own / "config.json").write_text('{"model_type": "of-somebody"}')
    changed(adapter, base_model_name_or_path=str(own))
    made = taken(adapter, with_settings(config, model={"base": str(own)}))
    assert made.base.startswith(f"its shapes were not compared with its base model: {own} cannot be built: ")
    assert made.base in made.summary


def test_another_process_compares_them(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "answer_of", answer_of)
    assert misfit(POLICY, adapter, "compare it") == ("", "")
    shifted(adapter)
    why, unknown = misfit(POLICY, adapter, "compare it")
    assert ("has no layer model.layers.7" in why, unknown) == (True, "")
    monkeypatch.setenv("FLYWHEEL_TRAINER_PYTHON", "/gone/python")
    assert misfit(POLICY, adapter, "compare it") == ("", "/gone/python does not start: No such file or directory")


def test_other_files_of_a_trainer_are_left(adapter: Path, config: Config) -> None:
    """TRL writes its arguments beside the adapter as a pickle."""
    for name in ("training_args.bin", "optimizer.pt", "README.md"):
        (adapter / name).write_text("pickled")
    copy = Path(taken(adapter, config).path)
    assert {path.name for path in copy.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_the_same_base_model_at_another_path_is_taken(adapter: Path, config: Config, tmp_path: Path) -> None:
    """The copy names this one: a server that starts with it compares paths."""
    shutil.copytree(POLICY, tmp_path / "elsewhere")
    changed(adapter, base_model_name_or_path=str(tmp_path / "elsewhere"))
    made = taken(adapter, config)
    assert made.base == ""
    copied = json.loads((Path(made.path) / "adapter_config.json").read_text())
    assert copied["base_model_name_or_path"] == str(POLICY)


def test_another_base_model_is_refused_with_both_names(adapter: Path, config: Config, tmp_path: Path) -> None:
    other = shutil.copytree(POLICY, tmp_path / "other")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    changed(adapter, base_model_name_or_path=str(other))
    with pytest.raises(TrainError, match=f"it was trained on {other}, and model.base is {POLICY}"):
        taken(adapter, config)


def test_names_of_the_hub_are_compared_as_names(adapter: Path, config: Config) -> None:
    changed(adapter, base_model_name_or_path="an/other")
    named = with_settings(config, model={"base": "Some/Model"})
    with pytest.raises(TrainError, match=r"it was trained on an/other, and model.base is Some/Model"):
        taken(adapter, named)
    changed(adapter, base_model_name_or_path="some/model")
    assert taken(adapter, named).base == (
        "its shapes were not compared with its base model: Some/Model is not on this machine"
    )


@pytest.mark.parametrize(
    ("named", "said"), [(None, "it names no base model"), ("/gone/model", "its base model, /gone/model, is not on")]
)
def test_without_a_known_base_model_the_shapes_decide(
    adapter: Path, config: Config, tmp_path: Path, named: str | None, said: str
) -> None:
    changed(adapter, base_model_name_or_path=named)
    made = taken(adapter, config)
    assert made.base.startswith(said)
    assert made.base.endswith(f"but its matrices fit {POLICY}")
    assert made.base in made.summary

    tool_policy = with_settings(config, model={"base": str(other_shape(tmp_path))})
    with pytest.raises(TrainError, match=f"^cannot compare it: {said}.*, and .* is \\[") as refused:
        taken(adapter, tool_policy)
    assert "base_model_name_or_path" in refused.value.hint
    elsewhere = with_settings(config, model={"base": "not/here"})
    with pytest.raises(TrainError, match="and not/here is not on this machine"):
        taken(adapter, elsewhere)


def other_shape(folder: Path) -> Path:
    """A model with the same layers of another width."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(POLICY), hidden_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "narrow")
    return folder / "narrow"


def test_the_engines_of_the_round_take_the_rank_of_the_adapter(make: Make, config: Config) -> None:
    folder = make(r=8, rank_pattern={"v_proj": 32})
    ref = AdapterRef(name="r0001", path=str(folder), sha256="")
    assert rank([None, ref], with_settings(config, training={}).training.lora) == 32


async def row_of(store: Store, name: str = "r0001") -> Any:
    return await store.read(rounds.by_name, name)


async def planned(store: Store, config: Config, adapter: Path, data: Path | None = None) -> RoundSpec:
    """What the worker of a round that compares an adapter gets."""
    name = await rounds_of(store, config).plan_candidate(adapter, data)
    row = await row_of(store, name)
    return await store.read(spec_of, row, config, load_rubric(BOXED_RUBRIC))


async def test_a_round_without_samples_is_planned_with_a_test_of_the_gate(
    filled: Store, config: Config, adapter: Path
) -> None:
    spec = await planned(filled, config, adapter)
    assert spec.train == [] and len(spec.held_out) == 4
    assert spec.candidate is not None and spec.test is not None
    assert spec.candidate.name == "r0001"
    assert (spec.test.epoch, spec.test.number) == (1, 1)
    states = (await filled.read(balance.balance)).task_states
    assert states == {"accepted": 4, "rejected": 2}, "none is reserved"
    row = await row_of(filled)
    assert row.trigger == f"by hand: an adapter of another trainer, {adapter}; {UNKNOWN}"


async def test_what_happens_to_the_folder_afterwards_changes_nothing(
    filled: Store, config: Config, adapter: Path
) -> None:
    spec = await planned(filled, config, adapter)
    shutil.rmtree(adapter)
    check_candidate(spec.candidate)
    assert spec.candidate is not None
    (Path(spec.candidate.path) / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(TrainError, match="cannot compare r0001: the files in"):
        check_candidate(spec.candidate)


async def test_a_worker_goes_on_only_with_the_same_adapter(filled: Store, config: Config, adapter: Path) -> None:
    spec = await planned(filled, config, adapter)
    assert spec.candidate is not None
    other = spec.model_copy(update={"candidate": spec.candidate.model_copy(update={"sha256": "0" * 64})})
    assert identity_of(other) != identity_of(spec)


async def test_the_gate_must_be_able_to_decide(store: Store, config: Config, adapter: Path) -> None:
    await store.write(put_tasks, 0, 1)
    with pytest.raises(TrainError, match=r"1 held-out tasks are judged, and gate.min_tasks is 2"):
        await planned(store, config, adapter)
    assert not any((config.state_dir / "rounds").glob("*"))


async def test_only_one_round_at_a_time(filled: Store, config: Config, adapter: Path) -> None:
    await planned(filled, config, adapter)
    with pytest.raises(TrainError, match="r0001 is planned"):
        await planned(filled, config, adapter)


async def test_an_unreadable_record_fails_the_round_alone(filled: Store, config: Config, adapter: Path) -> None:
    await planned(filled, config, adapter)
    (config.state_dir / "rounds/r0001/candidate.json").write_text("{}")
    own = rounds_of(filled, config)
    assert await own.finish_live() is RoundState.FAILED
    row = await row_of(filled)
    assert "candidate.json cannot be read" in row.reason


async def test_data_without_a_held_out_conversation_is_recorded(
    filled: Store, config: Config, adapter: Path, tmp_path: Path
) -> None:
    """Numbers differ: another sum is another question."""
    lines = [{"question": each.query, "answer": each.answer} for each in replies_on(Split.TRAIN, 2)]
    data = write_lines(tmp_path / "data.jsonl", *lines, {"messages": [{"role": "user", "content": "Hello!"}]})
    spec = await planned(filled, config, adapter, data)
    assert spec.candidate is not None
    assert spec.candidate.exposure == f"no held-out conversation is in its training data, {data} (3 lines)"
    assert spec.candidate.trained_on == str(data)


def as_task(question: str) -> dict[str, Any]:
    return {"question": question, "answer": "?"}


def as_conversation(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "?"}]}


def as_preference(question: str) -> dict[str, Any]:
    return {"prompt": question, "chosen": "yes", "rejected": "no"}


def as_near(question: str) -> dict[str, Any]:
    return as_task(f"Please: {question.upper()}")


@pytest.mark.parametrize("form", [as_task, as_conversation, as_preference, as_near])
async def test_an_adapter_that_was_trained_on_held_out_conversations_is_refused(
    filled: Store, config: Config, adapter: Path, tmp_path: Path, form: Callable[[str], dict[str, Any]]
) -> None:
    held_out = replies_on(Split.HELD_OUT, 2)
    data = write_lines(tmp_path / "data.jsonl", as_task("Hello?"), *(form(each.query) for each in held_out))
    with pytest.raises(TrainError) as refused:
        await planned(filled, config, adapter, data)
    assert "contamination: 2 held-out tasks" in refused.value.why
    lines = await filled.read(lambda conn: rounds.payloads(conn, range(1, 99)))
    keys = [line["task_id"] for line in lines if line["main_query"] in {each.query for each in held_out}]
    assert all(key in refused.value.why for key in keys)
    assert await filled.read(rounds.live) is None


async def test_a_question_of_a_template_counts_if_it_is_the_same(
    store: Store, config: Config, adapter: Path, tmp_path: Path
) -> None:
    """Of more than fifty questions that are nearly the same, both splits have some, and the bands of the first alone
    are stored."""
    asked = (
        "Please summarise this long report about the city of {} for our weekly newsletter in three short sentences"
    )
    [first] = replies_on(Split.TRAIN, 1, query=asked.format("town"))
    many = [first] + [
        reply(1000 + n, query=asked.format(f"town{chr(97 + n % 26)}{chr(97 + n // 26)}")) for n in range(120)
    ]
    await store.write(put_judged, *many)
    rows = await store.read(lambda conn: rounds.payloads(conn, range(1, 200)))
    splits = {line["main_query"]: line["metadata"]["split"] for line in rows}
    last = [each.query for each in many[60:]]
    held_out, trained = ([query for query in last if splits[query] == split] for split in ("held-out", "train"))
    assert held_out and trained
    data = write_lines(tmp_path / "data.jsonl", as_task(held_out[0]))
    with pytest.raises(TrainError, match="held-out task"):
        await planned(store, config, adapter, data)


async def test_data_that_cannot_be_compared_is_an_error(
    filled: Store, config: Config, adapter: Path, tmp_path: Path
) -> None:
    for text in ("", '{"text": "no question"}\n'):
        (tmp_path / "data.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="--trained-on"):
            await planned(filled, config, adapter, tmp_path / "data.jsonl")


def leave_result(spec: RoundSpec, directory: Path, server: FakeVllm, lower: float) -> None:
    """What the worker of such a round leaves."""
    assert spec.candidate is not None
    path = directory / "adapter"
    shutil.copytree(spec.candidate.path, path)
    server.weights[str(path)] = PROBE.second.adapter
    result = RoundResult(
        round_id=spec.round_id,
        outcome="compared",
        adapter=AdapterRef(name=spec.round_id, path=str(path), sha256=tree_sha256(path)),
        comparison=comparison(lower),
        probe=PROBE,
        candidate=spec.candidate,
    )
    write_json(directory / "left.json", result.model_dump(mode="json"))


@pytest.mark.slow
@pytest.mark.parametrize(("lower", "state"), [(0.5, RoundState.PROMOTED), (-0.1, RoundState.REJECTED)])
async def test_the_ordinary_gate_decides_and_the_record_says_where_it_comes_from(
    filled: Store,
    config: Config,
    adapter: Path,
    server: tuple[FakeVllm, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lower: float,
    state: RoundState,
) -> None:
    spec = await planned(filled, config, adapter)
    directory = config.state_dir / "rounds" / "r0001"
    leave_result(spec, directory, server[0], lower)
    works(tmp_path, monkeypatch, 'mv "$3/left.json" "$3/result.json"')
    own = rounds_of(filled, config)
    assert await own.finish_live() is state
    is_better = state is RoundState.PROMOTED
    assert server[0].loaded == ({"agent@r0001": str(directory / "adapter")} if is_better else {})
    assert len(await filled.read(gate_tests.spent, 9)) == 1, "it spent a test as any round does"
    decision = await filled.read(gate_tests.decision_of, 1)
    assert decision is not None and decision.promote is is_better
    story = await filled.read(lineage.why, "r0001")
    assert story is not None
    assert (story["samples"], story["held_out"]) == ([], 4)
    assert story["candidate"]["source"] == str(adapter)
    assert story["candidate"]["exposure"] == UNKNOWN
    assert UNKNOWN in story["trigger"]
    assert (await filled.read(balance.balance)).balanced


@pytest.mark.slow
async def test_an_adapter_does_not_go_back_to_what_it_was_compared_with(
    filled: Store,
    config: Config,
    adapter: Path,
    server: tuple[FakeVllm, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await filled.write(put_deployed, str(POLICY), 1)
    spec = await planned(filled, config, adapter)
    assert spec.parent is not None and spec.parent.name == "r0001"
    leave_result(spec, config.state_dir / "rounds" / "r0002", server[0], -0.1)
    works(tmp_path, monkeypatch, 'mv "$3/left.json" "$3/result.json"')
    assert await rounds_of(filled, config).finish_live() is RoundState.REJECTED
    assert await filled.read(lineage.ancestors, "r0002") == []
    row = await filled.read(lambda conn: conn.execute(select(adapters).where(adapters.c.name == "r0002")).one())
    assert row.base_model == str(POLICY)
    assert (await row_of(filled, "r0002")).parent == "r0001", "what it was compared with"
    page = await asyncio.to_thread(lambda: client(config).get("/rounds/r0002").text)
    assert UNKNOWN in page and "Compared with" in page and "another trainer made its adapter" in page
    assert "<dt>Trained from" not in page
    assert "r0001" not in page.partition("What its weights come from")[2].partition("</table>")[0]


async def test_with_targets_one_is_named(store: Store, config: Config, adapter: Path, tmp_path: Path) -> None:
    targets = {name: {"agents": [name], "alias": name} for name in ("writer", "critic")}
    several = make_config(
        tmp_path, model={"base": str(POLICY)}, gate={"min_tasks": 1, "min_power": 0}, targets=targets
    )
    with pytest.raises(TrainError, match="there are several targets: writer, critic"):
        await rounds_of(store, several).plan_candidate(adapter, None)


async def test_a_killed_plan_leaves_nothing_that_a_later_round_takes(
    filled: Store, config: Config, adapter: Path
) -> None:
    """An ordinary round with the number of one that was never stored trains."""
    left = config.state_dir / "rounds" / "r0001" / "candidate"
    left.mkdir(parents=True)
    (left.parent / "candidate.json").write_text("{}")
    (config.state_dir / "rounds" / ".candidate").mkdir()
    own = rounds_of(filled, config)
    row = await row_of(filled, await own.plan("test"))
    spec = await filled.read(spec_of, row, config, load_rubric(BOXED_RUBRIC))
    assert spec.candidate is None and len(spec.train) == 2
    used = await filled.read(lambda conn: conn.execute(select(round_samples.c.split)).scalars().all())
    assert "train" in used
