"""What rollouts of agents cost: `python -m benchmarks.agents`.

`endpoint_overhead_ms`: a call of the endpoint of a rollout engine, less one of the engine itself with the same prompt
and seed, which returns the same tokens. Both take turns on one engine with the demo's policy.
`merge_speedup`: tokens trained per second on rollouts of 5 turns that are merged into one sample, over those with a
sample per turn (`benchmarks.merged_turns`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import measurement
from benchmarks.merged_turns import merge_speedup
from flywheel.cli.demo.questions import questions
from flywheel.records.round import RoundTask
from flywheel.records.verdict import Exchange
from flywheel.training.data.prompts import Prompt, seed_of
from flywheel.training.data.rollout import RolloutRequest
from flywheel.training.engine.engine import Engine, EngineSettings
from flywheel.training.engine.session import POLICY_SAMPLING

POLICY: Final = Path(__file__).parent.parent / "demo" / "policy"
IN_FLIGHT: Final = 16
TOKENS: Final = 32


# The endpoint


class Client:
    """A connection to the endpoint, which takes almost no time of its own."""

    def __init__(self, url: str) -> None:
        self._port = int(url.split(":")[2].partition("/")[0])

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, url: str, body: bytes) -> dict[str, Any]:
        path = "/" + url.split("/", 3)[3] + "/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        content: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        return content


async def endpoint_overhead(quick: bool) -> dict[str, Any]:
    """Latencies of the engine and of its endpoint, in milliseconds, with one and with 16 calls in flight."""
    engine = Engine(
        EngineSettings(
            model=str(POLICY),
            max_model_len=512,
            max_lora_rank=8,
            seed=1,
            gpu_memory_utilization=0.3,
            kv_cache_gib=1,
            cpu_threads=1,
        )
    )
    await engine.start()
    try:
        prompt = [{"role": "system", "content": "Be brief."}]
        tasks = [
            RoundTask(
                task_id=f"t-{at}",
                exchange=Exchange(question.text, ""),
                prompt=[*prompt, {"role": "user", "content": question.text}],
            )
            for at, question in enumerate(questions()[:: 20 if quick else 5])
        ]
        prompts, _ = await engine.encode(tasks)
        pool = [Client(engine.open_session(_request(prompts[0], 0))) for _ in range(IN_FLIGHT)]
        for client in pool:
            await client.connect()
        one = await _compare(engine, pool[:1], prompts, 8 if quick else 300)
        many = await _compare(engine, pool, prompts, 2 if quick else 40)
    finally:
        await engine.stop()
    direct, endpoint = one
    return {
        "endpoint_overhead_ms": round(_overhead(one), 2),
        "direct_ms": round(median(direct), 2),
        "endpoint_ms": round(median(endpoint), 2),
        "endpoint_overhead_ms_p90": round(
            measurement.percentile(endpoint, 0.9) - measurement.percentile(direct, 0.9), 2
        ),
        "endpoint_overhead_ms_16": round(_overhead(many), 2),
        "direct_ms_16": round(median(many[0]), 2),
        "endpoint_ms_16": round(median(many[1]), 2),
        "calls": len(direct) + len(many[0]),
    }


async def _compare(
    engine: Engine, pool: list[Client], prompts: list[Prompt], times: int
) -> tuple[list[float], list[float]]:
    """Latencies of direct calls and of the same calls by the endpoint, as many in flight as there are clients."""
    from vllm import SamplingParams

    direct: list[float] = []
    endpoint: list[float] = []
    for at in range(times + 2):
        asked = [_request(prompts[(at * len(pool) + place) % len(prompts)], at) for place in range(len(pool))]
        urls = [engine.open_session(request) for request in asked]
        bodies = [
            json.dumps({"model": "m", "messages": request.prompt.task.prompt, "return_token_ids": True}).encode()
            for request in asked
        ]

        async def directly(place: int, asked: list[RolloutRequest] = asked) -> tuple[int, ...]:
            request = asked[place]
            sampling = SamplingParams(
                **POLICY_SAMPLING,
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                # The first call of a session has this seed.
                seed=seed_of(request.seed, 0),
                logprobs=0,
            )
            output = await engine._run(request.prompt.token_ids, sampling, None)
            return tuple(output.outputs[0].token_ids)

        async def by_endpoint(place: int, urls: list[str] = urls, bodies: list[bytes] = bodies) -> tuple[int, ...]:
            answer = await pool[place].ask(urls[place], bodies[place])
            return tuple(answer["choices"][0]["token_ids"])

        ways = [(directly, direct), (by_endpoint, endpoint)]
        told = []
        # Each begins every other time, and the first two times warm up.
        for way, latencies in ways if at % 2 else ways[::-1]:
            timed = await asyncio.gather(*(_timed(way, place) for place in range(len(pool))))
            if at >= 2:
                latencies += [milliseconds for _, milliseconds in timed]
            told.append([tokens for tokens, _ in timed])
        if len(pool) == 1 and told[0] != told[1]:
            raise SystemExit(f"other tokens by the endpoint than directly: {told}")
        for url in urls:
            engine.close_session(url)
    return direct, endpoint


async def _timed(way: Callable[[int], Awaitable[tuple[int, ...]]], place: int) -> tuple[tuple[int, ...], float]:
    began = time.perf_counter()
    tokens = await way(place)
    return tokens, (time.perf_counter() - began) * 1000


def _request(prompt: Prompt, seed: int) -> RolloutRequest:
    return RolloutRequest(prompt, 0, seed, 1.0, TOKENS, None)


def _overhead(found: tuple[list[float], list[float]]) -> float:
    """The median of the differences of calls that had the same tokens to generate."""
    return median(endpoint - direct for direct, endpoint in zip(*found, strict=True))


def main() -> None:
    given = measurement.parser("agents", __doc__).parse_args()
    before = measurement.machine()
    # Standard output is for the result.
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"}
    merging = measurement.measure(merge_speedup, given.quick).value
    result = asyncio.run(endpoint_overhead(given.quick))
    measurement.report({**result, **merging}, before, as_json=given.json)


if __name__ == "__main__":
    main()
