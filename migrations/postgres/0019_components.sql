-- The reward components of a rollout, for the metrics of batches: JSON, numbers by their names. Null in rows without
-- components and in rows of earlier versions.
ALTER TABLE rollout ADD COLUMN components TEXT;
