"""What clients notice of a swap, and how fast a rollback is: `python -m benchmarks.swap`, about 15 minutes.

Two real replicas (vLLM on the CPU with the demo's tiny policy), each on a core of its own, and `clients`, half of
them streaming, with greedy answers of `TOKENS` tokens. Each client begins a request every `PERIOD` seconds, or at
once after one that took longer: without a pause, the servers would lack whatever the swap uses. Windows with a swap,
by `flywheel deploy`, alternate with windows without. Counted are requests that overlap the swap (load, proof, flip),
and in the others those of a part of the window.

`failed`: requests without a whole answer. `wrong_version`: answers of a version that was not current at any time of
the request, or with the text of the other version. `other_text`: answers with a text of neither version; in a batch,
sums are rounded differently. `p99_ratio` and `p50_ratio`: with a swap, divided by without. `overhead_ms`: of the
middleware, with recording, by size of the body. `rollback_ms`: the whole command, at rest, beside a daemon that is
stopped (SIGSTOP), and during a swap that waits for an engine to load an adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx2
import psutil
import yaml
from sqlalchemy import Connection

from benchmarks import measurement
from demo.ports import held_port
from flywheel.cli.demo.questions import questions
from flywheel.config.file import Config, load
from flywheel.serving import routes
from flywheel.serving.server import vllm_command
from flywheel.serving.server.middleware import AliasMiddleware
from flywheel.serving.server_keys import admin_key
from flywheel.store import deployments
from flywheel.store.kernel.database import Store, read_once
from flywheel.system.files import write_atomic
from tests.factories.round import put_adapter, put_round

ROOT: Final = Path(__file__).parent.parent
POLICY: Final = ROOT / "demo" / "policy"
ALIAS: Final = "agent"
TOKENS: Final = 24
PERIOD: Final = 1.28
"""Seconds from one request of a client to its next: 50 requests a second of 64 clients."""
START_SECONDS: Final = 300
RESULTS: Final = ROOT / "benchmarks" / "results" / "swap.json"
CONDITIONS: Final = {"idle": "at rest", "stopped": "beside a stopped daemon", "loading": "during a load that hangs"}
SIZES: Final = {"1kB": 1_000, "100kB": 100_000, "5MB": 5_000_000}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: seconds of its begin and end, and the answer's version and text; `error` if it failed."""

    began: float
    ended: float
    question: str
    version: str
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class Window:
    """`began` and `ended` are those of the swap, or of the same part of a window without one."""

    swaps: bool
    began: float
    ended: float
    asked: list[Asked]
    versions: tuple[str, str]
    """Before and after."""

    @property
    def seconds(self) -> list[float]:
        """How long the requests took that overlap the swap."""
        return [each.ended - each.began for each in self.asked if each.began < self.ended and each.ended > self.began]

    def wrong(self, texts: dict[tuple[str, str], str]) -> tuple[int, int]:
        """Answers of the wrong version, and those whose text is of neither version."""
        wrong = other = 0
        for each in self.asked:
            if each.error:
                continue
            current = {self.versions[0]} if each.began < self.ended else set()
            current |= {self.versions[1]} if each.ended > self.began else set()
            own = texts[each.version, each.question] if each.version in self.versions else None
            others = [texts[version, each.question] for version in self.versions if version != each.version]
            wrong += each.version not in current or (each.text != own and each.text in others)
            other += each.text != own and each.text not in others
        return wrong, other


