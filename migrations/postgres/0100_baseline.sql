-- The schema of 0.1.0. Databases of before have steps with lower numbers, and are refused.
--
-- Times are microseconds since the Unix epoch, and minutes are counted from there as well. Columns whose names end in
-- `_key` are the keys of ids in indexes. Flags are 0 or 1.
-- Rows that change often and briefly have room left on their pages, and are cleaned up early.

-- Policies, and what a trainer's weights come from.

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
    -- The epoch that a restore began: as long as it is current, no trainer has resumed since, and those of before are
    -- to.
    restored_epoch BIGINT,
    version BIGINT NOT NULL,
    version_step BIGINT,
    version_uri TEXT,
    acked_step BIGINT,
    checkpoint_step BIGINT,
    -- 1 from the first ack of a run on: a resume or a checkpoint above the last step is refused only where the ledger
    -- has seen steps. 0 for a policy whose trainer may start from any checkpoint.
    steps_known BIGINT NOT NULL DEFAULT 0,
    -- JSON: the tallies when the last batch was cut.
    tally_mark TEXT NOT NULL,
    -- Where claims begin to read the line of ready groups: entries of groups that were claimed stay in its index, and
    -- would be read again, for as long as a long transaction such as that of pg_dump might still see them.
    --
    -- No group of the current run that is ready has a place below ready_from. It becomes ready_next when all
    -- transactions below ready_mark have ended: one of them may have taken a place before ready_next.
    ready_from BIGINT NOT NULL DEFAULT 0,
    ready_next BIGINT NOT NULL DEFAULT 0,
    ready_mark BIGINT NOT NULL DEFAULT 0,
    -- JSON: what environments carry from batch to batch, with the run that it belongs to.
    shares TEXT NOT NULL DEFAULT '{}',
    -- JSON: requests for room that were refused lately.
    refused TEXT NOT NULL DEFAULT '[]',
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

-- Batches, groups, rollouts and payloads.

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
    -- When the last lease began, and how long its consumer had asked for a batch before.
    granted_us BIGINT NOT NULL,
    waited_us BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    failed_deliveries BIGINT NOT NULL,
    -- Leases that resumes ended.
    resumes BIGINT NOT NULL,
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
CREATE INDEX batch_in_order ON batch (policy_pk, batch_pk);

-- The order in which batches go out again: by the step that had consumed them, then those without one.
CREATE INDEX batch_returned ON batch (policy_pk, run, COALESCE(step, 9223372036854775807), batch_pk)
WHERE state = 'returned';

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
    -- Of the rewards that count in the baseline. They are equal if the group has nothing to learn from.
    reward_min DOUBLE PRECISION,
    reward_max DOUBLE PRECISION,
    version_min BIGINT,
    version_max BIGINT,
    -- Tokens of older versions are delivered with mask 0; set at the first delivery.
    mask_below BIGINT,
    failed_deliveries BIGINT NOT NULL,
    delivered BIGINT NOT NULL,
    -- Leases that resumes ended: the count of a batch that was split with the group.
    resumes BIGINT NOT NULL DEFAULT 0,
    batch_pk BIGINT REFERENCES batch (batch_pk),
    -- Checksum of its advantages, so that damage outside of payloads is found as well; null before they are known.
    seal BYTEA,
    purge_us BIGINT,
    purged_us BIGINT,
    forget_us BIGINT,
    UNIQUE (policy_pk, run, group_key),
    CHECK ((state = 'open') = (deadline_us IS NOT NULL)),
    CHECK (state <> 'ready' OR ready_seq IS NOT NULL),
    CHECK (state <> 'batched' OR batch_pk IS NOT NULL)
);

