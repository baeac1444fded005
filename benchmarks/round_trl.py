"""The work of `benchmarks.round` by TRL's GRPOTrainer, which generates with transformers."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.round_work import (
    GROUP,
    MICRO_BATCH,
    PROMPTS,
    RUBRIC,
    SEED,
    SLOTS,
    TRAIN,
    Judge,
    Work,
    tasks,
    with_judge,
)
from flywheel.cli.demo import judge
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_all
from flywheel.records.verdict import Exchange


def run_trl(work: Work, directory: Path) -> dict[str, Any]:
    """The same work by TRL's trainer, in a process of its own."""
    scripted = Judge(work.latency)
    spawn = multiprocessing.get_context("spawn")
    with judge.running(complete=scripted) as url, ProcessPoolExecutor(1, spawn) as pool:
        load, began = os.getloadavg()[0], time.time()
        first, last, cpu_seconds, lengths = pool.submit(train_with_trl, work, url, directory).result()
    if (len(lengths), scripted.calls) != (work.rollouts, work.rollouts):
        raise SystemExit(f"not the work of {work}: {len(lengths)} rollouts, {scripted.calls} calls of the judge")
    return {
        "training_s": last - first,
        "startup_s": first - began,
        "cpu_s": cpu_seconds,
        "load": load,
        "mean_tokens": fmean(lengths),
        "rollouts": len(lengths),
        "judge_calls": scripted.calls,
    }


def train_with_trl(work: Work, url: str, directory: Path) -> tuple[float, float, float, list[int]]:
    """Runs in a process of its own. Returns when the first step began and the last one ended (seconds of the clock),
    processor seconds, and the length of each completion."""
    threads = len(os.sched_getaffinity(0))
    os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "TRL_EXPERIMENTAL_SILENCE": "1"}
    # As in a round: otherwise a machine that is not idle makes a step several times longer.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import import_utils

    from flywheel.training.engine.policy import trainer_dtypes
    from tests.factories.policy import load_policy

    # As the round's trainer does: TRL would import vLLM, which it does not use here.
    import_utils.is_vllm_available = lambda *_, **__: False
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    settings = with_judge(work.settings, url)
    grader = Grader(Rubric.model_validate(RUBRIC), settings.judge)
    lengths: list[int] = []
    times: list[float] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        pairs = zip(prompts, completions, strict=True)
        items = (
            (place, Exchange(asked[-1]["content"], said[-1]["content"])) for place, (asked, said) in enumerate(pairs)
        )
        scores = {place: verdict.score for place, verdict in grade_all(grader, items, SLOTS)}
        return [scores[place] for place in range(len(scores))]  # type: ignore[misc]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

        on_step_end = on_step_begin

    dtype, compute = trainer_dtypes(work.model, "auto")
    model = load_policy(work.model, None, settings.training.lora, SEED, dtype=dtype)
    compute_dtype = model.dtype if compute == "auto" else getattr(torch, compute)
    arguments = GRPOConfig(
        # As a round's trainer has them.
        output_dir=str(directory),
        seed=SEED,
        learning_rate=settings.training.learning_rate,
        lr_scheduler_type=settings.training.scheduler,
        max_grad_norm=settings.training.max_grad_norm,
        bf16=compute_dtype == torch.bfloat16,
        fp16=compute_dtype == torch.float16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_accumulation_steps=PROMPTS * GROUP // MICRO_BATCH,
        max_steps=work.steps,
        per_device_train_batch_size=MICRO_BATCH,
        num_generations=GROUP,
        max_completion_length=work.tokens,
        generation_kwargs={"min_new_tokens": work.tokens},
        temperature=settings.rollout.temperature,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [task.prompt for task in tasks("train-", 0, TRAIN)]}),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return times[0], times[-1], time.process_time(), lengths
