-- Changes of tallies are appended, and added to the tallies themselves four times a second. Under a long transaction, such as that
-- of pg_dump, the dead rows of a count that every post changes would stay, and whoever reads the count reads all of them.

CREATE TABLE tally_change (
    -- The transaction that made it.
    xid BIGINT NOT NULL DEFAULT CAST(CAST(pg_current_xact_id() AS TEXT) AS BIGINT),
    policy_pk BIGINT NOT NULL,
    name TEXT NOT NULL,
    value BIGINT NOT NULL,
    amount DOUBLE PRECISION NOT NULL,
    latest_us BIGINT NOT NULL
);

CREATE INDEX tally_change_by_xid ON tally_change (xid);

-- At most one row: changes of transactions below have been added.
CREATE TABLE tally_folded (
    only_row BIGINT PRIMARY KEY CHECK (only_row = 1),
    below BIGINT NOT NULL
) WITH (fillfactor = 50);

-- What a tally is: its rows and the changes that have not been added yet. Changes that have been added are dead rows below
-- the lower bound; with an upper one, Postgres expects few rows and goes by the index also without statistics.
CREATE VIEW tally_now AS
SELECT policy_pk, name, value, amount, latest_us
FROM tally
UNION ALL
SELECT policy_pk, name, value, amount, latest_us
FROM tally_change
WHERE xid >= (SELECT COALESCE(MAX(below), 0) FROM tally_folded) AND xid < 9223372036854775807;

ALTER TABLE tally_change SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);