CREATE INDEX rollout_group_by_policy ON rollout_group (policy_pk, group_pk);
CREATE INDEX rollout_group_open ON rollout_group (policy_pk, run) WHERE state = 'open';
CREATE INDEX rollout_group_deadline ON rollout_group (deadline_us) WHERE deadline_us IS NOT NULL;
CREATE INDEX rollout_group_batch ON rollout_group (batch_pk) WHERE batch_pk IS NOT NULL;
CREATE INDEX rollout_group_purge ON rollout_group (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX rollout_group_forget ON rollout_group (forget_us) WHERE forget_us IS NOT NULL;

-- Orders in which groups go into batches: whatever takes the first of them reads no others.
CREATE INDEX rollout_group_ready ON rollout_group (policy_pk, run, ready_seq) WHERE state = 'ready';

-- Highest version first; a group that trains nothing has none, and nothing in it is old.
CREATE INDEX rollout_group_freshest
ON rollout_group (policy_pk, run, COALESCE(version_min, 9223372036854775807) DESC, ready_seq)
WHERE state = 'ready';

-- The ready groups of each environment. Groups without a label come first.
CREATE INDEX rollout_group_ready_environment
ON rollout_group (policy_pk, run, COALESCE(environment, ''), ready_seq)
WHERE state = 'ready';

-- Rollouts and payloads are inserted and deleted by transactions that hold the lock of the group, and a payload is
-- moved under the lock of its own row, so they have no foreign keys. Postgres would check each row with a query, and
-- lock the parent's row each time: without these keys the service stores about a tenth more rollouts per second.
-- `forebay doctor` finds rows without their parent.
CREATE TABLE rollout (
    rollout_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    rollout_key BYTEA NOT NULL,
    rollout_id TEXT NOT NULL,
    group_pk BIGINT NOT NULL,
    execution BYTEA NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN ('kept', 'masked', 'dropped', 'late')),
    reason TEXT,
    failed_filters TEXT,
    -- The number that the digest of a rollout's content has.
    status BIGINT NOT NULL,
    reward DOUBLE PRECISION,
    -- JSON: numbers by their names, for the metrics of batches. Null without components.
    components TEXT,
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
    response_tokens BIGINT NOT NULL,
    max_segment_tokens BIGINT NOT NULL,
    -- JSON: the tokens of each segment in order, for shards. Null if there is at most one segment, whose tokens are
    -- all.
    segment_tokens TEXT,
    -- JSON [[segment, version, trained tokens], ...], where the policy masks what is over the staleness bound.
    trained_spans TEXT,
    -- Checksum of what the row says, so that damage outside of payloads is found as well.
    seal BYTEA NOT NULL,
    unpacked_bytes BIGINT NOT NULL,
    received_us BIGINT NOT NULL,
    UNIQUE (policy_pk, run, rollout_key)
);

