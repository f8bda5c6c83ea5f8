-- The execution that a rollout belongs to, and an index that lists the rollouts of an execution, of whichever policies.
-- It is null in rows of earlier versions, which are not in the index.

ALTER TABLE rollout ADD COLUMN execution BYTEA;

CREATE INDEX rollout_by_execution ON rollout (execution, rollout_pk) WHERE execution IS NOT NULL;
