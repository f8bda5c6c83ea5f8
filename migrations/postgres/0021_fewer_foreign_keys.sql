-- Rollouts and payloads are inserted and deleted by transactions that hold the lock of the group, and a payload is moved
-- under the lock of its own row. Postgres checked these keys with a query for each row, and locked the parent's row each
-- time. Without them the service stores about a tenth more rollouts per second. `forebay doctor` finds rows without their
-- parent.
ALTER TABLE rollout DROP CONSTRAINT rollout_group_pk_fkey;
ALTER TABLE payload DROP CONSTRAINT payload_rollout_pk_fkey;
