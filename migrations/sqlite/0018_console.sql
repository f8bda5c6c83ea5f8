-- What the live page shows: what happened over time, the steps of trainers, and who waits.
-- Times are microseconds since the Unix epoch; minutes are counted from there as well.

-- Null in rows of earlier versions. `status` is the number that the digest of a rollout's content has.
ALTER TABLE rollout ADD COLUMN status INTEGER;
ALTER TABLE rollout ADD COLUMN response_tokens INTEGER;
ALTER TABLE rollout ADD COLUMN max_segment_tokens INTEGER;

-- Of the rewards that count in the baseline. They are equal if the group has nothing to learn from.
ALTER TABLE rollout_group ADD COLUMN reward_min REAL;
ALTER TABLE rollout_group ADD COLUMN reward_max REAL;

-- When the last lease began, and how long its consumer had asked for a batch before.
ALTER TABLE batch ADD COLUMN granted_us INTEGER;
ALTER TABLE batch ADD COLUMN waited_us INTEGER;

-- The totals of all tallies of a policy at the beginning of a minute, if any of them had changed. They are totals and not
-- differences, so that rows can be deleted and all sums stay right. An ordinary table: WITHOUT ROWID, rows of a
-- kilobyte would take an overflow page each.
CREATE TABLE history (
    history_pk INTEGER PRIMARY KEY,
    policy_pk INTEGER NOT NULL,
    minute INTEGER NOT NULL,
    -- The changes since the row before were made in this minute or later.
    since INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    -- The minute in which the row is deleted. The newest row of a policy stays.
    keep_until INTEGER NOT NULL,
    -- JSON, by the names of the tallies: the value, or the value and the amount.
    body TEXT NOT NULL,
    UNIQUE (policy_pk, minute)
) STRICT;

CREATE INDEX history_keep ON history (keep_until);

-- The last minute for which a replica wrote rows.
CREATE TABLE history_mark (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    minute INTEGER NOT NULL
) STRICT;

INSERT INTO history_mark (only_row, minute) VALUES (1, 0);

-- What policies have counted so far did not happen after this upgrade.
INSERT INTO history (policy_pk, minute, since, at_us, keep_until, body)
SELECT policy_pk, 0, 0, 0, 9223372036854775807, json_group_object(name, json_array(value, amount))
FROM (
    SELECT policy_pk, name, SUM(value) AS value, SUM(amount) AS amount
    FROM tally_now
    GROUP BY policy_pk, name
)
GROUP BY policy_pk;

-- What the batches of a step had in all, written by their acks.
CREATE TABLE step_log (
    policy_pk INTEGER NOT NULL,
    run INTEGER NOT NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    -- Of the last batch.
    acked_us INTEGER NOT NULL,
    batches INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    -- Groups of several rewards that are all equal.
    flat_groups INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    reward_sum REAL NOT NULL,
    reward_count INTEGER NOT NULL,
    -- Mean of the rewards that arrived before the cut, weighted by the rollouts of the batches.
    all_mean REAL,
    stale_sum INTEGER NOT NULL,
    stale_max INTEGER NOT NULL,
    waited_us INTEGER NOT NULL,
    held_us INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    version INTEGER NOT NULL,
    -- 1 if a resume went back before this step.
    undone INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, run, step, epoch)
) STRICT, WITHOUT ROWID;

-- What operators and time did to a policy. AUTOINCREMENT: a cursor never meets a reused key.
CREATE TABLE journal (
    journal_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    kind TEXT NOT NULL,
    key_id TEXT,
    -- JSON.
    body TEXT NOT NULL
) STRICT;

CREATE INDEX journal_by_policy ON journal (policy_pk, journal_pk);

-- Consumers that wait for a batch, at whichever replica.
CREATE TABLE asker (
    policy_pk INTEGER NOT NULL,
    consumer TEXT NOT NULL,
    since_us INTEGER NOT NULL,
    asked_us INTEGER NOT NULL,
    -- From then on it does not wait any more, unless it has asked again.
    until_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, consumer)
) STRICT, WITHOUT ROWID;

CREATE INDEX asker_by_policy ON asker (policy_pk, until_us);
