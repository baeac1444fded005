CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE TABLE sources (
	id INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	schema TEXT NOT NULL, 
	identity TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	rowid_done INTEGER NOT NULL, 
	open_traces INTEGER NOT NULL, 
	longest_read_ms FLOAT NOT NULL, 
	error TEXT NOT NULL, 
	warning TEXT NOT NULL, 
	read_at TEXT, 
	PRIMARY KEY (id), 
	UNIQUE (path)
);
CREATE TABLE tasks (
	id INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	conversation_id TEXT NOT NULL, 
	agent TEXT NOT NULL, 
	adapter TEXT NOT NULL, 
	started_at TEXT NOT NULL, 
	split TEXT NOT NULL, 
	state TEXT NOT NULL, 
	payload JSON NOT NULL, 
	exported BOOLEAN NOT NULL, 
	retry_at TEXT, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE ("key")
);
CREATE INDEX tasks_by_state ON tasks (state, split);
CREATE INDEX tasks_to_export ON tasks (exported);
CREATE TABLE rounds (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	live INTEGER, 
	"trigger" TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	parent TEXT, 
	config_hash TEXT NOT NULL, 
	rubric_hash TEXT NOT NULL, 
	seed INTEGER NOT NULL, 
	dir TEXT NOT NULL, 
	pid INTEGER, 
	result JSON, 
	reason TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	finished_at TEXT, 
	PRIMARY KEY (id), 
	UNIQUE (name), 
	UNIQUE (live)
);
CREATE TABLE deployments (
	id INTEGER NOT NULL, 
	alias TEXT NOT NULL, 
	active_alias TEXT, 
	endpoints JSON NOT NULL, 
	adapter TEXT, 
	previous TEXT, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	report JSON, 
	error TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	activated_at TEXT, 
	retired_at TEXT, 
	PRIMARY KEY (id), 
	UNIQUE (active_alias)
);
CREATE TABLE events (
	id INTEGER NOT NULL, 
	at TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	old TEXT, 
	new TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX events_by_subject ON events (kind, subject);
CREATE TABLE replies (
	id INTEGER NOT NULL, 
	source_id INTEGER NOT NULL, 
	span_id TEXT NOT NULL, 
	trace_id TEXT NOT NULL, 
	conversation_id TEXT NOT NULL, 
	agent TEXT NOT NULL, 
	state TEXT NOT NULL, 
	skip_reason TEXT, 
	detail TEXT NOT NULL, 
	task_id INTEGER, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (source_id, span_id), 
	FOREIGN KEY(source_id) REFERENCES sources (id), 
	FOREIGN KEY(task_id) REFERENCES tasks (id)
);
CREATE INDEX ix_replies_task_id ON replies (task_id);
CREATE INDEX ix_replies_trace_id ON replies (trace_id);
CREATE TABLE verdicts (
	id INTEGER NOT NULL, 
	task_id INTEGER NOT NULL, 
	rubric_hash TEXT NOT NULL, 
	judge_hash TEXT NOT NULL, 
	outcome TEXT NOT NULL, 
	score FLOAT, 
	results JSON NOT NULL, 
	reason TEXT NOT NULL, 
	error TEXT NOT NULL, 
	calls INTEGER NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	completion_tokens INTEGER NOT NULL, 
	latency_seconds FLOAT NOT NULL, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (task_id, rubric_hash, judge_hash), 
	FOREIGN KEY(task_id) REFERENCES tasks (id)
);
CREATE TABLE round_samples (
	round_id INTEGER NOT NULL, 
	task_id INTEGER NOT NULL, 
	split TEXT NOT NULL, 
	PRIMARY KEY (round_id, task_id), 
	FOREIGN KEY(round_id) REFERENCES rounds (id), 
	FOREIGN KEY(task_id) REFERENCES tasks (id)
);
CREATE INDEX ix_round_samples_task_id ON round_samples (task_id);
CREATE TABLE adapters (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	round_id INTEGER NOT NULL, 
	parent TEXT, 
	base_model TEXT NOT NULL, 
	path TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	state TEXT NOT NULL, 
	comparison JSON, 
	probe JSON, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name), 
	FOREIGN KEY(round_id) REFERENCES rounds (id)
);
CREATE TABLE dead_letters (
	id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	source_id INTEGER, 
	subject TEXT NOT NULL, 
	error TEXT NOT NULL, 
	excerpt TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (kind, source_id, subject), 
	FOREIGN KEY(source_id) REFERENCES sources (id)
);
INSERT INTO meta VALUES ('schema_version', '1');
