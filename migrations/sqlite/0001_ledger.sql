-- The ledger: policies, groups, rollouts, payloads, batches and their tallies.
-- Times are microseconds since the Unix epoch; `*_key` columns are 16-byte hashes of ids.

CREATE TABLE rules (
    rules_pk INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    created_us INTEGER NOT NULL
) STRICT;

CREATE TABLE policy (
    policy_pk INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    rules_pk INTEGER NOT NULL REFERENCES rules (rules_pk),
    run INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    version INTEGER NOT NULL,
    version_step INTEGER,
    version_uri TEXT,
    acked_step INTEGER,
    checkpoint_step INTEGER,
    tally_mark TEXT NOT NULL,
    created_us INTEGER NOT NULL
) STRICT;

CREATE TABLE version (
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    version INTEGER NOT NULL,
    step INTEGER,
    uri TEXT,
    published_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE batch (
    batch_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id BLOB NOT NULL UNIQUE,
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    run INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (
        state IN ('leased', 'returned', 'trained', 'checkpointed', 'quarantined', 'split', 'discarded')
    ),
    reason TEXT,
    lease TEXT,
    consumer TEXT NOT NULL,
    request_id TEXT,
    epoch INTEGER NOT NULL,
    ttl_s INTEGER NOT NULL,
    expires_us INTEGER,
    attempt INTEGER NOT NULL,
    failed_deliveries INTEGER NOT NULL,
    step INTEGER,
    group_count INTEGER NOT NULL,
    rollout_count INTEGER NOT NULL,
    sample_count INTEGER NOT NULL,
    token_count INTEGER NOT NULL,
    loss_weighting TEXT NOT NULL,
    loss_constant REAL NOT NULL,
    weight_samples INTEGER NOT NULL,
    weight_tokens INTEGER NOT NULL,
    version_current INTEGER NOT NULL,
    version_min INTEGER,
    version_max INTEGER,
    metrics TEXT NOT NULL,
    live_bytes INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    acked_us INTEGER,
    CHECK ((state = 'leased') = (expires_us IS NOT NULL))
) STRICT;

CREATE INDEX batch_by_policy ON batch (policy_pk, run, state, step);
CREATE INDEX batch_by_expiry ON batch (expires_us) WHERE expires_us IS NOT NULL;

-- AUTOINCREMENT: a cursor never meets a reused key.
CREATE TABLE rollout_group (
    group_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL,
    run INTEGER NOT NULL,
    group_key BLOB NOT NULL,
    group_id TEXT NOT NULL,
    rules_pk INTEGER NOT NULL,
    environment TEXT,
    state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'batched', 'stale', 'discarded', 'quarantined')),
    reason TEXT,
    failed_filters TEXT,
    size INTEGER NOT NULL,
    min_size INTEGER NOT NULL,
    kept INTEGER NOT NULL,
    masked INTEGER NOT NULL,
    dropped INTEGER NOT NULL,
    late INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    opened_us INTEGER NOT NULL,
    deadline_us INTEGER,
    decided_us INTEGER,
    ready_seq INTEGER,
    samples INTEGER NOT NULL,
    trained_samples INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    reward_sum REAL NOT NULL,
    reward_count INTEGER NOT NULL,
    version_min INTEGER,
    version_max INTEGER,
    failed_deliveries INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    batch_pk INTEGER REFERENCES batch (batch_pk),
    purge_us INTEGER,
    purged_us INTEGER,
    forget_us INTEGER,
    UNIQUE (policy_pk, run, group_key),
    CHECK ((state = 'open') = (deadline_us IS NOT NULL)),
    CHECK (state <> 'ready' OR ready_seq IS NOT NULL),
    CHECK (state <> 'batched' OR batch_pk IS NOT NULL)
) STRICT;

CREATE INDEX rollout_group_by_policy ON rollout_group (policy_pk, group_pk);
CREATE INDEX rollout_group_ready ON rollout_group (policy_pk, run, ready_seq) WHERE state = 'ready';
CREATE INDEX rollout_group_open ON rollout_group (policy_pk, run) WHERE state = 'open';
CREATE INDEX rollout_group_deadline ON rollout_group (deadline_us) WHERE deadline_us IS NOT NULL;
CREATE INDEX rollout_group_batch ON rollout_group (batch_pk) WHERE batch_pk IS NOT NULL;
CREATE INDEX rollout_group_purge ON rollout_group (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX rollout_group_forget ON rollout_group (forget_us) WHERE forget_us IS NOT NULL;

CREATE TABLE rollout (
    rollout_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL,
    run INTEGER NOT NULL,
    rollout_key BLOB NOT NULL,
    rollout_id TEXT NOT NULL,
    group_pk INTEGER NOT NULL REFERENCES rollout_group (group_pk),
    verdict TEXT NOT NULL CHECK (verdict IN ('kept', 'masked', 'dropped', 'late')),
    reason TEXT,
    failed_filters TEXT,
    reward REAL,
    advantage REAL,
    content_digest BLOB NOT NULL,
    policy_version INTEGER NOT NULL,
    version_assumed INTEGER NOT NULL,
    version_min INTEGER,
    version_max INTEGER,
    segments INTEGER NOT NULL,
    trained_segments INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    unpacked_bytes INTEGER NOT NULL,
    received_us INTEGER NOT NULL,
    UNIQUE (policy_pk, run, rollout_key)
) STRICT;

CREATE INDEX rollout_by_group ON rollout (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON rollout (policy_pk, rollout_pk);

-- Its own table: rows are two orders of magnitude larger than anything else and leave first.
CREATE TABLE payload (
    rollout_pk INTEGER PRIMARY KEY REFERENCES rollout (rollout_pk),
    codec INTEGER NOT NULL,
    digest BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- Every batch that ever carried a group, also those that were split.
CREATE TABLE batch_group (
    batch_pk INTEGER NOT NULL REFERENCES batch (batch_pk),
    place INTEGER NOT NULL,
    group_pk INTEGER NOT NULL REFERENCES rollout_group (group_pk),
    PRIMARY KEY (batch_pk, place)
) STRICT, WITHOUT ROWID;

CREATE INDEX batch_group_by_group ON batch_group (group_pk);

-- Counts kept in the transactions that change them; nothing is ever counted by scanning.
CREATE TABLE tally (
    policy_pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    slot INTEGER NOT NULL,
    value INTEGER NOT NULL,
    amount REAL NOT NULL,
    latest_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, name, slot)
) STRICT, WITHOUT ROWID;

-- Drops and stale groups by minute, for the last hour.
CREATE TABLE recent (
    policy_pk INTEGER NOT NULL,
    minute INTEGER NOT NULL,
    name TEXT NOT NULL,
    slot INTEGER NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, minute, name, slot)
) STRICT, WITHOUT ROWID;

CREATE INDEX recent_by_minute ON recent (minute);

-- The order in which groups become ready.
CREATE TABLE ready_sequence (
    value INTEGER NOT NULL
) STRICT;

INSERT INTO ready_sequence (value) VALUES (0);
