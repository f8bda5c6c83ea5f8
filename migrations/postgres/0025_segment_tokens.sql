-- The tokens of each segment of a rollout, for shards: JSON, numbers in the order of the segments. Null if the rollout
-- has at most one segment, whose tokens are all of its tokens, and in rows of earlier versions.
ALTER TABLE rollout ADD COLUMN segment_tokens TEXT;
