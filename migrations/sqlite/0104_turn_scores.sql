-- Rewards of turns that come after their rollout.

CREATE TABLE turn_score (
    rollout_pk INTEGER NOT NULL REFERENCES rollout (rollout_pk),
    -- Counted from 0 over all segments.
    turn INTEGER NOT NULL,
    scorer TEXT NOT NULL,
    -- 1 if the decision about the rollout counts it. A scorer that changes its mind afterwards has a second row.
    applied INTEGER NOT NULL,
    value REAL NOT NULL,
    rationale TEXT,
    given_us INTEGER NOT NULL,
    PRIMARY KEY (rollout_pk, turn, scorer, applied)
) STRICT, WITHOUT ROWID;

-- JSON: the ids of the calls that the turns are, in groups whose rules compare turns and use scores; null in others.
ALTER TABLE rollout ADD COLUMN turn_calls TEXT;
