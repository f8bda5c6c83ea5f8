-- Scores that come after their rollout.

-- Rollouts that have a place in an open group and lack a score that the rules require. Their verdict, `kept`, is not
-- final. A row goes with the decision about its rollout, or with that about its group.
CREATE TABLE scoring (
    rollout_pk INTEGER PRIMARY KEY REFERENCES rollout (rollout_pk),
    group_pk INTEGER NOT NULL REFERENCES rollout_group (group_pk),
    policy_pk INTEGER NOT NULL,
    -- JSON: the names of the scores that it lacks.
    missing TEXT NOT NULL,
    -- JSON: what the filters of its group will read and its row does not have; null if that is nothing.
    beside TEXT,
    since_us INTEGER NOT NULL,
    -- When it is dropped.
    due_us INTEGER NOT NULL
) STRICT;

CREATE INDEX scoring_by_group ON scoring (group_pk, rollout_pk);
CREATE INDEX scoring_by_due ON scoring (due_us, rollout_pk);
CREATE INDEX scoring_by_policy ON scoring (policy_pk, since_us);

-- The number of these rollouts of a group.
ALTER TABLE rollout_group ADD COLUMN scoring INTEGER NOT NULL DEFAULT 0;

-- Scores by others than the producer. Of the producer's, the reward where the rules of the group use scores, because the
-- row of the rollout has what these rules make of it, and the components that others gave as well.
CREATE TABLE score (
    rollout_pk INTEGER NOT NULL REFERENCES rollout (rollout_pk),
    name TEXT NOT NULL,
    -- Empty for the producer.
    scorer TEXT NOT NULL,
    -- 1 if the decision about the rollout counts it. A scorer that changes its mind afterwards has a second row.
    applied INTEGER NOT NULL,
    value REAL NOT NULL,
    rationale TEXT,
    given_us INTEGER NOT NULL,
    PRIMARY KEY (rollout_pk, name, scorer, applied)
) STRICT, WITHOUT ROWID;

-- The role `score`. SQLite cannot change a constraint, so the table is built again.
CREATE TABLE access_key_new (
    key_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    key_id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('produce', 'score', 'train', 'read', 'admin')),
    -- Globs of policy names, separated by commas.
    policies TEXT NOT NULL,
    hash BLOB NOT NULL,
    created_us INTEGER NOT NULL,
    expires_us INTEGER,
    last_used_us INTEGER,
    revoked_us INTEGER
) STRICT;

INSERT INTO access_key_new (
    key_pk, key_id, name, role, policies, hash, created_us, expires_us, last_used_us, revoked_us
)
SELECT key_pk, key_id, name, role, policies, hash, created_us, expires_us, last_used_us, revoked_us
FROM access_key;

DROP TABLE access_key;
ALTER TABLE access_key_new RENAME TO access_key;

CREATE INDEX access_key_live ON access_key (key_pk) WHERE revoked_us IS NULL;
