"""The rollouts of a round: groups by reward, and one group with the conversation and the tokens of a rollout.

Lists read the first line of each step's file, and the questions of the groups that they show. Of a group, only the
rollout that is shown is read. So memory does not grow with the files of a round.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self

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
from flywheel.web.site import Site, is_number, position, site_of, tasks_with

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
TOKENS_PER_PAGE: Final = 2_000
"""Tokens of a sample that are shown at once."""
CONTEXT: Final = "t-context"
LEGEND: Final = {
    **{
        f"t-p{place}": f"probability {least:g} or more" if least else f"less than {PROBABILITIES[place - 1]:g}"
        for place, least in enumerate(PROBABILITIES)
    },
    "t-unknown": "probability unknown",
    CONTEXT: "context, not trained on",
}
"""The classes of tokens in words."""
REMOVED: Final = "a round writes them at the end of each step, and retention removes those of old rounds"

Key = tuple[float, int, int]
"""The place of a group in an order, which ends with its step and its number in the step."""


@dataclass
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

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be."""
        if self.end not in ("", *ENDS):
            raise ValueError(f"rollouts do not end by {self.end[:100]!r}")
        if self.order not in ("", *ORDERS):
            raise ValueError(f"there is no order {self.order[:100]!r}")
        if self.step and not is_number(self.step):
            raise ValueError(f"{self.step[:100]!r} is no step")
        self._bounds = float(self.lowest or -math.inf), float(self.highest or math.inf)
        if any(map(math.isnan, self._bounds)):
            raise ValueError("a bound is no reward")
        self._order = ORDERS[self.order or "newest"][1]
        self.begin: Key = (-math.inf, 0, 0)
        if self.after:
            value, step, group = self.after.split(":")
            self.begin = float(value), int(step), int(group)

    @classmethod
    def of(cls, query: QueryParams) -> Self:
        return cls(**{each.name: query.get(each.name, "").strip() for each in fields(cls)})

    def query(self, **changes: object) -> str:
        """The query string of these groups; empty for all of them."""
        return tasks_with("", **(asdict(self) | changes))

    def key(self, group: RolloutGroup) -> Key:
        return self._order(group), group.step, group.group

    def has_group(self, group: RolloutGroup) -> bool:
        return (
            (not self.step or int(self.step) == group.step)
            and self.task in ("", group.task_id)
            and (self.end != "untrained" or group.dropped is not None)
            and any(map(self.has_rollout, group.rollouts))
        )

    def has_rollout(self, rollout: RolloutSummary) -> bool:
        lowest, highest = self._bounds
        reward = round(rollout.reward, DIGITS) if rollout.reward is not None else math.nan
        return (
            (not (self.lowest or self.highest) or lowest <= reward <= highest)
            and (not self.criterion or self.criterion in rollout.failed)
            and (self.end != "ungraded" or rollout.reward is None)
            and (self.end != "truncated" or rollout.truncated)
            and (self.end != "missed" or rollout.missed)
        )


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
    total: float = 0.0
    bins: list[int] = field(default_factory=lambda: [0] * BINS)
    more: str = ""
    steps: tuple[int, int] | None = None
    criteria: list[str] = field(default_factory=list)

    @property
    def rewards(self) -> int:
        return sum(self.bins)

    @property
    def mean(self) -> float | None:
        return self.total / self.rewards if self.rewards else None

    def add(self, group: RolloutGroup, chosen: RolloutSelection) -> None:
        """Count a group of the selection."""
        self.count += 1
        for rollout in group.rollouts:
            if not chosen.has_rollout(rollout):
                continue
            self.rollouts += 1
            if rollout.reward is not None:
                self.total += rollout.reward
                self.bins[min(max(int(round(rollout.reward, DIGITS) * BINS), 0), BINS - 1)] += 1


def listed(directory: Path, chosen: RolloutSelection) -> Listed:
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
                if chosen.key(group) > chosen.begin:
                    yield group

    nearest = heapq.nsmallest(PER_PAGE + 1, selected(), key=chosen.key)
    page.groups = nearest[:PER_PAGE]
    page.criteria = [name for name, _ in criteria.most_common()]
    if len(nearest) > PER_PAGE:
        page.more = ":".join(map(repr, chosen.key(page.groups[-1])))
    return page


async def show_list(request: Request) -> Response:
    """The groups of a round, a page of them; without a name, those of the newest round that has any."""
    site, name = site_of(request), request.path_params.get("round", "")
    try:
        selection = RolloutSelection.of(request.query_params)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such selection of rollouts: {error}.") from None
    directory = await _directory_of(site, name) if name else None
    newest = await site.read(_rounds)
    page, questions, without = Listed(), dict[str, str](), ""
    if directory is None:
        if with_any := next((row.name for row in newest if rollout_files(Path(row.dir))), None):
            return RedirectResponse(f"/rollouts/{with_any}")
        without = "there is no round with rollouts yet"
    elif rollout_files(directory):
        page = await asyncio.to_thread(listed, directory, selection)
        questions = await site.read(task_list.questions, [group.task_id for group in page.groups])
    else:
        without = f"there are none in {directory}: {REMOVED}"
    return site.page(
        "rollouts.html",
        name=name,
        rounds=newest,
        has_debug=bool(rollout_files(_debug(site))),
        selection=selection,
        page=page,
        questions=questions,
        orders=ORDERS,
        ends=ENDS,
        by_reward=by_reward,
        failed=failed,
        dropped=dropped,
        key_of=key_of,
        without=without,
    )


