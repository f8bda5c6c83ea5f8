-- Sessions: the calls of an agent to an inference engine, recorded until its rollout is finished.
-- Times are microseconds since the Unix epoch.

CREATE TABLE session (
    session_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_id BYTEA NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'finishing', 'finished', 'aborted', 'expired')),
    reason TEXT,
    -- JSON: what the session was opened with.
    spec TEXT NOT NULL,
    content_digest BYTEA NOT NULL,
    max_calls BIGINT NOT NULL,
    idle_s BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    -- Stored bytes of the calls, and what the segments of the session will have at most.
    bytes BIGINT NOT NULL,
    segments BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    -- Whether a call was refused because a bound of the session was reached.
    is_full BIGINT NOT NULL,
    opened_us BIGINT NOT NULL,
    last_call_us BIGINT,
    expires_us BIGINT NOT NULL,
    -- When the sweep ends it; null once it has ended.
    due_us BIGINT,
    ended_us BIGINT,
    end_digest BYTEA,
    -- JSON: the answer to the call that ended it.
    outcome TEXT,
    -- When its calls and keys are deleted, and when this row is.
    purge_us BIGINT,
    forget_us BIGINT,
    CHECK ((state IN ('open', 'finishing')) = (due_us IS NOT NULL)),
    CHECK ((state IN ('open', 'finishing')) = (ended_us IS NULL))
);

CREATE INDEX session_due ON session (due_us) WHERE due_us IS NOT NULL;
CREATE INDEX session_purge ON session (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX session_forget ON session (forget_us) WHERE forget_us IS NOT NULL;

-- The policies whose rollouts a session records.
CREATE TABLE session_policy (
    session_pk BIGINT NOT NULL REFERENCES session (session_pk),
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    run BIGINT NOT NULL,
    rollout_key BYTEA NOT NULL,
    group_key BYTEA NOT NULL,
    group_size BIGINT NOT NULL,
    admission_id BYTEA NOT NULL,
    version BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    -- Ids that were sampled in its calls.
    sampled BIGINT NOT NULL,
    is_live BIGINT NOT NULL,
    PRIMARY KEY (session_pk, policy_pk)
);

CREATE UNIQUE INDEX session_policy_rollout ON session_policy (policy_pk, run, rollout_key);
CREATE INDEX session_policy_group ON session_policy (policy_pk, run, group_key) WHERE is_live = 1;
CREATE INDEX session_policy_by_policy ON session_policy (policy_pk, session_pk);

-- A secret is never here, only its hash.
CREATE TABLE session_key (
    hash BYTEA PRIMARY KEY,
    session_pk BIGINT NOT NULL REFERENCES session (session_pk)
);

CREATE INDEX session_key_by_session ON session_key (session_pk);

-- A prompt is the first `shared` ids of the prompt and ids of the call `parent`, and the tail in `body`.
CREATE TABLE session_call (
    call_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_pk BIGINT NOT NULL REFERENCES session (session_pk),
    seq BIGINT NOT NULL,
    policy_pk BIGINT NOT NULL,
    parent BIGINT,
    shared BIGINT NOT NULL,
    prompt BIGINT NOT NULL,
    sampled BIGINT NOT NULL,
    agent TEXT,
    dialect TEXT NOT NULL,
    model TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    stopped_on_token BIGINT NOT NULL,
    delivered BIGINT NOT NULL,
    retry_count BIGINT NOT NULL,
    started_us BIGINT NOT NULL,
    ended_us BIGINT NOT NULL,
    body_digest BYTEA NOT NULL,
    digest BYTEA NOT NULL,
    -- Packed ids, log-probabilities and versions.
    body BYTEA NOT NULL,
    -- Compressed JSON.
    request BYTEA,
    response BYTEA NOT NULL,
    UNIQUE (session_pk, seq)
);

CREATE INDEX session_call_by_digest ON session_call (session_pk, body_digest, seq);

-- What is in these columns is compressed before it comes here.
ALTER TABLE session_call ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE session_call ALTER COLUMN request SET STORAGE EXTERNAL;
ALTER TABLE session_call ALTER COLUMN response SET STORAGE EXTERNAL;

-- Every call changes these rows: leave room on the page, and clean up early.
ALTER TABLE session SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE session_policy SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
