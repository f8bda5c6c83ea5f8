-- The ledger: policies, groups, rollouts, payloads, batches and their tallies.
-- Times are microseconds since the Unix epoch; `*_key` columns are 16-byte hashes of ids.

CREATE TABLE rules (
    rules_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    body TEXT NOT NULL,
    created_us BIGINT NOT NULL
);

CREATE TABLE policy (
    policy_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name TEXT COLLATE "C" NOT NULL UNIQUE,
    rules_pk BIGINT NOT NULL REFERENCES rules (rules_pk),
    run BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    version BIGINT NOT NULL,
    version_step BIGINT,
    version_uri TEXT,
    acked_step BIGINT,
    checkpoint_step BIGINT,
    tally_mark TEXT NOT NULL,
    created_us BIGINT NOT NULL
);

CREATE TABLE version (
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    version BIGINT NOT NULL,
    step BIGINT,
    uri TEXT,
    published_us BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, version)
);

CREATE TABLE batch (
    batch_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    batch_id BYTEA NOT NULL UNIQUE,
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    run BIGINT NOT NULL,
    state TEXT NOT NULL CHECK (
        state IN ('leased', 'returned', 'trained', 'checkpointed', 'quarantined', 'split', 'discarded')
    ),
    reason TEXT,
    lease TEXT,
    consumer TEXT NOT NULL,
    request_id TEXT,
    epoch BIGINT NOT NULL,
    ttl_s BIGINT NOT NULL,
    expires_us BIGINT,
    attempt BIGINT NOT NULL,
    failed_deliveries BIGINT NOT NULL,
    step BIGINT,
    group_count BIGINT NOT NULL,
    rollout_count BIGINT NOT NULL,
    sample_count BIGINT NOT NULL,
    token_count BIGINT NOT NULL,
    loss_weighting TEXT NOT NULL,
    loss_constant DOUBLE PRECISION NOT NULL,
    weight_samples BIGINT NOT NULL,
    weight_tokens BIGINT NOT NULL,
    version_current BIGINT NOT NULL,
    version_min BIGINT,
    version_max BIGINT,
    metrics TEXT NOT NULL,
    live_bytes BIGINT NOT NULL,
    created_us BIGINT NOT NULL,
    acked_us BIGINT,
    CHECK ((state = 'leased') = (expires_us IS NOT NULL))
);

CREATE INDEX batch_by_policy ON batch (policy_pk, run, state, step);
CREATE INDEX batch_by_expiry ON batch (expires_us) WHERE expires_us IS NOT NULL;

CREATE TABLE rollout_group (
    group_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    group_key BYTEA NOT NULL,
    group_id TEXT NOT NULL,
    rules_pk BIGINT NOT NULL,
    environment TEXT,
    state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'batched', 'stale', 'discarded', 'quarantined')),
    reason TEXT,
    failed_filters TEXT,
    size BIGINT NOT NULL,
    min_size BIGINT NOT NULL,
    kept BIGINT NOT NULL,
    masked BIGINT NOT NULL,
    dropped BIGINT NOT NULL,
    late BIGINT NOT NULL,
    payload_bytes BIGINT NOT NULL,
    opened_us BIGINT NOT NULL,
    deadline_us BIGINT,
    decided_us BIGINT,
    ready_seq BIGINT,
    samples BIGINT NOT NULL,
    trained_samples BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    trained_tokens BIGINT NOT NULL,
    reward_sum DOUBLE PRECISION NOT NULL,
    reward_count BIGINT NOT NULL,
    version_min BIGINT,
    version_max BIGINT,
    failed_deliveries BIGINT NOT NULL,
    delivered BIGINT NOT NULL,
    batch_pk BIGINT REFERENCES batch (batch_pk),
    purge_us BIGINT,
    purged_us BIGINT,
    forget_us BIGINT,
    UNIQUE (policy_pk, run, group_key),
    CHECK ((state = 'open') = (deadline_us IS NOT NULL)),
    CHECK (state <> 'ready' OR ready_seq IS NOT NULL),
    CHECK (state <> 'batched' OR batch_pk IS NOT NULL)
);

CREATE INDEX rollout_group_by_policy ON rollout_group (policy_pk, group_pk);
CREATE INDEX rollout_group_ready ON rollout_group (policy_pk, run, ready_seq) WHERE state = 'ready';
CREATE INDEX rollout_group_open ON rollout_group (policy_pk, run) WHERE state = 'open';
CREATE INDEX rollout_group_deadline ON rollout_group (deadline_us) WHERE deadline_us IS NOT NULL;
CREATE INDEX rollout_group_batch ON rollout_group (batch_pk) WHERE batch_pk IS NOT NULL;
CREATE INDEX rollout_group_purge ON rollout_group (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX rollout_group_forget ON rollout_group (forget_us) WHERE forget_us IS NOT NULL;

CREATE TABLE rollout (
    rollout_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    rollout_key BYTEA NOT NULL,
    rollout_id TEXT NOT NULL,
    group_pk BIGINT NOT NULL REFERENCES rollout_group (group_pk),
    verdict TEXT NOT NULL CHECK (verdict IN ('kept', 'masked', 'dropped', 'late')),
    reason TEXT,
    failed_filters TEXT,
    reward DOUBLE PRECISION,
    advantage DOUBLE PRECISION,
    content_digest BYTEA NOT NULL,
    policy_version BIGINT NOT NULL,
    version_assumed BIGINT NOT NULL,
    version_min BIGINT,
    version_max BIGINT,
    segments BIGINT NOT NULL,
    trained_segments BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    trained_tokens BIGINT NOT NULL,
    unpacked_bytes BIGINT NOT NULL,
    received_us BIGINT NOT NULL,
    UNIQUE (policy_pk, run, rollout_key)
);

CREATE INDEX rollout_by_group ON rollout (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON rollout (policy_pk, rollout_pk);

-- Its own table: rows are two orders of magnitude larger than anything else and leave first.
CREATE TABLE payload (
    rollout_pk BIGINT PRIMARY KEY REFERENCES rollout (rollout_pk),
    codec BIGINT NOT NULL,
    digest BYTEA NOT NULL,
    body BYTEA NOT NULL
);

-- Every batch that ever carried a group, also those that were split.
CREATE TABLE batch_group (
    batch_pk BIGINT NOT NULL REFERENCES batch (batch_pk),
    place BIGINT NOT NULL,
    group_pk BIGINT NOT NULL REFERENCES rollout_group (group_pk),
    PRIMARY KEY (batch_pk, place)
);

CREATE INDEX batch_group_by_group ON batch_group (group_pk);

-- Counts kept in the transactions that change them; nothing is ever counted by scanning.
CREATE TABLE tally (
    policy_pk BIGINT NOT NULL,
    name TEXT NOT NULL,
    slot BIGINT NOT NULL,
    value BIGINT NOT NULL,
    amount DOUBLE PRECISION NOT NULL,
    latest_us BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, name, slot)
);

-- Drops and stale groups by minute, for the last hour.
CREATE TABLE recent (
    policy_pk BIGINT NOT NULL,
    minute BIGINT NOT NULL,
    name TEXT NOT NULL,
    slot BIGINT NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, minute, name, slot)
);

CREATE INDEX recent_by_minute ON recent (minute);

-- The order in which groups become ready.
CREATE SEQUENCE ready_sequence;

-- Payloads are compressed before they come here.
ALTER TABLE payload ALTER COLUMN body SET STORAGE EXTERNAL;

-- Hot rows change often and briefly: leave room on the page, and clean up early.
ALTER TABLE rollout_group SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE batch SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE tally SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);