CREATE INDEX rollout_by_group ON rollout (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON rollout (policy_pk, rollout_pk);

-- The rollouts of an execution, of whichever policies.
CREATE INDEX rollout_by_execution ON rollout (execution, rollout_pk);

-- Its own table: rows are two orders of magnitude larger than anything else and leave first.
CREATE TABLE payload (
    rollout_pk BIGINT PRIMARY KEY,
    codec BIGINT NOT NULL,
    digest BYTEA NOT NULL,
    -- Null where the bytes are in `body`. Otherwise `body` is empty, and `length` bytes begin at `start`.
    file BIGINT,
    start BIGINT,
    length BIGINT,
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

-- The order in which groups become ready.
CREATE SEQUENCE ready_sequence;

ALTER TABLE rollout_group SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE batch SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

-- Payloads are compressed before they come here.
ALTER TABLE payload ALTER COLUMN body SET STORAGE EXTERNAL;

-- Payloads outside of the database: the rows of payloads say where the bytes are.

-- One row: where new payloads are stored, the number in the names of the database's objects, and where they are.
CREATE TABLE payload_store (
    kind TEXT NOT NULL CHECK (kind IN ('database', 'objects')),
    store_id BIGINT NOT NULL,
    url TEXT,
    -- Who removes the objects: the database that this row was written in, and what the owner object beside them must
    -- repeat. A copy of the database has the same row, and runs in another database. Null until objects are used.
    identity TEXT,
    -- A random number, new with each adoption.
    incarnation BIGINT,
    -- It rises whenever ownership is proved, so that an earlier state of the database is noticed.
    fence BIGINT
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

-- Counts, kept in the transactions that change them; nothing is ever counted by scanning.

CREATE TABLE tally (
    policy_pk BIGINT NOT NULL,
    name TEXT NOT NULL,
    slot BIGINT NOT NULL,
    value BIGINT NOT NULL,
    amount DOUBLE PRECISION NOT NULL,
    latest_us BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, name, slot)
);

ALTER TABLE tally SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- Changes of tallies are appended, and added to the tallies themselves four times a second. Under a long transaction,
-- such as that of pg_dump, the dead rows of a count that every post changes would stay, and whoever reads the count
-- reads all of them.
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

ALTER TABLE tally_change SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000);

-- At most one row: changes of transactions below have been added.
CREATE TABLE tally_folded (
    only_row BIGINT PRIMARY KEY CHECK (only_row = 1),
    below BIGINT NOT NULL
) WITH (fillfactor = 50);

-- What a tally is: its rows and the changes that have not been added yet. Changes that have been added are dead rows
-- below the lower bound; with an upper one, Postgres expects few rows and goes by the index also without statistics.
CREATE VIEW tally_now AS
SELECT policy_pk, name, value, amount, latest_us
FROM tally
UNION ALL
SELECT policy_pk, name, value, amount, latest_us
FROM tally_change
WHERE xid >= (SELECT COALESCE(MAX(below), 0) FROM tally_folded) AND xid < 9223372036854775807;

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

-- Room that is reserved before work starts, so that a group that has begun can always be completed.
CREATE TABLE admission (
    admission_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    admission_id BYTEA NOT NULL UNIQUE,
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    granted BIGINT NOT NULL,
    used BIGINT NOT NULL,
    version BIGINT NOT NULL,
    -- The group and its size; null if the request named no group.
    group_key BYTEA,
    group_size BIGINT,
    environment TEXT,
    -- When the room was reserved; null for the room of a session, which is known to live until it ends.
    granted_us BIGINT,
    expires_us BIGINT NOT NULL,
    CHECK (used BETWEEN 0 AND granted)
);

CREATE INDEX admission_by_policy ON admission (policy_pk, expires_us);
CREATE INDEX admission_by_expiry ON admission (expires_us);
CREATE INDEX admission_by_group ON admission (policy_pk, group_key);

-- Who may call what. A secret is never here, only its hash.
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

-- The clock that replicas share: service time is the database's clock and offset_us; latest_us is a time that the
-- service has reached. A starting replica asks by its number, and a running one answers with the latest number,
-- whether time went on as the clock says.
CREATE TABLE service_clock (
    only_row BIGINT PRIMARY KEY CHECK (only_row = 1),
    offset_us BIGINT NOT NULL,
    latest_us BIGINT NOT NULL,
    asked BIGINT NOT NULL,
    answered BIGINT NOT NULL
) WITH (fillfactor = 50);

-- Sessions: the calls of an agent to an inference engine, recorded until its rollout is finished.

CREATE TABLE session (
    session_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_id BYTEA NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'finishing', 'finished', 'aborted', 'expired')),
    reason TEXT,
    -- JSON: what the session was opened with.
    spec TEXT NOT NULL,
    content_digest BYTEA NOT NULL,
    max_calls BIGINT NOT NULL,
    idle_s BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    -- Stored bytes of the calls, and what the segments of the session will have at most.
    bytes BIGINT NOT NULL,
    segments BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    -- Whether a call was refused because a bound of the session was reached.
    is_full BIGINT NOT NULL,
    -- What happened to the calls, also to those that were refused: the sum of numbers for each kind.
    notes BIGINT NOT NULL DEFAULT 0,
    opened_us BIGINT NOT NULL,
    last_call_us BIGINT,
    expires_us BIGINT NOT NULL,
    -- When the sweep ends it; null once it has ended.
    due_us BIGINT,
    ended_us BIGINT,
    end_digest BYTEA,
    -- JSON: the answer to the call that ended it.
    outcome TEXT,
    -- When its calls and keys are deleted, and when this row is.
    purge_us BIGINT,
    forget_us BIGINT,
    CHECK ((state IN ('open', 'finishing')) = (due_us IS NOT NULL)),
    CHECK ((state IN ('open', 'finishing')) = (ended_us IS NULL))
);

