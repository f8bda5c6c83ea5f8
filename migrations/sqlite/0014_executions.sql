-- The execution that a rollout belongs to, and an index that lists the rollouts of an execution, of whichever policies.
-- It is null in rows of earlier versions, which are not in the index.

ALTER TABLE rollout ADD COLUMN execution BLOB;

-- Entries of one execution are in the order of their rows.
CREATE INDEX rollout_by_execution ON rollout (execution) WHERE execution IS NOT NULL;
