"""What the losses use of TRL and transformers. A version that changes it breaks them: adapt them before raising the
pin."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest

from tests.factories.pair import PAIRS
from tests.factories.policy_training import Trained, made_settings, policy, policy_step, rows

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def parameters(kind: Any, name: str) -> list[str]:
    return list(inspect.signature(getattr(kind, name)).parameters)


def test_trl_has_what_the_losses_call_and_override() -> None:
    from trl import DPOTrainer, GRPOTrainer

    assert parameters(GRPOTrainer, "_compute_loss") == ["self", "model", "inputs"]
    assert parameters(DPOTrainer, "_compute_loss") == ["self", "model", "inputs", "return_outputs"]
    forward = parameters(GRPOTrainer, "_get_per_token_logps_and_entropies")
    assert forward[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._compute_loss))
    read = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"]
    read += ["old_per_token_logps", "ref_per_token_logps", "num_items_in_batch"]
    assert [name for name in read if f'"{name}"' not in source] == []
    # What depends on the forward pass is read after it.
    passed = source.index("_get_per_token_logps_and_entropies(")
    assert all(source.index(name) > passed for name in ('inputs["advantages"]', 'inputs.get("old_per_token_logps")'))


def test_the_losses_override_one_private_method() -> None:
    from trl import DPOTrainer, GRPOTrainer

    from flywheel.training.optim.losses import PairLoss, RowLoss

    def overridden(kind: Any, of: Any) -> list[str]:
        return [name for name, value in vars(kind).items() if inspect.isfunction(value) and hasattr(of, name)]

    assert overridden(RowLoss, GRPOTrainer) == ["__init__", "_get_per_token_logps_and_entropies"]
    assert overridden(PairLoss, DPOTrainer) == ["__init__"]


def reached(kind: Any, name: str, known: dict[str, list[ast.AST]] | None = None) -> dict[str, list[ast.AST]]:
    """The methods of a class, in each of its bases, that one refers to, and those that these refer to."""
    known = {} if known is None else known
    own = [inspect.unwrap(vars(base)[name]) for base in kind.__mro__ if name in vars(base)]
    known[name] = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in own if inspect.isfunction(each)]
    for tree in known[name]:
        for attribute in attributes([tree], ast.Load):
            if attribute not in known and inspect.isfunction(getattr(kind, attribute, None)):
                reached(kind, attribute, known)
    return known


def attributes(trees: list[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Names of attributes of `self` that are read (`ast.Load`) or set (`ast.Store`)."""
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_what_transformers_loop_sets_for_a_loss_is_set_without_the_loop(stage: Any) -> None:
    from trl import DPOTrainer, GRPOTrainer

    kind = GRPOTrainer if stage == "grpo" else DPOTrainer
    loss, loop = reached(kind, "_compute_loss"), reached(kind, "train")
    read = attributes([tree for trees in loss.values() for tree in trees], ast.Load)
    in_loop = attributes([tree for name, trees in loop.items() if name not in loss for tree in trees], ast.Store)
    own = attributes([tree for trees in loss.values() for tree in trees], ast.Store)
    # These two are set by the constructor, and only otherwise than here set again.
    assert (read & in_loop) - own - {"model", "accelerator"} == (
        {"current_gradient_accumulation_steps"} if stage == "grpo" else set()
    )
    step = policy_step(policy(), made_settings(), stage)
    assert step._loss.current_gradient_accumulation_steps == 1  # type: ignore[attr-defined]
    assert step._loss.args.gradient_accumulation_steps == 1


def test_the_loop_prepares_the_model_for_gradient_checkpointing_alone() -> None:
    from transformers import Trainer

    methods = ("train", "_inner_training_loop", "_prepare_for_training", "_run_epoch", "training_step")
    trees = [ast.parse(textwrap.dedent(inspect.getsource(getattr(Trainer, name)))) for name in methods]
    called = {
        node.func.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("self.model", "model")
    }
    assert called == {"gradient_checkpointing_enable", "train", "zero_grad"}


@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_gradient_checkpointing_computes_each_layer_again_and_changes_nothing(stage: Any) -> None:
    items: Any = rows() if stage == "grpo" else PAIRS
    seen = {}
    for checkpointing in (False, True):
        layers, model = [0], policy()
        model.base_model.model.model.layers[1].self_attn.register_forward_pre_hook(
            lambda *_, layers=layers: layers.append(1) and None
        )
        done = Trained(items, model, stage=stage, steps=2, beta=0.1, gradient_checkpointing=checkpointing)
        seen[checkpointing] = sum(layers), done.passes, done.weights()
    (plain, passes, wanted), (again, same_passes, found) = seen[False], seen[True]
    # Those of the reference have no backward pass.
    assert (plain, again, same_passes) == (passes, passes + passes // 2, passes)
    assert all((found[name] - weight).abs().max() < 1e-6 for name, weight in wanted.items())
