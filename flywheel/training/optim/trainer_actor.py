"""The trainer of a round: a Ray actor that has the policy and its optimizer, and nothing else.

The worker has the loop, the rollouts, the judge and the files (`Trainers` is its handle on the actor). With
`training.workers`, several such actors take their parts of each step, numbered by their ranks: a process group of
PyTorch connects them, which accelerate finds. Ray notices processes that die, and ends the attempt.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil
import ray

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.records.round import RoundSpec
from flywheel.system.process import keep_freed_memory
from flywheel.system.process_folder import ProcessFolder
from flywheel.training.data.samples import Item, StepSize, TrainingRow
from flywheel.training.engine.policy import AdapterFiles, load_base, trainer_dtypes, with_adapter
from flywheel.training.engine.ray_cluster import RoundActor

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENCE: Final = datetime.timedelta(days=30)
"""How long a process waits for another one."""


class Trainer(RoundActor):
    """`start` comes first, then `begin` for each stage. With several actors, each method but `meet`, `nll`
    and `piece` of an adapter must be called on all of them."""

    def __init__(self, spec: RoundSpec, threads: int, rank: int = 0) -> None:
        self._spec, self._threads, self._rank = spec, threads, rank
        self._workers = Config.model_validate(spec.settings).training.workers
        self._store: Any = None
        self._base: Any = None
        self._policy: Any = None
        self._pieces: Iterator[tuple[str, bytes]] | None = None
        # For adapters, which PEFT reads from files and writes to them. What a killed process leaves is found there.
        self._folder = ProcessFolder(Path(ray.get_runtime_context().get_temp_dir())) if ray.is_initialized() else None

    def meet(self) -> tuple[str, int]:
        """Where the other processes meet this one, which is the first: host and port."""
        self._store = open_store(ray.util.get_node_ip_address(), self._workers)
        return self._store.host, self._store.port

    def start(self, meeting: tuple[str, int] | None = None) -> None:
        """Load what takes long, while the engines start, and wait for the other processes, if there are any, which
        `meet` here. Raises TrainError."""
        # Ray starts actors with one thread; torch reads the number before its first parallel section.
        os.environ["OMP_NUM_THREADS"] = str(self._threads)
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        import torch

        torch.set_num_threads(self._threads)
        if not torch.cuda.is_available():
            # Every pass allocates the same large tensors; mapping them anew takes a fifth of a step.
            keep_freed_memory()
        self._base = self._loaded(Config.model_validate(self._spec.settings))
        import flywheel.training.optim.policy_step  # noqa: F401

        if meeting is not None:
            store = self._store or reach_store(*meeting, self._workers)
            join(store, self._rank, self._workers, ray.util.get_node_ip_address())

    def begin(self, stage: Stage, settings: Config, steps: int, longest: int, parent: AdapterFiles | None) -> None:
        """Load the policy that a stage of so many steps starts from, with nothing of the stage before. `settings`
        are those of the stage, `longest` is the maximum length of a completion in tokens. Raises
        TrainError."""
        import torch
        from accelerate.utils.memory import clear_device_cache
        from transformers import AutoTokenizer

        from flywheel.training.optim.losses import made_loss
        from flywheel.training.optim.policy_step import PolicyStep

        self._policy = self._pieces = None
        clear_device_cache(garbage_collection=True)
        base, self._base = self._base or self._loaded(settings), None
        temporary = None if self._folder is None else self._folder.path
        with contextlib.nullcontext() if parent is None else parent.written(temporary) as folder:
            model = with_adapter(base, self._spec.base_model, folder, settings.training.lora, self._spec.seed)
        _, compute = trainer_dtypes(self._spec.base_model, settings.training.precision)
        loss = made_loss(
            stage,
            model,
            settings,
            AutoTokenizer.from_pretrained(self._spec.base_model),
            seed=self._spec.seed,
            compute_dtype=model.dtype if compute == "auto" else getattr(torch, compute),
            longest=longest,
        )
        self._policy = PolicyStep(loss, settings, steps, temporary)

    def _loaded(self, config: Config) -> Any:
        dtype, _ = trainer_dtypes(self._spec.base_model, config.training.precision)
        return load_base(self._spec.base_model, dtype=dtype, quantization=config.model.trainer_quantization)

    def restore(self, name: str, data: bytes) -> None:
        """Go on from a piece of a checkpoint. All of its pieces must follow `begin`, or the last step."""
        self._policy.restore(name, data)

    def step(self, items: Sequence[Item], size: StepSize) -> dict[str, float]:
        """Train on this actor's items of a step of that whole size. Returns its figures. Raises TrainError."""
        return self._policy.step(items, size)  # type: ignore[no-any-return]

    def piece(self, of: Literal["adapter", "checkpoint"]) -> tuple[str, bytes] | None:
        """The next piece of one of these, its name and its bytes; None behind the last."""
        if self._pieces is None:
            self._pieces = self._policy.adapter() if of == "adapter" else self._policy.checkpoint()
        piece = next(self._pieces, None)
        if piece is None:
            self._pieces = None
        return piece

    def nll(self, rows: Sequence[Sequence[TrainingRow]]) -> list[float | None]:
        """The mean negative log-likelihood of each of these, in nats a token; None without a token. Raises
        TrainError."""
        return [self._policy.nll(each) for each in rows]


def open_store(host: str, workers: int) -> TCPStore:
    """In rank 0: the store by which so many processes find each other, on one of this node's addresses."""
    from torch.distributed import TCPStore

    with socket.create_server((host, 0)) as listening:
        # By itself, a store listens on all of the node's addresses.
        return TCPStore(
            host,
            listening.getsockname()[1],
            workers,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def reach_store(host: str, port: int, workers: int) -> TCPStore:
    """In the others: the store of rank 0."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, workers, timeout=PATIENCE)


def join(store: TCPStore, rank: int, workers: int, host: str) -> None:
    """Wait until all have joined by the store of rank 0. `host` is the address of this node, whose network the
    processes use."""
    import torch

    if interface := _interface(host):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    # What accelerate reads. Ray gives each process one GPU, which is the first that it sees.
    own = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=PATIENCE)


def _interface(host: str) -> str:
    """The network interface that has an address of this node."""
    of_host = (name for name, found in psutil.net_if_addrs().items() if any(each.address == host for each in found))
    return next(of_host, "")
