-- Checksums of what rows say about a rollout and its group, so that damage outside of payloads is found as well.
-- Null in rows of before.

ALTER TABLE rollout ADD COLUMN seal BYTEA;
ALTER TABLE rollout_group ADD COLUMN seal BYTEA;