def flywheel(config: Path, *arguments: str) -> float:
    """The seconds that a command took."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "flywheel", *arguments, "-c", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"flywheel {' '.join(arguments)} ended with {ran.returncode}: {ran.stderr}")
    return time.perf_counter() - begin


def _configuration(folder: Path, ports: list[int]) -> Path:
    settings = {
        "state": {"dir": str(folder / "state")},
        "sources": [],
        "model": {"base": str(POLICY), "alias": ALIAS},
        "training": {"lora": {"r": 8}},
        "serving": {
            "urls": [f"http://127.0.0.1:{port}" for port in ports],
            "max_lora_rank": 8,
            "max_model_len": 512,
            "cpu_kv_cache_gib": 1,
            "drain_seconds": 1,
            "extra_args": ["--dtype", "float32", "--max-num-seqs", "64"],
        },
        "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "none"},  # without one, no daemon starts
        "daemon": {"metrics": None},
    }
    file = folder / "flywheel.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def _make_adapters(folder: Path) -> None:
    made = [sys.executable, "-m", "tests.serving.make_adapters", str(POLICY), str(folder)]
    subprocess.run(made, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=ROOT, check=True, capture_output=True)


async def _record_adapters(config: Config, folder: Path) -> None:
    """Two adapters of random weights, as rounds leave them: r0001 and r0002."""
    probes = json.loads((folder / "probes.json").read_text())

    def put(conn: Connection, number: int, name: str) -> None:
        put_round(conn, number)
        put_adapter(conn, number, folder / name, base_model=str(POLICY), probe=probes[name])

    store = await Store.open(config.state_dir)
    for number, name in enumerate(("good", "other"), 1):
        await store.write(put, number, name)
    await store.close()


@contextlib.contextmanager
def _servers(file: Path, ports: list[int], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two replicas that answer, each with a core of its own: vLLM would bind the threads of both to the same cores,
    and each would wait for the other's turn (7.6 s instead of 2.2 at the 99th percentile, 64 clients, two cores)."""
    servers = []
    cores = sorted(os.sched_getaffinity(0))
    try:
        for number, port in enumerate(ports):
            command = [sys.executable, "-m", "flywheel", "serve", "-c", str(file), "--set", f"serving.port={port}"]
            environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
            with (folder / f"{port}.log").open("wb") as log:
                servers.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        for port, server in zip(ports, servers, strict=True):
            _wait_for(port, server, folder / f"{port}.log")
        yield servers
    finally:
        for server in servers:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(server.pid, number)
                    server.wait(30)


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"http://127.0.0.1:{port}{routes.HEALTH}").status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"a server did not start: {log.read_text(errors='replace')[-2000:]}")


