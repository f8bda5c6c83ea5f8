-- Evaluation: what suites say about versions. The rollouts that evaluate a policy belong to a row of `policy` of their own,
-- whose name ends with `@eval`.

CREATE TABLE suite (
    suite_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    name TEXT COLLATE "C" NOT NULL,
    -- Null if nobody has said how many there are.
    tasks BIGINT,
    repeats BIGINT NOT NULL,
    -- The reward from which a rollout passes.
    threshold DOUBLE PRECISION NOT NULL,
    UNIQUE (policy_pk, name)
);

-- What a rollout is a result of. A row goes with its rollout.
CREATE TABLE eval_rollout (
    rollout_pk BIGINT PRIMARY KEY,
    suite_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    version BIGINT NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    -- 1 if its tokens are of several versions.
    mixed BIGINT NOT NULL
);

CREATE INDEX eval_rollout_by_task ON eval_rollout (suite_pk, run, version, task, rollout_pk);

-- The versions at which a suite has results. Results stay when the rollouts are gone.
CREATE TABLE eval_version (
    suite_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    version BIGINT NOT NULL,
    -- Tasks with a result.
    tasks BIGINT NOT NULL,
    -- Rollouts that do not count, because their tokens are of several versions.
    mixed BIGINT NOT NULL,
    first_us BIGINT NOT NULL,
    last_us BIGINT NOT NULL,
    PRIMARY KEY (suite_pk, run, version)
);

CREATE TABLE eval_task (
    suite_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    version BIGINT NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    rollouts BIGINT NOT NULL,
    passed BIGINT NOT NULL,
    reward_sum DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (suite_pk, run, version, task)
);
