-- Slow rollouts are waited for, and parked sessions keep their room for a while.

-- Since when no batch is granted, for the sake of rollouts that are too old for the one after it, and the newest version of
-- these rollouts. Rollouts of given_up_version and of older ones were waited for in vain.
ALTER TABLE policy ADD COLUMN pause_version INTEGER;
ALTER TABLE policy ADD COLUMN pause_us INTEGER;
ALTER TABLE policy ADD COLUMN given_up_version INTEGER;

-- The order in which groups go into batches where rollouts are waited for.
CREATE INDEX rollout_group_oldest
ON rollout_group (policy_pk, run, COALESCE(version_min, 9223372036854775807), ready_seq)
WHERE state = 'ready';

-- The oldest version of the tokens that were sampled so far; null before the first one, and for sessions of before.
ALTER TABLE session_policy ADD COLUMN oldest_version INTEGER;

-- When the session was parked. Sessions give up their room when it is needed, the one that has been parked longest first.
ALTER TABLE session_policy ADD COLUMN parked_us INTEGER;
DROP INDEX session_policy_parked;
CREATE INDEX session_policy_parked ON session_policy (policy_pk, COALESCE(parked_us, 0), session_pk) WHERE is_parked = 1;
