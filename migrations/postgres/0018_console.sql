-- What the live page shows: what happened over time, the steps of trainers, and who waits.
-- Times are microseconds since the Unix epoch; minutes are counted from there as well.

-- Null in rows of earlier versions. `status` is the number that the digest of a rollout's content has.
ALTER TABLE rollout ADD COLUMN status BIGINT;
ALTER TABLE rollout ADD COLUMN response_tokens BIGINT;
ALTER TABLE rollout ADD COLUMN max_segment_tokens BIGINT;

-- Of the rewards that count in the baseline. They are equal if the group has nothing to learn from.
ALTER TABLE rollout_group ADD COLUMN reward_min DOUBLE PRECISION;
ALTER TABLE rollout_group ADD COLUMN reward_max DOUBLE PRECISION;

-- When the last lease began, and how long its consumer had asked for a batch before.
ALTER TABLE batch ADD COLUMN granted_us BIGINT;
ALTER TABLE batch ADD COLUMN waited_us BIGINT;

-- The totals of all tallies of a policy at the beginning of a minute, if any of them had changed. They are totals and not
-- differences, so that rows can be deleted and all sums stay right.
CREATE TABLE history (
    history_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    minute BIGINT NOT NULL,
    -- The changes since the row before were made in this minute or later.
    since BIGINT NOT NULL,
    at_us BIGINT NOT NULL,
    -- The minute in which the row is deleted. The newest row of a policy stays.
    keep_until BIGINT NOT NULL,
    -- JSON, by the names of the tallies: the value, or the value and the amount.
    body TEXT NOT NULL,
    UNIQUE (policy_pk, minute)
);

CREATE INDEX history_keep ON history (keep_until);

-- The last minute for which a replica wrote rows.
CREATE TABLE history_mark (
    only_row BIGINT PRIMARY KEY CHECK (only_row = 1),
    minute BIGINT NOT NULL
);

INSERT INTO history_mark (only_row, minute) VALUES (1, 0);

-- What policies have counted so far did not happen after this upgrade.
INSERT INTO history (policy_pk, minute, since, at_us, keep_until, body)
SELECT policy_pk, 0, 0, 0, 9223372036854775807, CAST(json_object_agg(name, json_build_array(value, amount)) AS TEXT)
FROM (
    SELECT policy_pk, name, CAST(SUM(value) AS BIGINT) AS value, SUM(amount) AS amount
    FROM tally_now
    GROUP BY policy_pk, name
) AS totals
GROUP BY policy_pk;

-- What the batches of a step had in all, written by their acks.
CREATE TABLE step_log (
    policy_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    step BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    -- Of the last batch.
    acked_us BIGINT NOT NULL,
    batches BIGINT NOT NULL,
    groups BIGINT NOT NULL,
    -- Groups of several rewards that are all equal.
    flat_groups BIGINT NOT NULL,
    rollouts BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    trained_tokens BIGINT NOT NULL,
    reward_sum DOUBLE PRECISION NOT NULL,
    reward_count BIGINT NOT NULL,
    -- Mean of the rewards that arrived before the cut, weighted by the rollouts of the batches.
    all_mean DOUBLE PRECISION,
    stale_sum BIGINT NOT NULL,
    stale_max BIGINT NOT NULL,
    waited_us BIGINT NOT NULL,
    held_us BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    version BIGINT NOT NULL,
    -- 1 if a resume went back before this step.
    undone BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, run, step, epoch)
);

-- What operators and time did to a policy.
CREATE TABLE journal (
    journal_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    at_us BIGINT NOT NULL,
    kind TEXT NOT NULL,
    key_id TEXT,
    -- JSON.
    body TEXT NOT NULL
);

CREATE INDEX journal_by_policy ON journal (policy_pk, journal_pk);

-- Consumers that wait for a batch, at whichever replica.
CREATE TABLE asker (
    policy_pk BIGINT NOT NULL,
    consumer TEXT COLLATE "C" NOT NULL,
    since_us BIGINT NOT NULL,
    asked_us BIGINT NOT NULL,
    -- From then on it does not wait any more, unless it has asked again.
    until_us BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, consumer)
);

CREATE INDEX asker_by_policy ON asker (policy_pk, until_us);
