"""Judging beside what the judge's latency allows and beside a bare client: `python -m benchmarks.judge`.

`efficiency_16` and `efficiency_256_1s`: the share of the ideal rate (threads / latency) that 16 threads reach with a
judge that takes 200 ms, and 256 threads with one that takes a second. `overhead_vs_client`: what a verdict costs with
a judge that takes no time, over what a call of the bare `openai` client costs, by as many threads, in the same run.
`reading_1mb_vs_100kb`: how much longer the reading of a reply of 1 MB takes than that of one of 100 kB, at most over
several texts; ten is linear. The judge is a process of its own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from statistics import median
from typing import Any, Final

import openai

from benchmarks import measurement
from benchmarks.judge_endpoint import CRITERIA, running
from flywheel.config.judge import JudgeSettings
from flywheel.judge import prompt
from flywheel.judge.answer import UnreadableError, read, response_format
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_all
from flywheel.records.verdict import Exchange, Outcome

CLIENT_THREADS: Final = 16
RUBRIC: Final = Rubric.model_validate(
    {"id": "benchmark", "criteria": [{"id": name, "value": f"The answer is {name}."} for name in CRITERIA]}
)
EXCHANGE: Final = Exchange("How long is a day? " * 20, "A day has 24 hours. " * 40)


def spent() -> tuple[float, float]:
    """Seconds, and processor seconds of this process."""
    return time.perf_counter(), time.process_time()


def judge(url: str, threads: int, verdicts: int) -> tuple[float, float]:
    """What so many verdicts take, after every thread has its connection; seconds, and processor seconds."""
    grader = Grader(RUBRIC, JudgeSettings(model="judge", base_url=url, max_thread=threads))
    began = spent()
    for number, (_, verdict) in enumerate(
        grade_all(grader, ((n, EXCHANGE) for n in range(threads + verdicts)), threads)
    ):
        if verdict.outcome is not Outcome.ACCEPTED:
            raise SystemExit(f"no verdict: {verdict.error or verdict.reason}")
        if number + 1 == threads:
            began = spent()
    ended = spent()
    grader.close()
    return ended[0] - began[0], ended[1] - began[1]


def call(url: str, threads: int, calls: int) -> tuple[float, float]:
    """The same requests by the bare client."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    form: Any = response_format(RUBRIC.asked)
    messages: Any = prompt.messages(RUBRIC, EXCHANGE)
    ready = threading.Barrier(threads + 1)

    def ask() -> None:
        client.chat.completions.create(
            model="judge", messages=messages, temperature=0.0, max_tokens=2048, response_format=form
        )

    def work() -> None:
        ask()
        ready.wait()
        for _ in range(calls // threads):
            ask()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = spent()
    for worker in workers:
        worker.join()
    ended = spent()
    client.close()
    return ended[0] - began[0], ended[1] - began[1]


def efficiency(threads: int, latency: float, rounds: int, name: str) -> dict[str, float]:
    """The keys end with the number of threads; the first of them is `name`."""
    with running(latency) as url:
        seconds, processor = judge(url, threads, threads * rounds)
    return {
        name: round(latency * rounds / seconds, 4),
        f"verdicts_per_second_{threads}": round(threads * rounds / seconds, 1),
        f"cpu_ms_per_verdict_{threads}": round(1000 * processor / (threads * rounds), 3),
    }


def overhead(verdicts: int, repetitions: int) -> dict[str, float]:
    """Both in turn, so that what else the machine does hits both."""
    ours, theirs = [], []
    with running(0.0) as url:
        for _ in range(repetitions):
            theirs.append(call(url, CLIENT_THREADS, verdicts))
            ours.append(judge(url, CLIENT_THREADS, verdicts))
    each = {
        "verdict_ms": 1000 * median(seconds for seconds, _ in ours) / verdicts,
        "client_ms": 1000 * median(seconds for seconds, _ in theirs) / verdicts,
        "verdict_cpu_ms": 1000 * median(cpu for _, cpu in ours) / verdicts,
        "client_cpu_ms": 1000 * median(cpu for _, cpu in theirs) / verdicts,
    }
    return {"overhead_vs_client": round(each["verdict_ms"] / each["client_ms"], 3)} | {
        key: round(value, 3) for key, value in each.items()
    }


def reading(repetitions: int) -> dict[str, float]:
    """Texts without an object, with an object that never ends, and a verdict with a long reason."""
    nonce = "0123456789abcdef"
    results = {name: {"reason": "REASON", "choice": "yes"} for name in CRITERIA}
    verdict = json.dumps({"criteria": results, "check": nonce})
    units = ("{", '{"a":', '{"a": {}} ', "<think>", "</think>", "```", "a day has 24 hours ")

    def seconds(text: str) -> float:
        """The least of a few attempts: others run on the machine as well."""
        times = []
        for _ in range(repetitions):
            began = time.process_time()
            with suppress(UnreadableError):
                read(RUBRIC.asked, text, nonce=nonce)
            times.append(time.process_time() - began)
        return min(times)

    def texts(size: int) -> list[str]:
        broken = [unit * (size // len(unit)) for unit in units]
        return [*broken, verdict.replace("REASON", "a day " * (size // 6 // len(results)))]

    short, long = (list(map(seconds, texts(size))) for size in (100_000, 1_000_000))
    # Less than a millisecond is noise.
    ratios = [after / max(before, 1e-3) for before, after in zip(short, long, strict=True)]
    return {"reading_1mb_vs_100kb": round(max(ratios), 2), "reading_1mb_ms": round(1000 * max(long), 1)}


def main() -> None:
    options = measurement.parser("judge", __doc__).parse_args()
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        os.environ.pop(proxy, None)
    before = measurement.machine()
    result = {
        **efficiency(16, 0.2, 3 if options.quick else 60, "efficiency_16"),
        **efficiency(256, 1.0, 2 if options.quick else 20, "efficiency_256_1s"),
        **overhead(160 if options.quick else 3200, 1 if options.quick else 5),
        **reading(3 if options.quick else 10),
    }
    measurement.report(result, before, as_json=options.json)


if __name__ == "__main__":
    main()
