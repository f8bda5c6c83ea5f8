-- Attempts of sessions: an agent that died is started again, and goes on in the same session.

-- Sessions whose agent makes no calls, and which can be resumed, are parked.
ALTER TABLE session DROP CONSTRAINT session_state_check;
ALTER TABLE session DROP CONSTRAINT session_check;
ALTER TABLE session DROP CONSTRAINT session_check1;
ALTER TABLE session ADD CONSTRAINT session_state_check
CHECK (state IN ('open', 'parked', 'finishing', 'finished', 'aborted', 'expired'));
ALTER TABLE session ADD CONSTRAINT session_check
CHECK ((state IN ('open', 'parked', 'finishing')) = (due_us IS NOT NULL));
ALTER TABLE session ADD CONSTRAINT session_check1
CHECK ((state IN ('open', 'parked', 'finishing')) = (ended_us IS NULL));

-- The attempt that is under way, from 1, and the most attempts.
ALTER TABLE session ADD COLUMN attempt BIGINT NOT NULL DEFAULT 1;
ALTER TABLE session ADD COLUMN max_attempts BIGINT NOT NULL DEFAULT 5;

-- Parked sessions give up their room when it is needed, the oldest first.
ALTER TABLE session_policy ADD COLUMN is_parked BIGINT NOT NULL DEFAULT 0;
CREATE INDEX session_policy_parked ON session_policy (policy_pk, session_pk) WHERE is_parked = 1;

-- The attempt that a key belongs to. The keys of earlier ones permit nothing.
ALTER TABLE session_key ADD COLUMN attempt BIGINT NOT NULL DEFAULT 1;

-- The attempt that recorded a call, and the last one that used it: that recorded it, or that was answered with it.
ALTER TABLE session_call ADD COLUMN attempt BIGINT NOT NULL DEFAULT 1;
ALTER TABLE session_call ADD COLUMN used_in BIGINT NOT NULL DEFAULT 1;

-- What an agent or its sandbox has stored last to go on from. It goes with the calls.
CREATE TABLE session_saved (
    session_pk BIGINT PRIMARY KEY REFERENCES session (session_pk),
    -- The last call before it, 0 before the first one.
    seq BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    content BYTEA NOT NULL,
    stored_us BIGINT NOT NULL
);
