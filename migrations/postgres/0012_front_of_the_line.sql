-- Where claims begin to read the line of ready groups: entries of groups that were claimed stay in its index, and would be
-- read again, for as long as a long transaction such as that of pg_dump might still see them.

-- No group of the current run that is ready has a place below it.
ALTER TABLE policy ADD COLUMN ready_from BIGINT NOT NULL DEFAULT 0;
-- What it becomes when all transactions below ready_mark have ended: one of them may have taken a place before it.
ALTER TABLE policy ADD COLUMN ready_next BIGINT NOT NULL DEFAULT 0;
ALTER TABLE policy ADD COLUMN ready_mark BIGINT NOT NULL DEFAULT 0;
-- When a claim last read the whole line: a replica of an earlier version may have put a group back below ready_from.
ALTER TABLE policy ADD COLUMN ready_looked_us BIGINT NOT NULL DEFAULT 0;
