-- Where claims begin to read the line of ready groups. It matters on Postgres, where entries of groups that were claimed
-- stay in the index for a while; here it is kept alike. Nothing is under way beside the only writer, so ready_mark is 0.

-- No group of the current run that is ready has a place below it.
ALTER TABLE policy ADD COLUMN ready_from INTEGER NOT NULL DEFAULT 0;
-- What it becomes when all transactions below ready_mark have ended: one of them may have taken a place before it.
ALTER TABLE policy ADD COLUMN ready_next INTEGER NOT NULL DEFAULT 0;
ALTER TABLE policy ADD COLUMN ready_mark INTEGER NOT NULL DEFAULT 0;
-- When a claim last read the whole line: a replica of an earlier version may have put a group back below ready_from.
ALTER TABLE policy ADD COLUMN ready_looked_us INTEGER NOT NULL DEFAULT 0;
