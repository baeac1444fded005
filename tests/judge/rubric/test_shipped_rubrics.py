"""What the shipped rubrics give for nothing, for inventions and for work done; the sums of `agent-reward`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.judge import JudgeSettings
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.checks import check_all, fails_required
from flywheel.judge.rubric.checks.tool_calls import called_tools
from flywheel.judge.rubric.file import load_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import Exchange
from tests.cases import for_each
from tests.factories.shipped_rubrics import COMPLETION, FOLDER, INVENTED, SHIPPED
from tests.judge.legitimate import LEGITIMATE
from tests.judge.rubric.degenerate_texts import BROKEN, LOOPS, TOOL_TEXTS
from tests.judge.rubric.steps import made, tool

every_rubric = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
AGENT = load_rubric(FOLDER / "agent-reward.yaml")
TOOLS = (
    tool("get_weather", "city", city={"type": "string"}, days={"type": "integer", "default": 1}),
    tool("get_time", "city", city={"type": "string"}),
)
QUESTION = "What is the weather in Oslo?"
RIGHT = made("get_weather", {"city": "Oslo"}, "7 °C, rain")
EMPTY = ("", "  \n", "…", "\u200b", "?!")
GIBBERISH = (
    "asdf jkl qwer zxcv", "xqzv blorp 9$k wibble", "lorem ipsum dolor sit amet", "%%% a ### b @@@", "42 42 7 oo kk",
    *LOOPS.values(), *BROKEN.values(), *TOOL_TEXTS.values(),
)  # fmt: skip


def asked(answer: str, *steps: tuple[ChatMessage, ...], query: str = QUESTION, **line: Any) -> Exchange:
    return Exchange(query, answer, trajectory=sum(steps, ()), tools=TOOLS, line=line)


def total(rubric: Rubric, exchange: Exchange, failed: Collection[str] = (), found: Collection[str] = ()) -> float:
    """The score by the checks and a judge that is content, but for the statements in `failed` (of parts) and `found`
    (of penalties)."""
    values = {result.criterion: result.value for result in check_all(rubric, exchange)}
    for criterion in rubric.asked:
        is_met = criterion.id in found if criterion.weight < 0 else criterion.id not in failed
        values[criterion.id] = 1.0 if is_met else 0.0
    return rubric.score(values)


def by_checks_alone(rubric: Rubric, exchange: Exchange) -> float:
    """What the checks give if no statement of the judge is met, and if none of them rejects."""
    criteria = [
        each.model_copy(update={"required": each.required and not each.asks_the_judge}) for each in rubric.every
    ]
    lenient = rubric.model_copy(update={"criteria": criteria})
    values = {result.criterion: result.value for result in check_all(rubric, exchange)}
    return lenient.score(values | {criterion.id: 0.0 for criterion in rubric.asked})


@every_rubric
def test_an_empty_answer_scores_nothing_and_asks_no_judge(path: Path) -> None:
    grader = Grader(load_rubric(path), JudgeSettings(base_url="http://127.0.0.1:9/v1", model="judge"))
    for answer in EMPTY:
        for exchange in (asked(answer), asked(answer, RIGHT), Exchange(QUESTION, answer)):
            verdict = grader.grade(exchange)
            assert (verdict.score, verdict.calls) == (0.0, 0), answer
    grader.close()


@every_rubric
def test_gibberish_gets_less_than_a_fifth_without_the_judge(path: Path) -> None:
    rubric = load_rubric(path)
    exchanges = [each for text in GIBBERISH for each in (asked(text), Exchange(QUESTION, text))]
    assert max(by_checks_alone(rubric, exchange) for exchange in exchanges) < 0.2
    if any(criterion.type == "degenerate" for criterion in rubric.every):
        for text in (*LOOPS.values(), *BROKEN.values(), *TOOL_TEXTS.values()):
            assert fails_required(rubric, check_all(rubric, asked(text))), text


@every_rubric
def test_not_done_yet_gets_less_than_a_fifth_if_the_judge_fails_completion_only(path: Path) -> None:
    rubric = load_rubric(path)
    for answer in ("Not done yet.", r"Not done yet. \boxed{?}", "还没有完成。", "Das ist noch nicht fertig."):
        for steps in ((), (RIGHT,)):
            assert total(rubric, asked(answer, *steps), failed={COMPLETION[path.stem]}) < 0.2, answer


@every_rubric
def test_a_correct_trajectory_is_above_an_invented_answer(path: Path) -> None:
    rubric = load_rubric(path)
    correct = total(rubric, asked(r"It is \boxed{7} °C and raining.", RIGHT))
    assert correct == 1
    assert total(rubric, asked(r"It is \boxed{21} °C and sunny."), failed={INVENTED[path.stem]}) < correct


def test_agent_reward_prefers_the_correct_trajectory_even_if_the_judge_believes_the_invention() -> None:
    assert total(AGENT, asked("It is 7 °C and raining.", RIGHT)) == 1
    assert total(AGENT, asked("It is 21 °C and sunny.")) == pytest.approx(0.925)


def test_the_weights_are_those_of_sage() -> None:
    weights = {criterion.id: criterion.weight for criterion in AGENT.criteria if abs(criterion.weight) > 1e-6}
    assert weights == {
        "task_completion": 0.4, "tool_accuracy": 0.25, "efficiency": 0.15, "timing_quality": 0.1,
        "format_compliance": 0.1, "wrong_tool": -0.3, "redundant_call": -0.2, "format_error": -0.1, "timeout": -0.5,
    }  # fmt: skip


BROKEN_JSON = made("get_weather", '{"city": {"name": "Oslo"}', "Error: invalid arguments")
SLOW = made("get_weather", {"city": "Oslo"}, "TimeoutError: no answer in 30 s")
ANSWER = "It is 7 °C and raining."
TABLE = [
    # Steps; statements of the judge that are not met; those of penalties that are; parts minus penalties.
    ((RIGHT,), (), (), 0.4 + 0.25 + 0.15 + 0.1 + 0.1),
    ((), (), (), 0.4 + 0.25 + 0.15 / 2 + 0.1 + 0.1),
    ((RIGHT,), ("timing_quality",), (), 0.4 + 0.25 + 0.15 + 0 + 0.1),
    ((RIGHT,), ("tool_accuracy", "timing_quality"), (), 0.4 + 0 + 0.15 + 0 + 0.1),
    ((RIGHT,), ("task_completion",), (), 0.0),
    ((RIGHT, RIGHT), (), (), 0.4 + 0.25 + 0.15 / 2 + 0.1 + 0.1 - 0.2),
    ((RIGHT,) * 5, (), (), 0.4 + 0.25 + 0.15 / 5 + 0.1 + 0.1 - 0.2),
    ((BROKEN_JSON, RIGHT), (), (), 0.4 + 0.25 + 0.15 / 2 + 0.1 + 0.1 / 2 - 0.1),
    ((SLOW, RIGHT), (), (), 0.4 + 0.25 + 0.15 / 2 + 0.1 + 0.1 - 0.5),
    ((RIGHT,), ("tool_accuracy",), ("wrong_tool",), 0.4 + 0 + 0.15 + 0.1 + 0.1 - 0.3),
    ((BROKEN_JSON, SLOW, RIGHT, RIGHT), (), (), 0.4 + 0.25 + 0.15 / 4 + 0.1 + 0.1 * 3 / 4 - 0.2 - 0.1 - 0.5),
    ((BROKEN_JSON, SLOW, SLOW, SLOW), ("tool_accuracy", "timing_quality"), ("wrong_tool",), 0.0),
]


@for_each(("steps", "failed", "found", "expected"), TABLE)
def test_the_total_is_the_one_computed_by_hand(
    steps: tuple[Any, ...], failed: tuple[str, ...], found: tuple[str, ...], expected: float
) -> None:
    assert total(AGENT, asked(ANSWER, *steps), failed, found) == pytest.approx(expected, abs=1e-8)


PENALISED: dict[str, Exchange] = {
    "wrong_tool": asked(ANSWER, made("get_time", {"city": "Oslo"}, "12:00"), RIGHT),
    "redundant_call": asked(ANSWER, RIGHT, RIGHT),
    "format_error": asked(ANSWER, BROKEN_JSON, RIGHT),
    "timeout": asked(ANSWER, SLOW, RIGHT),
}


def test_each_penalty_is_triggered_by_exactly_one_fixture() -> None:
    """The judge, who decides on `wrong_tool`, says yes where the time was asked for."""
    triggered = {}
    for name, exchange in PENALISED.items():
        values = {result.criterion: result.value for result in check_all(AGENT, exchange)}
        values["wrong_tool"] = float("get_time" in called_tools(exchange))
        triggered[name] = {each.id for each in AGENT.criteria if each.weight < 0 and values[each.id]}
    assert triggered == {name: {name} for name in PENALISED}
    assert set(triggered) == {criterion.id for criterion in AGENT.criteria if criterion.weight < 0}


WITHOUT_WORDS = ("BARE_BOX", "MORSE", "EMPTY")
"""Texts of the corpus without any letter or digit, which `present` rejects."""
MULTILINGUAL = {
    "Chinese": ("奥斯陆天气怎么样?", "奥斯陆现在气温七度,正在下雨。请求没有超时,一切正常。"),
    "Japanese": ("オスロの天気は?", "オスロは現在7度で、雨が降っています。エラーはありません。"),
    "Korean": ("오슬로 날씨 어때?", "오슬로는 지금 7도이고 비가 옵니다. 시간 초과는 없었습니다."),
    "Arabic": ("ما حال الطقس في أوسلو؟", "درجة الحرارة في أوسلو سبع درجات والجو ممطر."),
    "Hebrew": ("מה מזג האוויר באוסלו?", "באוסלו שבע מעלות ויורד גשם."),
    "Greek": ("Τι καιρό κάνει στο Όσλο;", "Στο Όσλο έχει επτά βαθμούς και βρέχει."),
    "Russian": ("Какая погода в Осло?", "В Осло семь градусов, идёт дождь. Ошибка: её не было."),
    "Hindi": ("ओस्लो में मौसम कैसा है?", "ओस्लो में तापमान सात डिग्री है और बारिश हो रही है।"),
    "Thai": ("อากาศที่ออสโลเป็นอย่างไร", "ออสโลอุณหภูมิเจ็ดองศาและฝนตก"),
    "French": (
        "Quel temps fait-il à Oslo ?",
        "Il fait sept degrés à Oslo et il pleut ; l'appel a réussi (timeout : non).",
    ),
    "German": ("Wie ist das Wetter in Oslo?", "In Oslo sind es sieben Grad, und es regnet. Error: gab es keinen."),
    "Czech": ("Jaké je počasí v Oslu?", "Strč prst skrz krk: v Oslu je sedm stupňů a prší."),
    "Turkish": ("Oslo'da hava nasıl?", "Oslo'da hava yedi derece ve yağmurlu."),
    "Vietnamese": ("Thời tiết ở Oslo thế nào?", "Ở Oslo bảy độ và trời đang mưa."),
}


@pytest.mark.slow
@for_each("name", [*MULTILINGUAL, *(LEGITIMATE.keys() - set(WITHOUT_WORDS))])
def test_a_legitimate_answer_in_any_language_is_no_false_alarm(name: str) -> None:
    query, answer = MULTILINGUAL.get(name) or (QUESTION, LEGITIMATE[name])
    steps = (made("get_weather", {"city": query}, answer), made("get_weather", {"city": answer[:60]}, answer))
    for exchange in (asked(answer, *steps, query=query), asked(answer, *steps[:1], query=query)):
        assert total(AGENT, exchange) == 1, [(each.criterion, each.reason) for each in check_all(AGENT, exchange)]
    assert total(AGENT, asked(answer, query=query)) == pytest.approx(0.925)
