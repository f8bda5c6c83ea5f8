-- Payloads outside of the database: the rows say where the bytes are.

-- One row: where new payloads are stored, the number in the names of the database's objects, and where they are.
CREATE TABLE payload_store (
    kind TEXT NOT NULL CHECK (kind IN ('database', 'objects')),
    store_id BIGINT NOT NULL,
    url TEXT
);

-- One row for each object. It is committed with the rows that name what is in the object.
CREATE TABLE segment_file (
    file BIGINT PRIMARY KEY,
    -- A random number, which the head of the object repeats, so that another object under its name is noticed.
    mark BIGINT NOT NULL,
    end_at BIGINT NOT NULL,
    live_frames BIGINT NOT NULL,
    live_bytes BIGINT NOT NULL,
    -- When the last row that named a frame was deleted.
    emptied_us BIGINT
);

CREATE INDEX segment_file_without_frames ON segment_file (emptied_us) WHERE live_frames = 0;

-- Null where the bytes are in `body`. Otherwise `body` is empty, and `length` bytes begin at `start`.
ALTER TABLE payload ADD COLUMN file BIGINT;
ALTER TABLE payload ADD COLUMN start BIGINT;
ALTER TABLE payload ADD COLUMN length BIGINT;
