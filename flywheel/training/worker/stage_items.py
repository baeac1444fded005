"""What SFT and DPO train on: recorded replies, those of them that are chosen by their loss, and pairs of replies."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flywheel.config.training import Stage
from flywheel.records.coreset import text_of
from flywheel.records.reasons import in_one_clause
from flywheel.records.round import RoundTask
from flywheel.training.data.loss_selection import by_loss, read_selection, write_selection
from flywheel.training.data.pairs import Pairs
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import mean
from flywheel.training.data.samples import RecordedReply
from flywheel.training.engine import ray_cluster
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.epochs import longest_of, rows_of, stage_settings
from flywheel.training.optim.round_steps import RoundSteps, roll_out
from flywheel.training.worker.loop import Epochs, Loop, Reinforcement
from flywheel.training.worker.stage_work import StageWork

log = logging.getLogger("flywheel.training.worker")


class StageItems:
    """Those of one stage, rendered by the engines. What it leaves out is noted in `work.training`."""

    def __init__(self, work: StageWork, engines: list[Any], collector: Collector) -> None:
        self._work, self._engines, self._collector = work, engines, collector
        self._settings, self._training = work.settings, work.training

    def loop(
        self, stage: Stage, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
    ) -> tuple[Loop[Any] | None, str]:
        """The loop of a stage; without anything to train on, the reason. `held_out` are prompts of whose replies SFT
        measures the loss."""
        if stage == "grpo":
            if not prompts:
                return None, "no task is left for it"
            return Reinforcement(self._work, prompts, self._collector), ""
        if stage == "dpo":
            pairs = self.pairs(prompts)
            why = f"none of {len(prompts)} tasks has a better and a worse reply"
            if not pairs.pairs:
                return None, f"{why}: {pairs.reasons}" if pairs.reasons else why
            return Epochs("dpo", self._work, pairs.pairs), ""
        replies, why = self.replies(prompts)
        if why:
            return None, why
        measured, chosen = self.measured(held_out), self.chosen(prompts, replies)
        if not chosen:
            return None, f"none of {len(replies)} replies is left by its loss"
        return Epochs("sft", self._work, chosen, measured), ""

    def replies(self, prompts: Sequence[Prompt]) -> tuple[list[RecordedReply], str]:
        """The replies to imitate; without any, the reason."""
        replies, refused = self._recorded([prompt.task for prompt in prompts if prompt.task.reply])
        self._note("SFT", replies, refused)
        why = f"none of {len(prompts)} tasks has a reply to train on"
        return replies, "" if replies else f"{why}: {in_one_clause(refused)}" if refused else why

    def measured(self, prompts: Sequence[Prompt]) -> list[RecordedReply]:
        """The replies of held-out prompts, of which only the loss is measured."""
        replies, self._training.unmeasured = self._recorded([each.task for each in prompts if each.task.reply])
        return replies

    def chosen(self, prompts: Sequence[Prompt], replies: list[RecordedReply]) -> list[RecordedReply]:
        """The replies that are chosen by their loss under the policy that the stage starts from; all if there is
        nothing to choose. A worker that is started again goes on with the choice of the first."""
        if (pool := self._work.spec.pool) is None:
            return replies
        lines = read_selection(self._work.directory)
        if not lines:
            settings = stage_settings(self._settings, "sft", len(replies))
            # Nothing of the measurement is left in the policy that is trained: its stage begins anew.
            about = settings, settings.training.steps, longest_of(replies), self._work.parent
            self._work.trainers.begin("sft", *about)
            found = self._work.trainers.nll([rows_of([reply]) for reply in replies])
            measured = zip(replies, found, strict=True)
            losses = {each.task_id: loss for each, loss in measured if loss is not None}
            tokens = {each.task_id: sum(len(sample.trained) for sample in each.samples) for each in replies}
            said = {each.task.task_id: each.task.exchange for each in prompts}
            texts = {task: text_of(exchange.history, exchange.query) for task, exchange in said.items()}
            lines = by_loss(pool, losses, texts, tokens, self._work.spec.seed)
            write_selection(self._work.directory, lines)
        outcomes = {line["task_id"]: line["outcome"] for line in lines}
        log.info("replies by their loss: %s", dict(Counter(outcomes.values())))
        return [each for each in replies if outcomes.get(each.task_id, "").startswith("chosen")]

    def pairs(self, prompts: Sequence[Prompt]) -> Pairs:
        """Pairs of better and worse replies: recorded ones of the prompts that have them, and rollouts of all others,
        by the policy that the stage starts from."""
        found, training = Pairs(), self._settings.training
        recorded = [prompt.task for prompt in prompts if prompt.task.has_pair]
        better: list[RecordedReply] = []
        if recorded:
            better, refused = self._recorded(recorded)
            worse, also = self._recorded([task.model_copy(update={"reply": task.rejected}) for task in recorded])
            chosen, rejected = ({reply.task_id: reply for reply in replies} for replies in (better, worse))
            refused = {task: f"its rejected reply: {why}" for task, why in also.items()} | refused
            found.add_recorded(recorded, chosen, rejected, refused)
        if others := [prompt for prompt in prompts if not prompt.task.has_pair]:
            count, rewards = math.ceil(len(others) / training.prompts_per_step), list[float]()
            planned = training.model_copy(update={"steps": count})
            settings = self._settings.model_copy(update={"training": planned})
            of_round = self._work.spec, settings, self._work.directory, others, self._collector
            steps = RoundSteps(*of_round, self._training.steps)
            adapter = self._work.adapters.load_saved(self._training.adapter)
            for batch in roll_out(steps, adapter, self._work.meter, count=count, stage="dpo"):
                self._training.count(batch)
                batch.refuse_failed(training.max_undecided_share)
                batch.refuse_undecided(training.max_undecided_share)
                rewards += batch.rewards
                found.add_rollouts(batch, training.dpo.margin)
            self._training.rolled_out(count, mean(rewards), None)
        found.write(self._work.folder)
        if found.rollouts:
            log.info("not in a pair: %s", found.reasons)
        paired = {pair.task_id for pair in found.pairs}
        left_out = {task: why for task, why in found.left_out.items() if task not in paired}
        self._note("DPO", [reply for reply in better if reply.task_id in paired], left_out)
        return found

    def _note(self, stage: str, replies: Sequence[RecordedReply], left_out: Mapping[str, str]) -> None:
        """Keep why a stage leaves tasks out, and what of others it does not train on."""
        self._training.left_out |= left_out
        partly = {each.task_id: "; ".join(each.without) for each in replies if each.without}
        self._training.partly |= partly
        for task, why in left_out.items():
            log.warning("%s leaves %s out: %s", stage, task, why)
        if partly:
            log.warning("%s does not train on all of %d replies: %s", stage, len(partly), in_one_clause(partly))

    def _recorded(self, tasks: Sequence[RoundTask]) -> tuple[list[RecordedReply], dict[str, str]]:
        """The replies of tasks as samples, and why others are not trained on, by task. A reply with a sample that is
        too long is none: nothing is cut."""
        limit = self._settings.rollout.max_model_len
        empty = self._settings.training.sft.reasoning == "empty"

        def replies(engine: Any) -> tuple[list[RecordedReply], dict[str, str]]:
            [found] = ray_cluster.wait([engine.recorded_replies.remote(tasks, empty_reasoning=empty)])
            return found  # type: ignore[no-any-return]

        made, refused = ray_cluster.anywhere(self._engines, replies)
        kept = []
        for each in made:
            if (tokens := max((len(sample.token_ids) for sample in each.samples), default=0)) > limit:
                refused[each.task_id] = f"it has {tokens:,} tokens, and rollout.max_model_len is {limit:,}"
            else:
                kept.append(each)
        return kept, refused