def _rounds(conn: Connection) -> list[Row[Any]]:
    """The newest rounds: `name` and `dir`."""
    return list(conn.execute(select(rounds.c.name, rounds.c.dir).order_by(rounds.c.id.desc()).limit(NEWEST_ROUNDS)))


def _debug(site: Site) -> Path:
    return site.config.state_dir / "rounds" / DEBUG


def failed(group: RolloutGroup) -> list[tuple[str, int]]:
    """The criteria that were not met, and by how many rollouts; the most frequent first."""
    return Counter(name for each in group.rollouts for name in each.failed).most_common()


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
    """The directory of a round. Raises HTTPException."""
    if name == DEBUG:
        return _debug(site)
    found = await site.read(lambda conn: conn.execute(select(rounds.c.dir).where(rounds.c.name == name)).scalar())
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no round {name}.")
    return Path(found)


async def show(request: Request) -> Response:
    """One group, with one of its rollouts in full."""
    site, name, key = site_of(request), request.path_params["round"], request.path_params["group"]
    place, number, begin = (position(request.query_params, each) for each in ("rollout", "sample", "from"))
    directory = await _directory_of(site, name)
    group, before, after = await asyncio.to_thread(_beside, directory, key)
    if group is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"{name} has no rollouts {key}.")
    place = by_reward(group)[0][0] if place is None else place
    if not 0 < place <= len(group.rollouts):
        raise HTTPException(HTTPStatus.NOT_FOUND, f"The group has no rollout {place}.")
    rollout = await asyncio.to_thread(rollout_file.rollout_of, group, place - 1)
    samples = rollout["samples"]
    number = len(samples) if number is None else number
    sample = samples[number - 1] if 0 < number <= len(samples) else {"token_ids": [], "loss_mask": []}
    start = _start(sample, begin)
    return site.page(
        "rollout_group.html",
        name=name,
        key=key,
        group=group,
        why=dropped(group),
        ranked=by_reward(group),
        before=before and key_of(before),
        after=after and key_of(after),
        place=place,
        rollout=rollout,
        task=await site.read(partial(_prompt, group.task_id)),
        legend=LEGEND,
        number=number,
        samples=len(samples),
        length=len(sample["token_ids"]),
        trained=sum(sample["loss_mask"]),
        start=start,
        page=TOKENS_PER_PAGE,
        runs=token_runs(sample, start) if sample["token_ids"] else (),
    )


def _start(sample: Mapping[str, Any], choice: int | None) -> int:
    """The first token that is shown: without a choice, one such that generated tokens are seen."""
    if choice is not None:
        return min(choice, len(sample["token_ids"]))
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


def _prompt(key: str, conn: Connection) -> dict[str, Any] | None:
    """What a task asks: `messages`, or only its question; None if the state does not have it."""
    line = conn.execute(select(tasks.c.payload).where(tasks.c.key == key)).scalar_one_or_none()
    if line is None:
        return None
    asked = {"role": "user", "content": line["main_query"]}
    return {"question": line["main_query"], "messages": line.get("prompt") or [*line["init_messages"], asked]}


@dataclass(slots=True)
class TokenRun:
    """A trained token with its probability in words, or the context between two."""

    kind: str
    text: str
    said: str = ""
    tokens: int = 1


def token_runs(sample: Mapping[str, Any], start: int = 0) -> list[TokenRun]:
    """A page of the tokens of a sample from the token `start`."""
    runs: list[TokenRun] = []
    shown = slice(start, start + TOKENS_PER_PAGE)
    columns = (sample[name][shown] for name in ("token_ids", "loss_mask", "logprobs", "text"))
    for token, mask, logprob, text in zip(*columns, strict=True):
        words = f"<{token}>" if text is None else text
        if mask:
            # A line feed is a token to be seen, too. The line still ends there.
            words = words.replace("\n", "↵") + ("\n" if words.endswith("\n") else "")
            kind, said = "t-unknown", "probability unknown"
            if logprob is not None:
                kind, said = f"t-p{probability_class(logprob)}", f"{math.exp(logprob):.1%}, logprob {logprob:.2f}"
            runs.append(TokenRun(kind, words, said))
        elif runs and runs[-1].kind == CONTEXT:
            runs[-1].text += words
            runs[-1].tokens += 1
        else:
            runs.append(TokenRun(CONTEXT, words))
    return runs
