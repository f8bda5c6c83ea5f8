-- Who removes the objects: the database that this row was written in, and what the owner object beside them must repeat.
-- A copy of the database has the same row, and runs in another database. Null until objects are used.
ALTER TABLE payload_store ADD COLUMN identity TEXT;
-- A random number, new with each adoption.
ALTER TABLE payload_store ADD COLUMN incarnation BIGINT;
-- It rises whenever ownership is proved, so that an earlier state of the database is noticed.
ALTER TABLE payload_store ADD COLUMN fence BIGINT;
