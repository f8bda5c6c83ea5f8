-- Attempts of sessions: an agent that died is started again, and goes on in the same session.

-- Sessions whose agent makes no calls, and which can be resumed, are parked. SQLite cannot change a constraint, so the
-- table is built again. Other tables refer to its rows, which are back when the transaction commits.
PRAGMA defer_foreign_keys = 1;
CREATE TABLE session_kept AS SELECT * FROM session;
CREATE TABLE session_last AS SELECT seq FROM sqlite_sequence WHERE name = 'session';
DROP TABLE session;

CREATE TABLE session (
    session_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id BLOB NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'parked', 'finishing', 'finished', 'aborted', 'expired')),
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
    -- What happened to the calls, also to those that were refused: the sum of numbers for each kind.
    notes INTEGER NOT NULL DEFAULT 0,
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
    -- The attempt that is under way, from 1, and the most attempts.
    attempt INTEGER NOT NULL DEFAULT 1,
    max_attempts INTEGER NOT NULL DEFAULT 5,
    CHECK ((state IN ('open', 'parked', 'finishing')) = (due_us IS NOT NULL)),
    CHECK ((state IN ('open', 'parked', 'finishing')) = (ended_us IS NULL))
) STRICT;

INSERT INTO session (
    session_pk, session_id, state, reason, spec, content_digest, max_calls, idle_s, calls, bytes, segments, tokens,
    is_full, notes, opened_us, last_call_us, expires_us, due_us, ended_us, end_digest, outcome, purge_us, forget_us
)
SELECT
    session_pk, session_id, state, reason, spec, content_digest, max_calls, idle_s, calls, bytes, segments, tokens,
    is_full, notes, opened_us, last_call_us, expires_us, due_us, ended_us, end_digest, outcome, purge_us, forget_us
FROM session_kept;

-- No number is given twice, because pages of lists go on from numbers.
DELETE FROM sqlite_sequence WHERE name = 'session';
INSERT INTO sqlite_sequence (name, seq) SELECT 'session', seq FROM session_last;
DROP TABLE session_kept;
DROP TABLE session_last;

CREATE INDEX session_due ON session (due_us) WHERE due_us IS NOT NULL;
CREATE INDEX session_purge ON session (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX session_forget ON session (forget_us) WHERE forget_us IS NOT NULL;

-- Parked sessions give up their room when it is needed, the oldest first.
ALTER TABLE session_policy ADD COLUMN is_parked INTEGER NOT NULL DEFAULT 0;
CREATE INDEX session_policy_parked ON session_policy (policy_pk, session_pk) WHERE is_parked = 1;

-- The attempt that a key belongs to. The keys of earlier ones permit nothing.
ALTER TABLE session_key ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;

-- The attempt that recorded a call, and the last one that used it: that recorded it, or that was answered with it.
ALTER TABLE session_call ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;
ALTER TABLE session_call ADD COLUMN used_in INTEGER NOT NULL DEFAULT 1;

-- What an agent or its sandbox has stored last to go on from. It goes with the calls.
CREATE TABLE session_saved (
    session_pk INTEGER PRIMARY KEY REFERENCES session (session_pk),
    -- The last call before it, 0 before the first one.
    seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    content BLOB NOT NULL,
    stored_us INTEGER NOT NULL
) STRICT;
