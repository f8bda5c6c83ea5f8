-- Slow rollouts are waited for, and parked sessions keep their room for a while.

-- Since when no batch is granted at a version, for the sake of rollouts that the next version would make too old.
ALTER TABLE policy ADD COLUMN pause_version BIGINT;
ALTER TABLE policy ADD COLUMN pause_us BIGINT;

-- The oldest version of the tokens that were sampled so far, and no newer one than that of the opening; null for
-- sessions of before.
ALTER TABLE session_policy ADD COLUMN oldest_version BIGINT;

-- When the session was parked. Sessions give up their room when it is needed, the one that has been parked longest first.
ALTER TABLE session_policy ADD COLUMN parked_us BIGINT;
DROP INDEX session_policy_parked;
CREATE INDEX session_policy_parked ON session_policy (policy_pk, COALESCE(parked_us, 0), session_pk) WHERE is_parked = 1;
