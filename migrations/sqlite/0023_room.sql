-- What room is reserved for, so that a group that has begun can always be completed.

-- The group of an admission and its size; null if the request named no group.
ALTER TABLE admission ADD COLUMN group_key BLOB;
ALTER TABLE admission ADD COLUMN group_size INTEGER;
ALTER TABLE admission ADD COLUMN environment TEXT;
-- When the room was reserved; null for the room of a session, which is known to live until it ends.
ALTER TABLE admission ADD COLUMN granted_us INTEGER;

CREATE INDEX admission_by_group ON admission (policy_pk, group_key);

-- Requests for room that were refused lately, as JSON.
ALTER TABLE policy ADD COLUMN refused TEXT NOT NULL DEFAULT '[]';
