"""The tables of `state.db`. Times are UTC in ISO 8601; JSON columns hold what varies in structure.

It is one SQLite database (WAL, `synchronous=FULL`, foreign keys on). One thread writes, a few read, and each
transaction runs whole in its thread; short ones use aiosqlite. The state of another schema is refused before any
write.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

SCHEMA_VERSION: Final = 1

metadata = MetaData()

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
"""What there is once: the schema, the number of the last task in the task file, notes for `status`."""

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("path", Text, nullable=False, unique=True),
    Column("schema", Text, nullable=False, default=""),
    Column("identity", Text, nullable=False, default=""),
    Column("fingerprint", Text, nullable=False, default=""),
    Column("generation", Integer, nullable=False, default=0),
    Column("rowid_done", Integer, nullable=False, default=0),
    Column("anchor", Text, nullable=False, server_default=""),
    Column("type", Text, nullable=False, server_default="studio"),
    Column("condition", Text, nullable=False, server_default=""),
    Column("swept_at", Text),
    Column("open_traces", Integer, nullable=False, default=0),
    Column("longest_read_ms", Float, nullable=False, default=0.0),
    Column("error", Text, nullable=False, default=""),
    Column("warning", Text, nullable=False, default=""),
    Column("read_at", Text),
)
"""Each source by its path. `identity` is device and inode, `fingerprint` that of Studio's schema, `generation`
how often reading started over; `rowid_done` and `anchor` are the cursor; `swept_at` is the last full scan."""

replies = Table(
    "replies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("source_id", ForeignKey("sources.id"), nullable=False),
    Column("span_id", Text, nullable=False),
    Column("trace_id", Text, nullable=False, index=True),
    Column("conversation_id", Text, nullable=False, default=""),
    Column("agent", Text, nullable=False, default=""),
    Column("state", Text, nullable=False),
    Column("skip_reason", Text),
    Column("detail", Text, nullable=False, default=""),
    Column("task_id", ForeignKey("tasks.id"), index=True),
    Column("content", BigInteger),
    Column("user", Text, nullable=False, server_default=text("''")),
    Column("started_at", Text, nullable=False, server_default=text("''")),
    Column("own_id", Text),
    Column("created_at", Text, nullable=False),
    UniqueConstraint("source_id", "span_id"),
    Index("replies_by_state", "source_id", "state", "skip_reason"),
    Index("replies_by_own_id", "source_id", "own_id", sqlite_where=text("own_id IS NOT NULL")),
)
"""The outcome of each reply. `span_id` is its name (`flywheel.store.reply_names`); `started_at` is empty if it could
not be read; `content` is the content hash of the reply, NULL if it is dead or erased; `user` is the
pseudonym of the user (`flywheel.store.erasures`), empty if none is known; `own_id` is the id that a file gives a row
without a question or an answer, until a later row with that id completes it. Of an erased reply, `span_id` and
`trace_id` are pseudonyms, `started_at` is the day, empty if it is not certain, and what else it was is empty."""

erasures = Table(
    "erasures",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("pseudonym", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("blocks", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("report", JSON(none_as_null=True)),
    Column("created_at", Text, nullable=False),
    Column("finished_at", Text),
    UniqueConstraint("kind", "pseudonym"),
)
"""What people had erased: a conversation, what one service has of it (`service`), or a user (`kind`), by its
pseudonym. `subject` is the id itself until all is erased, then empty. `blocks` says whether new conversations of a
user are refused. `report` has counts and names of rounds, no texts."""

erased_conversations = Table(
    "erased_conversations",
    metadata,
    Column("pseudonym", Text, primary_key=True),
    Column("erasure_id", ForeignKey("erasures.id"), nullable=False),
    sqlite_with_rowid=False,
)
"""Conversations of which nothing is stored any more, by their pseudonyms."""

traces = Table(
    "traces",
    metadata,
    Column("source_id", ForeignKey("sources.id"), primary_key=True),
    Column("trace_id", Text, primary_key=True),
    Column("rowids", Text, nullable=False),
    Column("digest", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("is_open", Boolean, nullable=False),
    Index("traces_open", "source_id", sqlite_where=text("is_open")),
    sqlite_with_rowid=False,
)
"""The checkpoint of every trace, see `flywheel.records.trace.Checkpoint`; `rowids` are ranges such as `7-9,12`."""

conversations = Table(
    "conversations",
    metadata,
    Column("key", Text, primary_key=True),
    Column("split", Text, nullable=False),
    Column("like", Text, nullable=False),
    Column("words", LargeBinary, nullable=False),
    Column("exact", Boolean, nullable=False, server_default=text("0")),
    Index("conversations_joined", "like", sqlite_where=text('"like" <> key AND exact = 0')),
    sqlite_with_rowid=False,
)
"""The split of each conversation, which never changes. `like` is the conversation that it follows because it begins
nearly or exactly (`exact`) as that one does, else itself; `words` are the hashes of the words of its first question,
empty where `exact`."""

signature_bands, recent_bands = (
    Table(
        name,
        metadata,
        Column("band", BigInteger, primary_key=True),
        Column("key", ForeignKey("conversations.key"), primary_key=True),
        sqlite_with_rowid=False,
    )
    for name in ("signature_bands", "recent_bands")
)
"""The bands by which conversations that begin alike are found, see `flywheel.records.similarity`; also the hash of
each beginning. New rows go to the small table `recent_bands` first, see `flywheel.store.splits`."""

tasks = Table(
    "tasks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key", Text, nullable=False, unique=True),
    Column("conversation_id", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("adapter", Text, nullable=False, default=""),
    Column("started_at", Text, nullable=False),
    Column("split", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("excluded", Text, nullable=False, server_default=text("''")),
    Column("model", Text, nullable=False, server_default=text("''")),
    Column("target", Text, nullable=False, server_default=text("''")),
    Column("structure", Text, nullable=False, server_default=text("''")),
    Column("beginning", BigInteger),
    # Before the payload: SQLite reads a long one whole to reach what is behind it.
    Column("verdict_id", Integer),
    Column("payload", JSON, nullable=False),
    Column("retry_at", Text),
    Column("crashes", Integer, nullable=False, server_default=text("0")),
    Column("released", Boolean, nullable=False, server_default=text("0")),
    Column("created_at", Text, nullable=False),
    Index("tasks_by_beginning", "beginning", sqlite_where=text("beginning IS NOT NULL")),
    Index("tasks_by_state", "state", "split"),
    Index("tasks_suspected", "crashes", sqlite_where=text("crashes > 0")),
    Index("tasks_for_rounds", "state", "split", "excluded", "target"),
    Index("tasks_by_conversation", "conversation_id", "started_at"),
)
"""Each task once. `key` is a hash of trace and span, `payload` the line of the task file; `split` never changes.
`excluded` says why rounds leave it out, see `flywheel.records.exclusion`; empty if they do not. `model` is the
requested model, empty if it is unknown; if the response's id names the version, it is empty for an adapter, and
`flywheel.records.request_id.BASE_BY_ID` for the base model. `target` is the target whose samples it can be
(`targets`), empty for none and without targets. `structure` is its class (`training.task_weights`). `beginning` is a
hash of the beginning of its conversation, for held-out tasks only. `verdict_id` is the current verdict, see
`flywheel.store.verdicts.point`. `crashes` is how often in a row a process ended while the task was in work;
`released` whether a person has released it after it was held."""

reply_calls = Table(
    "reply_calls",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("reply_id", ForeignKey("replies.id"), primary_key=True, index=True),
    Column("is_joined", Boolean, nullable=False),
    Index("reply_calls_missing", "reply_id", sqlite_where=text("NOT is_joined")),
    sqlite_with_rowid=False,
)
"""The recorded calls of each reply by request id; `is_joined` says whether it was found in the call log."""

placed_calls = Table(
    "placed_calls",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("trace_id", Text, nullable=False, index=True),
    Column("conversation", Text, nullable=False, index=True),
    Column("root", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("ended_ns", BigInteger, nullable=False),
    Column("placed_ns", BigInteger, nullable=False, index=True),
    Column("is_answered", Boolean, nullable=False),
    Column("is_continued", Boolean, nullable=False),
    Column("is_erased", Boolean, nullable=False),
    Column("due_ns", BigInteger),
    Index("placed_calls_due", "due_ns", sqlite_where=text("due_ns IS NOT NULL")),
)
"""The recorded calls that replies are found in, in the order in which they were placed in conversations; see
`flywheel.store.placed_calls`. The calls with one `trace_id` are one reply, which becomes a row of `replies` at
`due_ns`, and again when another call joins it; NULL: nothing is to be done. `root` is the conversation whose split
it takes, `placed_ns` the time of the daemon. `is_erased`: it goes on from an erased call."""

call_hashes = Table(
    "call_hashes",
    metadata,
    Column("hash", LargeBinary, primary_key=True),
    Column("number", ForeignKey("placed_calls.number"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)
"""By what a later call is known to continue a placed one: keyed hashes of its messages with each answer, and of the
ids of tool calls in its answers."""

erased_answers = Table(
    "erased_answers",
    metadata,
    Column("hash", LargeBinary, primary_key=True),
    sqlite_with_rowid=False,
)
"""The hashes of erased calls, as in `call_hashes`: what goes on from them is counted and not stored."""

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("source_id", ForeignKey("sources.id")),
    Column("subject", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("excerpt", Text, nullable=False, default=""),
    Column("state", Text, nullable=False, server_default="open"),
    Column("attempts", Integer, nullable=False, server_default="1"),
    Column("created_at", Text, nullable=False),
    UniqueConstraint("kind", "source_id", "subject"),
)
"""Units that could not be processed, with their last error and an excerpt; never deleted."""

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("old", Text),
    Column("new", Text, nullable=False),
    Column("detail", Text, nullable=False, default=""),
    Index("events_by_subject", "kind", "subject"),
)
"""Every change of state, append-only, written in the transaction that makes the change."""

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("rubric_hash", Text, nullable=False),
    Column("judge_hash", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("score", Float),
    Column("is_disputed", Boolean, nullable=False, server_default=text("0")),
    Column("results", JSON, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("error", Text, nullable=False, default=""),
    Column("calls", Integer, nullable=False, default=0),
    Column("prompt_tokens", Integer, nullable=False, default=0),
    Column("completion_tokens", Integer, nullable=False, default=0),
    Column("latency_seconds", Float, nullable=False, default=0.0),
    Column("created_at", Text, nullable=False),
    Column("judgements", JSON, nullable=False, server_default="[]"),
    UniqueConstraint("task_id", "rubric_hash", "judge_hash"),
    # Counts by rubric, and comparisons of two, read no verdict.
    Index("verdicts_by_rubric", "rubric_hash", "task_id", "judge_hash", "outcome"),
    # Lists of tasks in the order of their scores.
    Index("verdicts_by_score", "score", "task_id"),
)
"""Verdicts by task, rubric and judge; `results` are those of the criteria. `judgements` are the judge's answers
that the verdict was made of, see `flywheel.records.verdict.Judgement`; it `is_disputed` if their outcomes differ."""

judge_days = Table(
    "judge_days",
    metadata,
    Column("day", Text, primary_key=True),
    Column("purpose", Text, primary_key=True),
    Column("calls", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)
"""Usage of judges by day (UTC) and purpose, see `flywheel.judge.usage.Purpose`."""

judge_costs = Table(
    "judge_costs",
    metadata,
    Column("day", Text, primary_key=True),
    Column("purpose", Text, primary_key=True),
    Column("currency", Text, primary_key=True),
    Column("amount", Float, nullable=False),
)
"""What the tokens of `judge_days` cost by the prices at the time of the calls; no row where no prices were set."""

judge_errors = Table(
    "judge_errors",
    metadata,
    Column("hour", Text, primary_key=True),
    Column("error", Text, primary_key=True),
    Column("count", Integer, nullable=False),
)
"""Undecided verdicts by hour (UTC, `2026-01-31T13`) and error. Errors that differ only in numbers are one."""

judge_models = Table(
    "judge_models",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("first_used_at", Text, nullable=False),
)
"""Each judge that verdicts were made by; `hash` is `judge_hash` of other tables."""

rubrics = Table(
    "rubrics",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("first_used_at", Text, nullable=False),
)
"""Each version of a rubric that tasks were judged by; `hash` is `rubric_hash` of other tables, `name` the rubric's
`id`, which its versions share."""

labels = Table(
    "labels",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), nullable=False, index=True),
    Column("verdict_id", ForeignKey("verdicts.id")),
    Column("label", Text, nullable=False),
    Column("criterion", Text, nullable=False),
    Column("comment", Text, nullable=False),
    Column("is_blind", Boolean, nullable=False),
    Column("labelled_by", Text, nullable=False),
    Column("created_at", Text, nullable=False),
)
"""What people say of replies, append-only: the last of a person on a task and criterion counts. `criterion` is empty
for the whole reply. `verdict_id` is the verdict at that time; `is_blind` whether the person did not see it."""

requests = Table(
    "requests",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("arguments", JSON, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("result", JSON),
    Column("error", Text, nullable=False, server_default=""),
    Column("created_at", Text, nullable=False),
    Column("finished_at", Text),
    Index("requests_open", "id", sqlite_where=text("state = 'open'")),
)
"""Actions that people ask for, see `flywheel.store.requests`. `result` is what was done, or the error."""

available_samples = Table(
    "available_samples",
    metadata,
    Column("at", Text, primary_key=True),
    Column("target", Text, primary_key=True, server_default=text("''")),
    Column("usable", Integer, nullable=False),
    Column("needed", Integer, nullable=False),
    Column("waits_for", Text, nullable=False),
)
"""Usable samples of each target (`rounds.target`) each time that their number or what its next round waits for
changed."""

fingerprints = Table(
    "fingerprints",
    metadata,
    Column("task_id", ForeignKey("tasks.id"), primary_key=True),
    Column("like", Integer, nullable=False),
    Column("scope", BigInteger, nullable=False),
    Column("exact", BigInteger, nullable=False),
    Column("words", LargeBinary, nullable=False),
    Column("particulars", LargeBinary, nullable=False),
    Column("text", Text, nullable=False),
    Column("threshold", Float, nullable=False),
    Column("kept", Boolean, nullable=False),
    Column("conversation", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("template", BigInteger, nullable=False),
    Column("origin", Text, nullable=False),
    Column("at", Float, nullable=False),
    Index("fingerprints_by_exact", "exact"),
    Index("fingerprints_by_scope", "scope", "kept"),
    Index("fingerprints_by_like", "like", "origin", "at"),
)
"""The fingerprints of questions. Only questions of one `scope` are compared: the same split, the same conversation
before, the same numbers. `like` is the first task that it nearly repeats, else itself; `kept` whether it went on to
the judge; `text` is the key of its embedding. `conversation`, `user` and `template` have shares in a round; `origin`
is the user, else the source, `at` when it was asked, in seconds since 1970."""

fingerprint_bands = Table(
    "fingerprint_bands",
    metadata,
    Column("band", BigInteger, primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)
"""The bands by which nearly equal questions are found."""

embeddings = Table(
    "embeddings",
    metadata,
    Column("model", Text, primary_key=True),
    Column("text", Text, primary_key=True),
    Column("vector", LargeBinary, nullable=False),
)
"""One float32 vector of length 1 per text and model, of the same dimension for a model (a model's are replaced
when it changes); `text` is a hash. A vector is empty if the endpoint returned none."""

duplicates = Table(
    "duplicates",
    metadata,
    Column("task_id", ForeignKey("tasks.id"), primary_key=True),
    Column("original_id", ForeignKey("tasks.id"), nullable=False, index=True),
    Column("similarity", Float, nullable=False),
    Column("method", Text, nullable=False),
    Column("created_at", Text, nullable=False),
)
"""Which task each rejected duplicate repeats."""

calibrations = Table(
    "calibrations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("rubric_id", Text, nullable=False),
    Column("rubric_hash", Text, nullable=False),
    Column("judge_hash", Text, nullable=False),
    Column("judge_model", Text, nullable=False),
    Column("n", Integer, nullable=False),
    Column("undecided", Integer, nullable=False),
    Column("agreement", Float),
    Column("kappa", Float),
    Column("kappa_low", Float),
    Column("kappa_high", Float),
    Column("created_at", Text, nullable=False),
    Index("calibrations_by_rubric", "rubric_hash", "judge_hash"),
)
"""How far a rubric by a judge agreed with people. `kappa` is NULL if it is not defined: all labels or all
verdicts are the same."""

rounds = Table(
    "rounds",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),
    Column("live", Integer, unique=True),
    Column("target", Text, nullable=False, server_default=text("''")),
    Column("trigger", Text, nullable=False),
    Column("attempt", Integer, nullable=False, default=1),
    Column("parent", Text),
    Column("config_hash", Text, nullable=False),
    Column("rubric_hash", Text, nullable=False),
    Column("seed", Integer, nullable=False),
    Column("dir", Text, nullable=False),
    Column("pid", Integer),
    Column("usage_read", Integer, nullable=False, server_default="0"),
    Column("selection", JSON(none_as_null=True)),
    Column("result", JSON),
    Column("reason", Text, nullable=False, default=""),
    Column("created_at", Text, nullable=False),
    Column("finished_at", Text),
)
"""Training rounds. `live` is 1 while the round is unfinished and NULL afterwards: its uniqueness allows one live
round. `target` is the target that it trains, empty without `targets`. `selection` says how its samples were chosen,
see `flywheel.records.round.RoundSelection`; NULL if it has none. `usage_read` is how many bytes of its
`usage.jsonl` are counted in `judge_days`."""

round_samples = Table(
    "round_samples",
    metadata,
    Column("round_id", ForeignKey("rounds.id"), primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), primary_key=True, index=True),
    Column("split", Text, nullable=False),
    Column("replayed", Boolean, nullable=False, server_default=text("0")),
    Column("left_out", Boolean, nullable=False, server_default=text("0")),
    Column("without_gradient", Boolean, nullable=False, server_default=text("0")),
)
"""The tasks of each round, with the split in which the round uses them, and whether it replays them
(`training.replay`). By its result, it was not trained on those that are `left_out`, and those `without_gradient` have
changed no weight, see `flywheel.records.round.RoundResult`."""

gate_tests = Table(
    "gate_tests",
    metadata,
    Column("round_id", ForeignKey("rounds.id"), primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("alpha", Float, nullable=False),
    Column("conversations", Integer),
    Column("spread", Float),
    Column("samples", Integer),
    Column("decided_at", Text),
    Column("decision", JSON(none_as_null=True)),
)
"""Which test of the gate each round is, see `flywheel.training.gate.gate`. `conversations` is how many it
has used, NULL until its rewards were seen: the test is not spent. `decision` is what the gate decided about the
comparison, see `flywheel.records.round.GateDecision`: it is repeated, with the settings of then, if the round could
not be ended."""

gate_conversations = Table(
    "gate_conversations",
    metadata,
    Column("conversation", Text, primary_key=True),
    Column("round_id", ForeignKey("gate_tests.round_id"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)
"""Which held-out conversations each test that was spent has used."""

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("round_id", ForeignKey("rounds.id"), nullable=False),
    Column("parent", Text),
    Column("base_model", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("probe", JSON),
    Column("created_at", Text, nullable=False),
)
"""What each round trained. `sha256` is that of the whole directory; `probe` proves on a server which weights it
serves."""

deployments = Table(
    "deployments",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("alias", Text, nullable=False),
    Column("active_alias", Text, unique=True),
    Column("endpoints", JSON, nullable=False),
    Column("adapter", Text),
    Column("previous", Text),
    Column("ab_test", JSON(none_as_null=True)),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("report", JSON),
    Column("error", Text, nullable=False, default=""),
    Column("created_at", Text, nullable=False),
    Column("activated_at", Text),
    Column("retired_at", Text),
)
"""What each alias was pointed at, and when. `report` says how the swap went on each server. `active_alias` is the
alias while the deployment is active and NULL otherwise: at most one is. A NULL adapter is the base model. `ab_test`
is `{"other", "share", "salt"}` during an A/B test: `share` of the units go to the adapter, the others to the adapter
`other` (null: the base model); it becomes NULL when the test ends and the adapter stays."""

watches = Table(
    "watches",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("deployment_id", ForeignKey("deployments.id"), nullable=False, unique=True),
    Column("alias", Text, nullable=False),
    Column("adapter", Text),
    Column("other", Text),
    Column("share", Float, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Column("read_to", Integer, nullable=False, server_default=text("0")),
    Column("figures", JSON),
    Column("ends_as", Text),
    Column("created_at", Text, nullable=False),
    Column("ended_at", Text),
)
"""The watch of each promotion. `share` of the units get `adapter`, the others `other`; NULL is the base model.
`read_to` is the number of the last call that was read of the copy of the call logs; `figures` are the last ones, and
`ends_as` is the state that they lead to, set before the deployment is changed."""

watch_units = Table(
    "watch_units",
    metadata,
    Column("watch_id", ForeignKey("watches.id"), primary_key=True),
    Column("unit", Text, primary_key=True),
    Column("arm", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("ended_ns", BigInteger, nullable=False),
    Column("entered_ns", BigInteger, nullable=False),
    Column("calls", Integer, nullable=False),
    Column("place", Integer),
    Column("outcome", Text),
    Column("why", Text, nullable=False, server_default=text("''")),
    Column("delay_seconds", Float),
    Index("watch_units_in_order", "watch_id", "place"),
    sqlite_with_rowid=False,
)
"""The units (conversations) of the running watches, with the first call of each. `arm` is empty for one that is not
tested, `version` answered the first call, and `entered_ns` is when that was read. `place` is the order in which
outcomes became known, `delay_seconds` how long after the call's end."""