async def _ask(client: httpx2.AsyncClient, model: str, question: str, *, stream: bool) -> Asked:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "ignore_eos": True,  # otherwise the versions' answers would differ in length
    }
    began, version, text, error = time.time(), "", "", ""
    try:
        if stream:
            done = False
            body = {**request, "temperature": 0, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                error = "" if answer.status_code == 200 else f"HTTP {answer.status_code}"
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: ") and not error:
                        event = json.loads(line[6:])
                        version = event["model"]
                        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            error = error or ("" if done else "no end of the stream")
        else:
            answer = await client.post("/v1/chat/completions", json={**request, "temperature": 0})
            if answer.status_code == 200:
                said = answer.json()
                version, text = said["model"], said["choices"][0]["message"]["content"] or ""
            else:
                error = f"HTTP {answer.status_code}"
    except (httpx2.HTTPError, ValueError, KeyError) as failure:
        error = repr(failure)
    return Asked(began, time.time(), question, version, text, error)


class Load:
    """Clients in a closed loop, half of them streaming, on both replicas alike."""

    def __init__(self, config: Config, clients: int, asked: list[str]) -> None:
        self._config = config
        self._count = clients
        self._questions = asked
        self._http = [
            httpx2.AsyncClient(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=clients + 4))
            for url in config.serving.urls
        ]

    async def texts(self, versions: list[str]) -> dict[tuple[str, str], str]:
        """The greedy answer of each loaded version to each question, by itself."""
        found = {}
        url = self._config.serving.urls[0]
        key = admin_key(self._config, url, "ask for a version")
        headers = {"authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(base_url=url, timeout=120, headers=headers) as client:
            for version in versions:
                for question in self._questions:
                    answer = await _ask(client, version, question, stream=False)
                    if answer.error:
                        raise SystemExit(f"{version} does not answer: {answer.error}")
                    found[version, question] = answer.text
        return found

    async def window(self, seconds: float, versions: tuple[str, str], file: Path) -> Window:
        """One window; with two different versions, the swap begins after a third of it."""
        begin, asked = time.time(), list[Asked]()
        end = begin + seconds

        async def client(number: int) -> None:
            at, due = number, begin + PERIOD * number / self._count
            while due < end:
                await asyncio.sleep(due - time.time())
                question = self._questions[at % len(self._questions)]
                asked.append(await _ask(self._http[number % 2], ALIAS, question, stream=number % 4 < 2))
                at += self._count + 1
                due = max(due + PERIOD, time.time())

        clients = [asyncio.create_task(client(number)) for number in range(self._count)]
        await asyncio.sleep(seconds / 3)
        began = time.time()
        swaps = versions[0] != versions[1]
        if swaps:
            adapter = versions[1].partition("@")[2]
            await asyncio.to_thread(flywheel, file, "deploy", adapter)
        else:
            await asyncio.sleep(seconds / 4)
        ended = time.time()
        await asyncio.gather(*clients)
        return Window(swaps, began, ended, asked, versions)

    async def close(self) -> None:
        for each in self._http:
            await each.aclose()


async def _swaps(config: Config, file: Path, *, clients: int, windows: int, seconds: float) -> dict[str, Any]:
    load = Load(config, clients, [question.text for question in questions()[:50]])
    versions = [f"{ALIAS}@r000{number}" for number in (1, 2)]
    for name in ("r0001", "r0002"):
        await asyncio.to_thread(flywheel, file, "deploy", name)
    texts = await load.texts(versions)
    found = []
    now = versions[1]
    for number in range(windows):
        after = now if number % 2 else versions[now == versions[0]]
        found.append(await load.window(seconds, (now, after), file))
        now = after
    await load.close()
    wrongs = [window.wrong(texts) for window in found]
    took = {swaps: [one for each in found if each.swaps is swaps for one in each.seconds] for swaps in (True, False)}
    figures: dict[str, Any] = {
        "clients": clients,
        "asked": sum(len(each.asked) for each in found),
        "failed": sum(bool(one.error) for each in found for one in each.asked),
        "wrong_version": sum(wrong for wrong, _ in wrongs),
        "other_text": sum(other for _, other in wrongs),
        "swap_seconds": statistics.median(each.ended - each.began for each in found if each.swaps),
    }
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        with_swap, without = (measurement.percentile(took[swaps], share) for swaps in (True, False))
        figures |= {
            f"{name}_ms": without * 1000,
            f"{name}_swap_ms": with_swap * 1000,
            f"{name}_ratio": with_swap / without,
        }
    return figures


async def _overhead(config: Config, repeats: int) -> dict[str, float]:
    """Milliseconds that the middleware adds to a request, by size of its body, without a network."""

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(start)
        await send({"type": "http.response.body", "body": b'{"choices": []}'})

    _, environment = vllm_command.command(config)
    with mock.patch.dict(os.environ, environment):
        middleware = AliasMiddleware(app)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }

    async def took(target: Any, body: bytes) -> float:
        parts = [body[at : at + 65_536] for at in range(0, len(body), 65_536)]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0) if parts else b"", "more_body": bool(parts)}

        async def send(_message: Any) -> None: ...

        begin = time.perf_counter()
        await target(scope, receive, send)
        return (time.perf_counter() - begin) * 1000

    figures = {}
    for name, size in SIZES.items():
        body = json.dumps({"model": ALIAS, "messages": [{"role": "user", "content": "x" * size}]}).encode()
        pairs = [(await took(middleware, body), await took(app, body)) for _ in range(repeats)]
        figures[name] = statistics.median(one for one, _ in pairs) - statistics.median(one for _, one in pairs)
    await middleware._flushing(_ignore)({"type": "lifespan.shutdown.complete"})
    return figures


async def _ignore(_message: Any) -> None: ...


