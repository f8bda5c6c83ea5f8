-- Evaluation: what suites say about versions. The rollouts that evaluate a policy belong to a row of `policy` of their own,
-- whose name ends with `@eval`.

CREATE TABLE suite (
    suite_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    name TEXT NOT NULL,
    -- Null if nobody has said how many there are.
    tasks INTEGER,
    repeats INTEGER NOT NULL,
    -- The reward from which a rollout passes.
    threshold REAL NOT NULL,
    UNIQUE (policy_pk, name)
) STRICT;

-- What a rollout is a result of. A row goes with its rollout.
CREATE TABLE eval_rollout (
    rollout_pk INTEGER PRIMARY KEY REFERENCES rollout (rollout_pk),
    suite_pk INTEGER NOT NULL REFERENCES suite (suite_pk),
    run INTEGER NOT NULL,
    version INTEGER NOT NULL,
    task TEXT NOT NULL,
    -- 1 if its tokens are of several versions.
    mixed INTEGER NOT NULL
) STRICT;

CREATE INDEX eval_rollout_by_task ON eval_rollout (suite_pk, run, version, task, rollout_pk);

-- The versions at which a suite has results. Results stay when the rollouts are gone.
CREATE TABLE eval_version (
    suite_pk INTEGER NOT NULL REFERENCES suite (suite_pk),
    run INTEGER NOT NULL,
    version INTEGER NOT NULL,
    -- Tasks with a result.
    tasks INTEGER NOT NULL,
    -- Rollouts that do not count, because their tokens are of several versions.
    mixed INTEGER NOT NULL,
    first_us INTEGER NOT NULL,
    last_us INTEGER NOT NULL,
    PRIMARY KEY (suite_pk, run, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE eval_task (
    suite_pk INTEGER NOT NULL REFERENCES suite (suite_pk),
    run INTEGER NOT NULL,
    version INTEGER NOT NULL,
    task TEXT NOT NULL,
    rollouts INTEGER NOT NULL,
    passed INTEGER NOT NULL,
    reward_sum REAL NOT NULL,
    PRIMARY KEY (suite_pk, run, version, task)
) STRICT, WITHOUT ROWID;
