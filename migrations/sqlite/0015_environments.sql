-- Shares of environments in batches.

-- The ready groups of each environment, in the order in which they became ready. Groups without a label come first.
CREATE INDEX rollout_group_ready_environment
ON rollout_group (policy_pk, run, COALESCE(environment, ''), ready_seq)
WHERE state = 'ready';

-- What environments carry from batch to batch, as JSON, with the run that it belongs to.
ALTER TABLE policy ADD COLUMN shares TEXT NOT NULL DEFAULT '{}';
