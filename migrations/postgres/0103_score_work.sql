-- Work for scorers. No foreign keys, as in `scoring`.

-- What scorers can lease: a score of a rollout, or of all rollouts of a group. A row goes when no rollout of it lacks the
-- score any more.
CREATE TABLE score_work (
    work_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    group_pk BIGINT NOT NULL,
    -- 0 for the whole group.
    rollout_pk BIGINT NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL CHECK (state IN ('open', 'leased', 'exhausted')),
    -- Since when, or from when on, it can be leased: its place in the line.
    since_us BIGINT NOT NULL,
    -- Leases that ended without the score.
    attempts BIGINT NOT NULL,
    attempts_max BIGINT NOT NULL,
    -- What the scorer said about the last of them; null if that expired.
    failure TEXT,
    lease TEXT COLLATE "C",
    scorer TEXT COLLATE "C",
    request_id TEXT COLLATE "C",
    expires_us BIGINT,
    -- The last rollout of the group when it was leased: what came later is for another lease.
    seen_pk BIGINT,
    UNIQUE (group_pk, name, rollout_pk)
);

CREATE INDEX score_work_in_line ON score_work (policy_pk, name, state, since_us, work_pk);
CREATE UNIQUE INDEX score_work_by_lease ON score_work (lease) WHERE lease IS NOT NULL;
CREATE INDEX score_work_by_request ON score_work (policy_pk, scorer, request_id) WHERE request_id IS NOT NULL;
CREATE INDEX score_work_by_expiry ON score_work (expires_us) WHERE expires_us IS NOT NULL;

-- When a scorer last asked for work, to within seconds.
CREATE TABLE score_asked (
    policy_pk BIGINT NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    asked_us BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, name)
);

-- Of scores that were given with a lease: the lease, by which a repeated post is recognised, and which attempt it was.
ALTER TABLE score ADD COLUMN lease TEXT COLLATE "C";
ALTER TABLE score ADD COLUMN attempt BIGINT;
