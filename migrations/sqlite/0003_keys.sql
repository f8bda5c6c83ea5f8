-- Keys: who may call what. A secret is never here, only its hash.
-- Times are microseconds since the Unix epoch.

CREATE TABLE access_key (
    key_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    key_id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('produce', 'train', 'read', 'admin')),
    -- Globs of policy names, separated by commas.
    policies TEXT NOT NULL,
    hash BLOB NOT NULL,
    created_us INTEGER NOT NULL,
    expires_us INTEGER,
    last_used_us INTEGER,
    revoked_us INTEGER
) STRICT;

-- What every replica reads again and again.
CREATE INDEX access_key_live ON access_key (key_pk) WHERE revoked_us IS NULL;
