-- Payloads in segment files beside the database: the rows say where the bytes are.

-- One row: where new payloads are stored, and the number in the names of the database's segment files.
CREATE TABLE payload_store (
    kind TEXT NOT NULL CHECK (kind IN ('database', 'segments')),
    store_id INTEGER NOT NULL,
    -- Null on SQLite.
    url TEXT
) STRICT;

-- One row for each segment file, written before the file is created.
CREATE TABLE segment_file (
    file INTEGER PRIMARY KEY,
    -- A random number, which the head of the file repeats, so that another file under its name is noticed.
    mark INTEGER NOT NULL,
    -- The length that commits have reached. What follows it was never acknowledged.
    end_at INTEGER NOT NULL,
    live_frames INTEGER NOT NULL,
    live_bytes INTEGER NOT NULL,
    -- When the last row that named a frame was deleted.
    emptied_us INTEGER
) STRICT;

CREATE INDEX segment_file_without_frames ON segment_file (file) WHERE live_frames = 0;

-- Null where the bytes are in `body`. Otherwise `body` is empty, and `length` bytes begin at `start`.
ALTER TABLE payload ADD COLUMN file INTEGER;
ALTER TABLE payload ADD COLUMN start INTEGER;
ALTER TABLE payload ADD COLUMN length INTEGER;
