-- What the lineage of the weights has to remember, and the clock that replicas share.

-- 1 from the first ack of a run on: a resume or a checkpoint above the last step is refused only where the ledger has
-- seen steps. 0 for a policy whose trainer may start from any checkpoint.
ALTER TABLE policy ADD COLUMN steps_known INTEGER NOT NULL DEFAULT 0;
UPDATE policy SET steps_known = 1 WHERE acked_step IS NOT NULL;

-- Leases that resumes ended; a group takes the count of a batch that was split with it.
ALTER TABLE batch ADD COLUMN resumes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollout_group ADD COLUMN resumes INTEGER NOT NULL DEFAULT 0;

-- Service time is the database's clock and offset_us; latest_us is a time that the service has reached. A starting replica
-- asks by its number, and a running one answers with the latest number, whether time went on as the clock says.
CREATE TABLE service_clock (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    offset_us INTEGER NOT NULL,
    latest_us INTEGER NOT NULL,
    asked INTEGER NOT NULL,
    answered INTEGER NOT NULL
) STRICT;
