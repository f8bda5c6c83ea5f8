-- Payloads outside of the database: the rows say where the bytes are.

-- One row: where new payloads are stored.
CREATE TABLE payload_store (
    kind TEXT NOT NULL CHECK (kind IN ('database', 'segments')),
    store_id BIGINT NOT NULL
);

-- One row for each file.
CREATE TABLE segment_file (
    file BIGINT PRIMARY KEY,
    -- A random number, which the head of the file repeats, so that another file under its name is noticed.
    mark BIGINT NOT NULL,
    -- The length that commits have reached. What follows it was never acknowledged.
    end_at BIGINT NOT NULL,
    live_frames BIGINT NOT NULL,
    live_bytes BIGINT NOT NULL
);

CREATE INDEX segment_file_without_frames ON segment_file (file) WHERE live_frames = 0;

-- Null where the bytes are in `body`. Otherwise `body` is empty, and `length` bytes begin at `start`.
ALTER TABLE payload ADD COLUMN file BIGINT;
ALTER TABLE payload ADD COLUMN start BIGINT;
ALTER TABLE payload ADD COLUMN length BIGINT;
