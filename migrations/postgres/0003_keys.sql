-- Keys: who may call what. A secret is never here, only its hash.
-- Times are microseconds since the Unix epoch.

CREATE TABLE access_key (
    key_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key_id TEXT COLLATE "C" NOT NULL UNIQUE,
    name TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('produce', 'train', 'read', 'admin')),
    -- Globs of policy names, separated by commas.
    policies TEXT NOT NULL,
    hash BYTEA NOT NULL,
    created_us BIGINT NOT NULL,
    expires_us BIGINT,
    last_used_us BIGINT,
    revoked_us BIGINT
);

-- What every replica reads again and again.
CREATE INDEX access_key_live ON access_key (key_pk) WHERE revoked_us IS NULL;
