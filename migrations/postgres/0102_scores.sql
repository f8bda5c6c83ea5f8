-- Scores that come after their rollout. No foreign keys: a replica of an earlier version deletes rollouts without them.

-- Rollouts that have a place in an open group and lack a score that the rules require. Their verdict, `kept`, is not
-- final. A row goes with the decision about its rollout, or with that about its group.
CREATE TABLE scoring (
    rollout_pk BIGINT PRIMARY KEY,
    group_pk BIGINT NOT NULL,
    policy_pk BIGINT NOT NULL,
    -- JSON: the names of the scores that it lacks.
    missing TEXT NOT NULL,
    -- JSON: what the filters of its group will read and its row does not have; null if that is nothing.
    beside TEXT,
    since_us BIGINT NOT NULL,
    -- When it is dropped.
    due_us BIGINT NOT NULL
);

CREATE INDEX scoring_by_group ON scoring (group_pk, rollout_pk);
CREATE INDEX scoring_by_due ON scoring (due_us, rollout_pk);
CREATE INDEX scoring_by_policy ON scoring (policy_pk, since_us);

-- The number of these rollouts of a group.
ALTER TABLE rollout_group ADD COLUMN scoring BIGINT NOT NULL DEFAULT 0;

-- Scores by others than the producer. Of the producer's, the reward where the rules of the group use scores, because the
-- row of the rollout has what these rules make of it, and the components that others gave as well.
CREATE TABLE score (
    rollout_pk BIGINT NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    -- Empty for the producer.
    scorer TEXT COLLATE "C" NOT NULL,
    -- 1 if the decision about the rollout counts it. A scorer that changes its mind afterwards has a second row.
    applied BIGINT NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    rationale TEXT,
    given_us BIGINT NOT NULL,
    PRIMARY KEY (rollout_pk, name, scorer, applied)
);

-- The role `score`.
ALTER TABLE access_key DROP CONSTRAINT access_key_role_check;
ALTER TABLE access_key ADD CONSTRAINT access_key_role_check
CHECK (role IN ('produce', 'score', 'train', 'read', 'admin'));
