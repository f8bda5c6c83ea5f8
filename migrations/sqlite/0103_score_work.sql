-- Work for scorers.

-- What scorers can lease: a score of a rollout, or of all rollouts of a group. A row goes when no rollout of it lacks the
-- score any more.
CREATE TABLE score_work (
    work_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL,
    group_pk INTEGER NOT NULL REFERENCES rollout_group (group_pk),
    -- 0 for the whole group.
    rollout_pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'leased', 'exhausted')),
    -- Since when, or from when on, it can be leased: its place in the line.
    since_us INTEGER NOT NULL,
    -- Leases that ended without the score.
    attempts INTEGER NOT NULL,
    attempts_max INTEGER NOT NULL,
    -- What the scorer said about the last of them; null if that expired.
    failure TEXT,
    lease TEXT,
    scorer TEXT,
    request_id TEXT,
    expires_us INTEGER,
    -- The last rollout of the group when it was leased: what came later is for another lease.
    seen_pk INTEGER,
    UNIQUE (group_pk, name, rollout_pk)
) STRICT;

CREATE INDEX score_work_in_line ON score_work (policy_pk, name, state, since_us, work_pk);
CREATE UNIQUE INDEX score_work_by_lease ON score_work (lease) WHERE lease IS NOT NULL;
CREATE INDEX score_work_by_request ON score_work (policy_pk, scorer, request_id) WHERE request_id IS NOT NULL;
CREATE INDEX score_work_by_expiry ON score_work (expires_us) WHERE expires_us IS NOT NULL;

-- When a scorer last asked for work, to within seconds.
CREATE TABLE score_asked (
    policy_pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    asked_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, name)
) STRICT, WITHOUT ROWID;

-- Of scores that were given with a lease: the lease, by which a repeated post is recognised, and which attempt it was.
ALTER TABLE score ADD COLUMN lease TEXT;
ALTER TABLE score ADD COLUMN attempt INTEGER;