CREATE INDEX session_due ON session (due_us) WHERE due_us IS NOT NULL;
CREATE INDEX session_purge ON session (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX session_forget ON session (forget_us) WHERE forget_us IS NOT NULL;

-- The policies whose rollouts a session records.
CREATE TABLE session_policy (
    session_pk BIGINT NOT NULL REFERENCES session (session_pk),
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    run BIGINT NOT NULL,
    rollout_key BYTEA NOT NULL,
    group_key BYTEA NOT NULL,
    group_size BIGINT NOT NULL,
    admission_id BYTEA NOT NULL,
    version BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    -- Ids that were sampled in its calls.
    sampled BIGINT NOT NULL,
    -- Special tokens of the model in the texts of the calls.
    special_tokens BIGINT NOT NULL DEFAULT 0,
    -- JSON: warnings about the calls, a list of texts.
    warnings TEXT,
    is_live BIGINT NOT NULL,
    PRIMARY KEY (session_pk, policy_pk)
);

CREATE UNIQUE INDEX session_policy_rollout ON session_policy (policy_pk, run, rollout_key);
CREATE INDEX session_policy_group ON session_policy (policy_pk, run, group_key) WHERE is_live = 1;
CREATE INDEX session_policy_by_policy ON session_policy (policy_pk, session_pk);

-- A secret is never here, only its hash.
CREATE TABLE session_key (
    hash BYTEA PRIMARY KEY,
    session_pk BIGINT NOT NULL REFERENCES session (session_pk)
);

CREATE INDEX session_key_by_session ON session_key (session_pk);

-- A prompt is the first `shared` ids of the prompt and ids of the call `parent`, and the tail in `body`.
CREATE TABLE session_call (
    call_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_pk BIGINT NOT NULL REFERENCES session (session_pk),
    seq BIGINT NOT NULL,
    policy_pk BIGINT NOT NULL,
    parent BIGINT,
    shared BIGINT NOT NULL,
    prompt BIGINT NOT NULL,
    sampled BIGINT NOT NULL,
    agent TEXT,
    dialect TEXT NOT NULL,
    model TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    stopped_on_token BIGINT NOT NULL,
    delivered BIGINT NOT NULL,
    retry_count BIGINT NOT NULL,
    started_us BIGINT NOT NULL,
    ended_us BIGINT NOT NULL,
    body_digest BYTEA NOT NULL,
    digest BYTEA NOT NULL,
    -- Packed ids, log-probabilities and versions.
    body BYTEA NOT NULL,
    -- Compressed JSON.
    request BYTEA NOT NULL,
    response BYTEA NOT NULL,
    UNIQUE (session_pk, seq)
);

CREATE INDEX session_call_by_digest ON session_call (session_pk, body_digest, seq);

-- What is in these columns is compressed before it comes here.
ALTER TABLE session_call ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE session_call ALTER COLUMN request SET STORAGE EXTERNAL;
ALTER TABLE session_call ALTER COLUMN response SET STORAGE EXTERNAL;

-- Every call changes these rows.
ALTER TABLE session SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE session_policy SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

-- The state of foreign protocols that is not data: which trainer and which environments have registered, and how far
-- a trainer has read. Each is one document, changed by compare-and-set.
CREATE TABLE facade_state (
    -- The protocol and the policy.
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    -- One more with every change.
    revision BIGINT NOT NULL CHECK (revision > 0),
    -- JSON.
    body TEXT NOT NULL
);

-- What the live page shows: what happened over time, the steps of trainers, and who waits.

-- The totals of all tallies of a policy at the beginning of a minute, if any of them had changed. They are totals and
-- not
-- differences, so that rows can be deleted and all sums stay right.
CREATE TABLE history (
    history_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    minute BIGINT NOT NULL,
    -- The changes since the row before were made in this minute or later.
    since BIGINT NOT NULL,
    at_us BIGINT NOT NULL,
    -- The minute in which the row is deleted. The newest row of a policy stays.
    keep_until BIGINT NOT NULL,
    -- JSON, by the names of the tallies: the value, or the value and the amount.
    body TEXT NOT NULL,
    UNIQUE (policy_pk, minute)
);

CREATE INDEX history_keep ON history (keep_until);

-- The last minute for which a replica wrote rows.
CREATE TABLE history_mark (
    only_row BIGINT PRIMARY KEY CHECK (only_row = 1),
    minute BIGINT NOT NULL
);

INSERT INTO history_mark (only_row, minute) VALUES (1, 0);

-- What the batches of a step had in all, written by their acks.
CREATE TABLE step_log (
    policy_pk BIGINT NOT NULL,
    run BIGINT NOT NULL,
    step BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    -- Of the last batch.
    acked_us BIGINT NOT NULL,
    batches BIGINT NOT NULL,
    groups BIGINT NOT NULL,
    -- Groups of several rewards that are all equal.
    flat_groups BIGINT NOT NULL,
    rollouts BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    trained_tokens BIGINT NOT NULL,
    reward_sum DOUBLE PRECISION NOT NULL,
    reward_count BIGINT NOT NULL,
    -- Mean of the rewards that arrived before the cut, weighted by the rollouts of the batches.
    all_mean DOUBLE PRECISION,
    stale_sum BIGINT NOT NULL,
    stale_max BIGINT NOT NULL,
    waited_us BIGINT NOT NULL,
    held_us BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    version BIGINT NOT NULL,
    -- 1 if a resume went back before this step.
    undone BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, run, step, epoch)
);

-- What operators and time did to a policy.
CREATE TABLE journal (
    journal_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_pk BIGINT NOT NULL,
    at_us BIGINT NOT NULL,
    kind TEXT NOT NULL,
    key_id TEXT,
    -- JSON.
    body TEXT NOT NULL
);

CREATE INDEX journal_by_policy ON journal (policy_pk, journal_pk);

-- Consumers that wait for a batch, at whichever replica.
CREATE TABLE waiting_consumer (
    policy_pk BIGINT NOT NULL,
    consumer TEXT COLLATE "C" NOT NULL,
    since_us BIGINT NOT NULL,
    asked_us BIGINT NOT NULL,
    -- From then on it does not wait any more, unless it has asked again.
    until_us BIGINT NOT NULL,
    PRIMARY KEY (policy_pk, consumer)
);

CREATE INDEX waiting_consumer_by_policy ON waiting_consumer (policy_pk, until_us);
