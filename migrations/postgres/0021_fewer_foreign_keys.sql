-- A rollout, its payload and its group are inserted, moved and deleted by transactions that hold the lock of the group.
-- Postgres checked these keys with a query for each row, and locked the parent's row each time. Without them the service
-- stores about a tenth more. `forebay doctor` finds rows without their parent.
ALTER TABLE rollout DROP CONSTRAINT rollout_group_pk_fkey;
ALTER TABLE payload DROP CONSTRAINT payload_rollout_pk_fkey;
