-- Blobs: bytes that rollouts name by their digest, such as images.
--
-- A blob is stored in pieces, and each piece is a row of payload, so that it is where payloads are. Its key is below zero:
-- minus 4096 times blob_pk, minus its index.

-- So not every payload has a rollout. SQLite cannot drop a reference, and to build the table again would copy all payloads
-- that are in it. This changes no row, and what follows tells other connections that the schema has changed.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema
SET sql = REPLACE(sql, ' REFERENCES rollout (rollout_pk)', '')
WHERE type = 'table' AND name = 'payload';
PRAGMA writable_schema = RESET;

CREATE TABLE blob (
    blob_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    -- BLAKE3 of all of its bytes: of one length only, so at most one row of a digest is whole.
    digest BLOB NOT NULL,
    bytes INTEGER NOT NULL CHECK (bytes > 0),
    -- Bytes from the beginning that are stored: all of them, or whole pieces.
    stored INTEGER NOT NULL CHECK (stored <= bytes),
    media_type TEXT,
    -- An upload is kept so long, whether a rollout names it or not.
    kept_until_us INTEGER NOT NULL,
    -- When it is looked whether a rollout names it, and it is deleted if none does. Null while one does.
    expires_us INTEGER,
    -- 1 from the first rollout on that names it.
    was_named INTEGER NOT NULL DEFAULT 0,
    UNIQUE (digest, bytes)
) STRICT;

CREATE INDEX blob_by_expiry ON blob (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX blob_never_named ON blob (stored) WHERE was_named = 0;

-- Which rollouts name it, as long as they have their payloads.
CREATE TABLE blob_use (
    rollout_pk INTEGER NOT NULL,
    blob_pk INTEGER NOT NULL REFERENCES blob (blob_pk),
    PRIMARY KEY (rollout_pk, blob_pk)
) STRICT, WITHOUT ROWID;

CREATE INDEX blob_use_by_blob ON blob_use (blob_pk);