def _rollbacks(config: Config, file: Path, servers: list[subprocess.Popen[bytes]], repeats: int) -> dict[str, float]:
    """The median milliseconds of `flywheel rollback`, from r0002 to r0001."""

    def timed() -> float:
        return flywheel(file, "rollback") * 1000

    def again() -> None:
        for name in ("r0001", "r0002"):
            flywheel(file, "deploy", name)

    found: dict[str, list[float]] = {"idle": [], "stopped": [], "loading": []}
    command = [sys.executable, "-m", "flywheel"]
    for _ in range(repeats):
        again()
        found["idle"].append(timed())
        again()
        with subprocess.Popen([*command, "run", "-c", str(file)], stderr=subprocess.PIPE, text=True) as daemon:
            assert daemon.stderr is not None
            next(line for line in daemon.stderr if "watching" in line)
            time.sleep(2)  # it has compared the servers
            daemon.send_signal(signal.SIGSTOP)
            found["stopped"].append(timed())
            daemon.send_signal(signal.SIGCONT)
            daemon.terminate()
            daemon.stderr.read()
        again()
        key = admin_key(config, config.serving.urls[0], "unload an adapter")
        unload = {"lora_name": f"{ALIAS}@r0001"}
        flywheel(file, "rollback", "--to", "base")
        with httpx2.Client(base_url=config.serving.urls[0], headers={"authorization": f"Bearer {key}"}) as client:
            client.post(routes.UNLOAD_ADAPTER, json=unload)
        engine = _engine(servers[0])
        engine.suspend()
        with subprocess.Popen([*command, "deploy", "r0001", "-c", str(file)], stderr=subprocess.PIPE) as deploying:
            while asyncio.run(read_once(config.state_dir, deployments.history, ALIAS, 1))[0].state != "loading":
                time.sleep(0.1)
            time.sleep(1)  # the load has begun
            found["loading"].append(timed())
            engine.resume()
            deploying.communicate()
    return {name: statistics.median(values) for name, values in found.items()}


def _engine(server: subprocess.Popen[bytes]) -> psutil.Process:
    """The process that loads adapters, without which the server goes on to answer other requests."""
    return next(
        child for child in psutil.Process(server.pid).children(recursive=True) if "EngineCore" in child.name()
    )


def table(figures: dict[str, Any]) -> str:
    """The tables of the documentation, as Markdown."""
    rows = [
        ("requests", f"{figures['asked']:,}"),
        ("failed", figures["failed"]),
        ("answers of a wrong version", figures["wrong_version"]),
        ("answers with a text of neither version", figures["other_text"]),
        ("swap, median", f"{figures['swap_seconds']:.1f} s"),
        *((f"{name}, with a swap and without", _three(figures, name)) for name in ("p50", "p99")),
        *((f"middleware, body of {size}", f"{ms:.2f} ms") for size, ms in figures["overhead_ms"].items()),
        *((f"rollback, {name}", f"{figures['rollback_ms'][key]:,.0f} ms") for key, name in CONDITIONS.items()),
    ]
    return measurement.markdown(("", "measured"), rows)


def _three(figures: dict[str, Any], name: str) -> str:
    with_swap, without, ratio = (figures[f"{name}_{kind}"] for kind in ("swap_ms", "ms", "ratio"))
    return f"{with_swap:,.0f} and {without:,.0f} ms ({ratio:.2f})"


def main() -> None:
    parser = measurement.parser("swap", __doc__)
    parser.add_argument("--table", action="store_true", help="print the table from the file of figures, and end")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    before = measurement.machine()
    quick = options.quick
    clients, windows, seconds, repeats = (8, 2, 12.0, 1) if quick else (64, 8, 60.0, 5)
    with measurement.folders(options.dir) as (_, folder), held_port() as one, held_port() as other:
        ports = [one, other]
        file = _configuration(folder, ports)
        config = load(file)
        _make_adapters(folder / "adapters")
        asyncio.run(_record_adapters(config, folder / "adapters"))
        with _servers(file, ports, folder) as servers:
            figures = asyncio.run(_swaps(config, file, clients=clients, windows=windows, seconds=seconds))
            figures["rollback_ms"] = _rollbacks(config, file, servers, repeats)
        figures["overhead_ms"] = asyncio.run(_overhead(config, 20 if quick else 200))
    if not quick:
        write_atomic(RESULTS, (json.dumps({**figures, "machine": before}, indent=1) + "\n").encode())
    measurement.report(figures, before, as_json=options.json)


if __name__ == "__main__":
    main()
