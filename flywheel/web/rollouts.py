"""The rollouts of a round: groups by reward, and one group with the conversation and the tokens of a rollout.

Lists read the first line of each step's file, and the questions of the groups that they show. Of a group, only the
rollout that is shown is read. So memory does not grow with the files of a round.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode

from sqlalchemy import Connection, Row, select
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from flywheel.store.kernel.schema import rounds, tasks
from flywheel.store.views import task_list
from flywheel.training.data import rollout_file
from flywheel.training.data.rollout_file import (
    DROPPED,
    PROBABILITIES,
    RolloutGroup,
    RolloutSummary,
    probability_class,
    rollout_files,
)
from flywheel.web.site import Site, is_number, site_of

PER_PAGE: Final = 25
NEWEST_ROUNDS: Final = 50
"""Rounds that are offered, and looked at for rollouts."""
DEBUG: Final = "debug"
"""The name of the last debug round, which the state does not record."""
BINS: Final = 10
"""Bars of the figure of rewards."""
DIGITS: Final = 6
"""Of rewards that are compared, so that one that is shown as 0.3 is 0.3."""
ENDS: Final = {
    "truncated": "reached a limit",
    "missed": "a call without a result",
    "ungraded": "no reward",
    "untrained": "group not trained on",
}
ORDERS: Final[Mapping[str, tuple[str, Callable[[RolloutGroup], float]]]] = {
    "newest": ("newest step", lambda group: -group.step),
    "oldest": ("first step", lambda group: group.step),
    "lowest": ("lowest mean reward", lambda group: math.inf if group.mean is None else group.mean),
    "highest": ("highest mean reward", lambda group: math.inf if group.mean is None else -group.mean),
    "spread": ("widest rewards", lambda group: math.inf if group.spread is None else -group.spread),
}
"""The orders of a list, with the number by which each sorts. Groups without it are last."""
VIEWS: Final = {"logprob": "probability", "advantage": "advantage", "mask": "mask", "text": "text"}
"""What tokens can be shown by, with the name of each."""
TOKENS_PER_PAGE: Final = 2_000
"""Tokens of a sample that are shown at once."""
CONTEXT: Final = "t-context"
_MASK: Final = {"t-trained": "trained", CONTEXT: "context, not trained on"}
_LOGPROB: Final = {
    **{
        f"t-p{place}": f"probability {least:g} or more" if least else f"less than {PROBABILITIES[place - 1]:g}"
        for place, least in enumerate(PROBABILITIES)
    },
    "t-unknown": "probability unknown",
    CONTEXT: "context, not trained on",
}
_ADVANTAGES: Final = ((1.0, "t-a4", "1 or more"), (0.25, "t-a3", "0.25 to 1"), (-0.25, "t-a2", "-0.25 to 0.25"),
                      (-1.0, "t-a1", "-1 to -0.25"), (-math.inf, "t-a0", "less than -1"))  # fmt: skip
_NO_ADVANTAGE: Final = "t-none"
_ADVANTAGE: Final = {
    **{name: f"advantage {words}" for _, name, words in _ADVANTAGES},
    _NO_ADVANTAGE: "generated, without an advantage",
    CONTEXT: "context, not trained on",
}
LEGENDS: Final[Mapping[str, Mapping[str, str]]] = {
    "logprob": _LOGPROB, "advantage": _ADVANTAGE, "mask": _MASK, "text": {},
}  # fmt: skip
"""The classes of each view in words."""
REMOVED: Final = "a round writes them at the end of each step, and retention removes those of old rounds"

Key = tuple[float, int, int]
"""The place of a group in an order, which ends with its step and its number in the step."""


@dataclass(frozen=True, slots=True)
class RolloutSelection:
    """Which groups a list shows, and in which order: the query string of its address. Empty texts select all."""

    step: str = ""
    lowest: str = ""
    highest: str = ""
    criterion: str = ""
    end: str = ""
    task: str = ""
    order: str = ""
    after: str = ""

    @classmethod
    def of(cls, query: QueryParams) -> Self:
        return cls(**{each.name: query.get(each.name, "").strip() for each in fields(cls)})

    def query(self, **changes: object) -> str:
        """The query string of these groups; empty for all of them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | changes
        query = urlencode({name: value for name, value in values.items() if value != ""})
        return f"?{query}" if query else ""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which groups and rollouts a selection has, and the order of the groups."""

    step: int | None
    lowest: float
    highest: float
    criterion: str
    end: str
    task: str
    order: Callable[[RolloutGroup], float]
    after: Key | None

    @classmethod
    def of(cls, selection: RolloutSelection) -> Self:
        """Raises ValueError for a value that cannot be."""
        if selection.end and selection.end not in ENDS:
            raise ValueError(f"rollouts do not end by {selection.end[:100]!r}")
        if selection.order and selection.order not in ORDERS:
            raise ValueError(f"there is no order {selection.order[:100]!r}")
        if selection.step and not is_number(selection.step):
            raise ValueError(f"{selection.step[:100]!r} is no step")
        lowest, highest = (_bound(getattr(selection, name), default) for name, default in _BOUNDS)
        after = None
        if selection.after:
            value, step, group = selection.after.split(":")
            after = float(value), int(step), int(group)
        return cls(
            int(selection.step) if selection.step else None, lowest, highest, selection.criterion, selection.end,
            selection.task, ORDERS[selection.order or "newest"][1], after,
        )  # fmt: skip

    def key(self, group: RolloutGroup) -> Key:
        return self.order(group), group.step, group.group

    @property
    def has_bounds(self) -> bool:
        return self.lowest > -math.inf or self.highest < math.inf

    def has_group(self, group: RolloutGroup) -> bool:
        return (
            self.step in (None, group.step)
            and self.task in ("", group.task_id)
            and (self.end != "untrained" or group.dropped is not None)
            and any(self.has_rollout(each) for each in group.rollouts)
        )

    def has_rollout(self, rollout: RolloutSummary) -> bool:
        if self.has_bounds and not self._is_within(rollout.reward):
            return False
        if self.criterion and self.criterion not in rollout.failed:
            return False
        if self.end == "ungraded":
            return rollout.reward is None
        return (self.end != "truncated" or rollout.truncated) and (self.end != "missed" or rollout.missed)

    def _is_within(self, reward: float | None) -> bool:
        return reward is not None and self.lowest <= round(reward, DIGITS) <= self.highest


_BOUNDS: Final = (("lowest", -math.inf), ("highest", math.inf))


def _bound(text: str, default: float) -> float:
    bound = float(text) if text else default
    if math.isnan(bound):
        raise ValueError(f"{text[:100]!r} is no reward")
    return bound


@dataclass(slots=True)
class Listed:
    """A page of groups, and figures of all groups of the selection.

    Attributes:
        bins: How many of its rollouts have a reward in each tenth of 0 to 1.
        more: The `after` of the next page; empty on the last one.
        steps: The first and the last step of the round.
        criteria: The criteria that rollouts of the round did not meet.
    """

    groups: list[RolloutGroup] = field(default_factory=list)
    count: int = 0
    rollouts: int = 0
    rewards: int = 0
    total: float = 0.0
    bins: list[int] = field(default_factory=lambda: [0] * BINS)
    more: str = ""
    steps: tuple[int, int] | None = None
    criteria: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        return self.total / self.rewards if self.rewards else None

    def add(self, group: RolloutGroup, chosen: RolloutFilter) -> None:
        """Count a group of the selection."""
        self.count += 1
        for rollout in group.rollouts:
            if not chosen.has_rollout(rollout):
                continue
            self.rollouts += 1
            if rollout.reward is not None:
                self.rewards += 1
                self.total += rollout.reward
                self.bins[min(max(int(round(rollout.reward, DIGITS) * BINS), 0), BINS - 1)] += 1


def listed(directory: Path, chosen: RolloutFilter) -> Listed:
    """The groups of a selection, one page of them. The memory that it takes does not depend on how many there are."""
    page = Listed()
    criteria: Counter[str] = Counter()

    def selected() -> Iterable[RolloutGroup]:
        for group in rollout_file.groups(directory):
            first, last = page.steps or (group.step, group.step)
            page.steps = min(first, group.step), max(last, group.step)
            for rollout in group.rollouts:
                criteria.update(rollout.failed)
            if chosen.has_group(group):
                page.add(group, chosen)
                if chosen.after is None or chosen.key(group) > chosen.after:
                    yield group

    nearest = heapq.nsmallest(PER_PAGE + 1, selected(), key=chosen.key)
    page.groups = nearest[:PER_PAGE]
    page.criteria = [name for name, _ in criteria.most_common()]
    if len(nearest) > PER_PAGE:
        page.more = ":".join(map(repr, chosen.key(page.groups[-1])))
    return page


async def show_newest(request: Request) -> Response:
    """The rollouts of the newest round that has any."""
    site = site_of(request)
    newest = await site.read(_rounds)
    for row in newest:
        if rollout_files(Path(row.dir)):
            return RedirectResponse(f"/rollouts/{row.name}")
    values = {"name": "", "rounds": newest, "has_debug": _has_debug(site), **_EMPTY}
    return site.page("rollouts.html", without="there is no round with rollouts yet", **values)


_EMPTY: Final[Mapping[str, Any]] = {
    "selection": RolloutSelection(),
    "page": Listed(),
    "rows": (),
    "orders": ORDERS,
    "ends": ENDS,
}


def _rounds(conn: Connection) -> list[Row[Any]]:
    """The newest rounds: `name`, `dir` and `state`."""
    columns = rounds.c.name, rounds.c.dir, rounds.c.state
    return list(conn.execute(select(*columns).order_by(rounds.c.id.desc()).limit(NEWEST_ROUNDS)))


def _has_debug(site: Site) -> bool:
    return bool(rollout_files(site.config.state_dir / "rounds" / DEBUG))


def _directory(name: str, site: Site, conn: Connection) -> Path | None:
    """The directory of a round."""
    if name == DEBUG:
        return site.config.state_dir / "rounds" / DEBUG
    directory = conn.execute(select(rounds.c.dir).where(rounds.c.name == name)).scalar_one_or_none()
    return Path(directory) if directory is not None else None


async def show_list(request: Request) -> Response:
    """The groups of a round, a page of them."""
    site, name = site_of(request), request.path_params["round"]
    selection = RolloutSelection.of(request.query_params)
    try:
        chosen = RolloutFilter.of(selection)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such selection of rollouts: {error}.") from None
    directory = await _directory_of(site, name)
    others = await site.read(_rounds)
    values = {"name": name, "rounds": others, "has_debug": _has_debug(site), **_EMPTY, "selection": selection}
    if not rollout_files(directory):
        return site.page("rollouts.html", without=f"there are none in {directory}: {REMOVED}", **values)
    page = await asyncio.to_thread(listed, directory, chosen)
    questions = await site.read(task_list.questions, [group.task_id for group in page.groups])
    rows = [Shown(group, questions.get(group.task_id, ""), chosen) for group in page.groups]
    return site.page("rollouts.html", without="", **{**values, "page": page, "rows": rows})


@dataclass(frozen=True, slots=True)
class Shown:
    """A row of the list."""

    group: RolloutGroup
    question: str
    chosen: RolloutFilter

    @property
    def key(self) -> str:
        return key_of(self.group)

    @property
    def rollouts(self) -> list[tuple[int, RolloutSummary, bool]]:
        """Place, rollout, and whether it is selected; the highest reward first."""
        return [(place, each, self.chosen.has_rollout(each)) for place, each in by_reward(self.group)]

    @property
    def failed(self) -> list[tuple[str, int]]:
        """The criteria that were not met, and by how many rollouts; the most frequent first."""
        return Counter(name for each in self.group.rollouts for name in each.failed).most_common()

    @property
    def truncated(self) -> int:
        return sum(each.truncated for each in self.group.rollouts)

    @property
    def missed(self) -> int:
        return sum(each.missed for each in self.group.rollouts)

    @property
    def why(self) -> str:
        return dropped(self.group)


def dropped(group: RolloutGroup) -> str:
    """Why a group is not trained on; empty if it is."""
    return DROPPED.get(group.dropped, group.dropped) if group.dropped else ""


def key_of(group: RolloutGroup) -> str:
    """The group in the address of its page."""
    return f"{group.step}-{group.group}"


def by_reward(group: RolloutGroup) -> list[tuple[int, RolloutSummary]]:
    """The rollouts with their places from 1, the highest reward first and those without one last."""
    places = list(enumerate(group.rollouts, 1))
    return sorted(places, key=lambda pair: (pair[1].reward is None, -(pair[1].reward or 0), pair[0]))


async def _directory_of(site: Site, name: str) -> Path:
    directory = await site.read(partial(_directory, name, site))
    if directory is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no round {name}.")
    return directory


async def show(request: Request) -> Response:
    """One group, with one of its rollouts in full."""
    site, name, key = site_of(request), request.path_params["round"], request.path_params["group"]
    numbers = {name: request.query_params.get(name, "") for name in ("rollout", "sample", "from")}
    view = request.query_params.get("by", "logprob")
    if view not in VIEWS or any(value and not is_number(value) for value in numbers.values()):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "There is no such part of the rollouts.")
    directory = await _directory_of(site, name)
    group, before, after = await asyncio.to_thread(_beside, directory, key)
    if group is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"{name} has no rollouts {key}.")
    place = int(numbers["rollout"]) if numbers["rollout"] else by_reward(group)[0][0]
    rollout = await asyncio.to_thread(_rollout, group, place)
    if rollout is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"The group has no rollout {place}.")
    samples = rollout["samples"]
    number = int(numbers["sample"]) if numbers["sample"] else len(samples)
    sample = samples[number - 1] if 0 < number <= len(samples) else None
    start = _start(sample, numbers["from"]) if sample is not None else 0
    task = await site.read(partial(_prompt, group.task_id))
    return site.page(
        "rollout_group.html",
        name=name,
        key=key,
        group=group,
        why=dropped(group),
        ranked=by_reward(group),
        before=key_of(before) if before is not None else None,
        after=key_of(after) if after is not None else None,
        place=place,
        rollout=rollout,
        task=task,
        view=view,
        views=VIEWS,
        legend=LEGENDS[view],
        number=number,
        samples=len(samples),
        length=len(sample["token_ids"]) if sample is not None else 0,
        trained=sum(sample["loss_mask"]) if sample is not None else 0,
        start=start,
        page=TOKENS_PER_PAGE,
        runs=token_runs(sample, rollout["advantage"], view, start) if sample is not None else (),
    )


def _start(sample: Mapping[str, Any], choice: str) -> int:
    """The first token that is shown: without a choice, one such that generated tokens are seen."""
    if choice:
        return min(int(choice), len(sample["token_ids"]))
    first = next((place for place, mask in enumerate(sample["loss_mask"]) if mask), 0)
    return first // TOKENS_PER_PAGE * TOKENS_PER_PAGE


def _beside(directory: Path, key: str) -> tuple[RolloutGroup | None, RolloutGroup | None, RolloutGroup | None]:
    """A group by its key, and those before and after it."""
    before = match = None
    for group in rollout_file.groups(directory):
        if match is not None:
            return match, before, group
        if key_of(group) == key:
            match = group
        else:
            before = group
    return (match, before, None) if match is not None else (None, None, None)


def _rollout(group: RolloutGroup, place: int) -> dict[str, Any] | None:
    """A rollout of a group by its place from 1."""
    return rollout_file.rollout_of(group, place - 1) if 0 < place <= len(group.rollouts) else None


def _prompt(key: str, conn: Connection) -> dict[str, Any] | None:
    """What a task asks: `messages`, or only its question; None if the state does not have it."""
    line = conn.execute(select(tasks.c.payload).where(tasks.c.key == key)).scalar_one_or_none()
    if line is None:
        return None
    asked = {"role": "user", "content": line["main_query"]}
    return {"question": line["main_query"], "messages": line.get("prompt") or [*line["init_messages"], asked]}


@dataclass(slots=True)
class TokenRun:
    """Tokens that are shown as one piece. `said` is the probability of a single token in words, else empty."""

    kind: str
    text: str
    said: str = ""
    tokens: int = 1


def token_runs(sample: Mapping[str, Any], advantage: float | None, view: str, start: int = 0) -> list[TokenRun]:
    """A page of the tokens of a sample from the token `start`."""
    pieces: list[TokenRun] = []
    for run in _tokens(sample, advantage, view, start):
        if pieces and not run.said and (pieces[-1].kind, pieces[-1].said) == (run.kind, ""):
            pieces[-1].text += run.text
            pieces[-1].tokens += 1
        else:
            pieces.append(run)
    return pieces


def _tokens(sample: Mapping[str, Any], advantage: float | None, view: str, start: int) -> Iterator[TokenRun]:
    shown = slice(start, start + TOKENS_PER_PAGE)
    for token, mask, logprob, text in zip(
        *(sample[name][shown] for name in ("token_ids", "loss_mask", "logprobs", "text")), strict=True
    ):
        words = f"<{token}>" if text is None else text
        if not mask:
            yield TokenRun(CONTEXT, words)
            continue
        # A line feed is a token to be seen, too. The line still ends there.
        ends = "\n" if words.endswith("\n") else ""
        words = words.replace("\n", "↵")
        if view == "text":
            yield TokenRun("t-plain", f"⟦{words}|{'null' if logprob is None else f'{logprob:.2f}'}⟧{ends}")
        elif view == "mask":
            yield TokenRun("t-trained", words + ends)
        elif view == "advantage":
            yield TokenRun(_of_advantage(advantage), words + ends)
        elif logprob is None:
            yield TokenRun("t-unknown", words + ends, "probability unknown")
        else:
            yield TokenRun(
                f"t-p{probability_class(logprob)}", words + ends, f"{math.exp(logprob):.1%}, logprob {logprob:.2f}"
            )


def _of_advantage(advantage: float | None) -> str:
    if advantage is None:
        return _NO_ADVANTAGE
    return next(name for least, name, _ in _ADVANTAGES if advantage >= least)
