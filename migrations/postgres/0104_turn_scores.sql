-- Rewards of turns that come after their rollout. No foreign key: a replica of an earlier version deletes rollouts
-- without these rows.

CREATE TABLE turn_score (
    rollout_pk BIGINT NOT NULL,
    -- Counted from 0 over all segments.
    turn BIGINT NOT NULL,
    scorer TEXT COLLATE "C" NOT NULL,
    -- 1 if the decision about the rollout counts it. A scorer that changes its mind afterwards has a second row.
    applied BIGINT NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    rationale TEXT,
    given_us BIGINT NOT NULL,
    PRIMARY KEY (rollout_pk, turn, scorer, applied)
);

-- JSON: the ids of the calls that the turns are, in groups whose rules compare turns and use scores; null in others.
ALTER TABLE rollout ADD COLUMN turn_calls TEXT;
