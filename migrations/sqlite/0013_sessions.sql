-- Sessions: the calls of an agent to an inference engine, recorded until its rollout is finished.
-- Times are microseconds since the Unix epoch.

CREATE TABLE session (
    session_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id BLOB NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'finishing', 'finished', 'aborted', 'expired')),
    reason TEXT,
    -- JSON: what the session was opened with.
    spec TEXT NOT NULL,
    content_digest BLOB NOT NULL,
    max_calls INTEGER NOT NULL,
    idle_s INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    -- Stored bytes of the calls, and what the segments of the session will have at most.
    bytes INTEGER NOT NULL,
    segments INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    -- Whether a call was refused because a bound of the session was reached.
    is_full INTEGER NOT NULL,
    opened_us INTEGER NOT NULL,
    last_call_us INTEGER,
    expires_us INTEGER NOT NULL,
    -- When the sweep ends it; null once it has ended.
    due_us INTEGER,
    ended_us INTEGER,
    end_digest BLOB,
    -- JSON: the answer to the call that ended it.
    outcome TEXT,
    -- When its calls and keys are deleted, and when this row is.
    purge_us INTEGER,
    forget_us INTEGER,
    CHECK ((state IN ('open', 'finishing')) = (due_us IS NOT NULL)),
    CHECK ((state IN ('open', 'finishing')) = (ended_us IS NULL))
) STRICT;

CREATE INDEX session_due ON session (due_us) WHERE due_us IS NOT NULL;
CREATE INDEX session_purge ON session (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX session_forget ON session (forget_us) WHERE forget_us IS NOT NULL;

-- The policies whose rollouts a session records.
CREATE TABLE session_policy (
    session_pk INTEGER NOT NULL REFERENCES session (session_pk),
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    run INTEGER NOT NULL,
    rollout_key BLOB NOT NULL,
    group_key BLOB NOT NULL,
    group_size INTEGER NOT NULL,
    admission_id BLOB NOT NULL,
    version INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    -- Ids that were sampled in its calls.
    sampled INTEGER NOT NULL,
    is_live INTEGER NOT NULL,
    PRIMARY KEY (session_pk, policy_pk)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX session_policy_rollout ON session_policy (policy_pk, run, rollout_key);
CREATE INDEX session_policy_group ON session_policy (policy_pk, run, group_key) WHERE is_live = 1;
CREATE INDEX session_policy_by_policy ON session_policy (policy_pk, session_pk);

-- A secret is never here, only its hash.
CREATE TABLE session_key (
    hash BLOB PRIMARY KEY,
    session_pk INTEGER NOT NULL REFERENCES session (session_pk)
) STRICT, WITHOUT ROWID;

CREATE INDEX session_key_by_session ON session_key (session_pk);

-- A prompt is the first `shared` ids of the prompt and ids of the call `parent`, and the tail in `body`.
CREATE TABLE session_call (
    call_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    session_pk INTEGER NOT NULL REFERENCES session (session_pk),
    seq INTEGER NOT NULL,
    policy_pk INTEGER NOT NULL,
    parent INTEGER,
    shared INTEGER NOT NULL,
    prompt INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    agent TEXT,
    dialect TEXT NOT NULL,
    model TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    stopped_on_token INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    ended_us INTEGER NOT NULL,
    body_digest BLOB NOT NULL,
    digest BLOB NOT NULL,
    -- Packed ids, log-probabilities and versions.
    body BLOB NOT NULL,
    -- Compressed JSON.
    request BLOB,
    response BLOB NOT NULL,
    UNIQUE (session_pk, seq)
) STRICT;

CREATE INDEX session_call_by_digest ON session_call (session_pk, body_digest, seq);
