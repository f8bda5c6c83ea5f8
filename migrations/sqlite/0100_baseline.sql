-- The schema of 0.1.0. Databases of before have steps with lower numbers, and are refused.
--
-- Times are microseconds since the Unix epoch, and minutes are counted from there as well. Columns whose names end in
-- `_key` are the keys of ids in indexes. Flags are 0 or 1.

-- Policies, and what a trainer's weights come from.

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
    -- The epoch that a restore began: as long as it is current, no trainer has resumed since, and those of before are
    -- to.
    restored_epoch INTEGER,
    version INTEGER NOT NULL,
    version_step INTEGER,
    version_uri TEXT,
    acked_step INTEGER,
    checkpoint_step INTEGER,
    -- 1 from the first ack of a run on: a resume or a checkpoint above the last step is refused only where the ledger
    -- has seen steps. 0 for a policy whose trainer may start from any checkpoint.
    steps_known INTEGER NOT NULL DEFAULT 0,
    -- JSON: the tallies when the last batch was cut.
    tally_mark TEXT NOT NULL,
    -- Where claims begin to read the line of ready groups. It matters on Postgres, where entries of groups that were
    -- claimed stay in the index for a while; here it is kept alike. Nothing is under way beside the only writer, so
    -- ready_mark is 0.
    --
    -- No group of the current run that is ready has a place below ready_from. It becomes ready_next when all
    -- transactions below ready_mark have ended: one of them may have taken a place before ready_next.
    ready_from INTEGER NOT NULL DEFAULT 0,
    ready_next INTEGER NOT NULL DEFAULT 0,
    ready_mark INTEGER NOT NULL DEFAULT 0,
    -- JSON: what environments carry from batch to batch, with the run that it belongs to.
    shares TEXT NOT NULL DEFAULT '{}',
    -- JSON: requests for room that were refused lately.
    refused TEXT NOT NULL DEFAULT '[]',
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

-- Batches, groups, rollouts and payloads.

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
    -- When the last lease began, and how long its consumer had asked for a batch before.
    granted_us INTEGER NOT NULL,
    waited_us INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    failed_deliveries INTEGER NOT NULL,
    -- Leases that resumes ended.
    resumes INTEGER NOT NULL,
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
CREATE INDEX batch_in_order ON batch (policy_pk, batch_pk);

-- The order in which batches go out again: by the step that had consumed them, then those without one.
CREATE INDEX batch_returned ON batch (policy_pk, run, COALESCE(step, 9223372036854775807), batch_pk)
WHERE state = 'returned';

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
    -- Of the rewards that count in the baseline. They are equal if the group has nothing to learn from.
    reward_min REAL,
    reward_max REAL,
    version_min INTEGER,
    version_max INTEGER,
    -- Tokens of older versions are delivered with mask 0; set at the first delivery.
    mask_below INTEGER,
    failed_deliveries INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    -- Leases that resumes ended: the count of a batch that was split with the group.
    resumes INTEGER NOT NULL DEFAULT 0,
    batch_pk INTEGER REFERENCES batch (batch_pk),
    -- Checksum of its advantages, so that damage outside of payloads is found as well; null before they are known.
    seal BLOB,
    purge_us INTEGER,
    purged_us INTEGER,
    forget_us INTEGER,
    UNIQUE (policy_pk, run, group_key),
    CHECK ((state = 'open') = (deadline_us IS NOT NULL)),
    CHECK (state <> 'ready' OR ready_seq IS NOT NULL),
    CHECK (state <> 'batched' OR batch_pk IS NOT NULL)
) STRICT;

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

CREATE TABLE rollout (
    rollout_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL,
    run INTEGER NOT NULL,
    rollout_key BLOB NOT NULL,
    rollout_id TEXT NOT NULL,
    group_pk INTEGER NOT NULL REFERENCES rollout_group (group_pk),
    execution BLOB NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN ('kept', 'masked', 'dropped', 'late')),
    reason TEXT,
    failed_filters TEXT,
    -- The number that the digest of a rollout's content has.
    status INTEGER NOT NULL,
    reward REAL,
    -- JSON: numbers by their names, for the metrics of batches. Null without components.
    components TEXT,
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
    response_tokens INTEGER NOT NULL,
    max_segment_tokens INTEGER NOT NULL,
    -- JSON: the tokens of each segment in order, for shards. Null if there is at most one segment, whose tokens are
    -- all.
    segment_tokens TEXT,
    -- JSON [[segment, version, trained tokens], ...], where the policy masks what is over the staleness bound.
    trained_spans TEXT,
    -- Checksum of what the row says, so that damage outside of payloads is found as well.
    seal BLOB NOT NULL,
    unpacked_bytes INTEGER NOT NULL,
    received_us INTEGER NOT NULL,
    UNIQUE (policy_pk, run, rollout_key)
) STRICT;

CREATE INDEX rollout_by_group ON rollout (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON rollout (policy_pk, rollout_pk);

-- The rollouts of an execution, of whichever policies.
CREATE INDEX rollout_by_execution ON rollout (execution);

-- Its own table: rows are two orders of magnitude larger than anything else and leave first.
CREATE TABLE payload (
    rollout_pk INTEGER PRIMARY KEY REFERENCES rollout (rollout_pk),
    codec INTEGER NOT NULL,
    digest BLOB NOT NULL,
    -- Null where the bytes are in `body`. Otherwise `body` is empty, and `length` bytes begin at `start`.
    file INTEGER,
    start INTEGER,
    length INTEGER,
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

-- The order in which groups become ready.
CREATE TABLE ready_sequence (
    value INTEGER NOT NULL
) STRICT;

INSERT INTO ready_sequence (value) VALUES (0);

-- Payloads outside of the database: the rows of payloads say where the bytes are.

-- One row: where new payloads are stored, and the number in the names of the database's segment files.
CREATE TABLE payload_store (
    kind TEXT NOT NULL CHECK (kind IN ('database', 'segments')),
    store_id INTEGER NOT NULL
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

-- Counts, kept in the transactions that change them; nothing is ever counted by scanning.

CREATE TABLE tally (
    policy_pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    slot INTEGER NOT NULL,
    value INTEGER NOT NULL,
    amount REAL NOT NULL,
    latest_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, name, slot)
) STRICT, WITHOUT ROWID;

-- What a tally is. On Postgres, changes that have not been added to it yet belong to it as well.
CREATE VIEW tally_now AS
SELECT policy_pk, name, value, amount, latest_us
FROM tally;

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

-- Room that is reserved before work starts, so that a group that has begun can always be completed.
CREATE TABLE admission (
    admission_pk INTEGER PRIMARY KEY,
    admission_id BLOB NOT NULL UNIQUE,
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    granted INTEGER NOT NULL,
    used INTEGER NOT NULL,
    version INTEGER NOT NULL,
    -- The group and its size; null if the request named no group.
    group_key BLOB,
    group_size INTEGER,
    environment TEXT,
    -- When the room was reserved; null for the room of a session, which is known to live until it ends.
    granted_us INTEGER,
    expires_us INTEGER NOT NULL,
    CHECK (used BETWEEN 0 AND granted)
) STRICT;

CREATE INDEX admission_by_policy ON admission (policy_pk, expires_us);
CREATE INDEX admission_by_expiry ON admission (expires_us);
CREATE INDEX admission_by_group ON admission (policy_pk, group_key);

-- Who may call what. A secret is never here, only its hash.
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

-- The clock that replicas share: service time is the database's clock and offset_us; latest_us is a time that the
-- service has reached. A starting replica asks by its number, and a running one answers with the latest number,
-- whether time went on as the clock says.
CREATE TABLE service_clock (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    offset_us INTEGER NOT NULL,
    latest_us INTEGER NOT NULL,
    asked INTEGER NOT NULL,
    answered INTEGER NOT NULL
) STRICT;

-- Sessions: the calls of an agent to an inference engine, recorded until its rollout is finished.

CREATE TABLE session (
    session_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id BLOB NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('open', 'finishing', 'finished', 'aborted', 'expired')),
    reason TEXT,
    -- JSON: what the session was opened with.
    spec TEXT NOT NULL,
    content_digest BLOB NOT NULL,
    max_calls INTEGER NOT NULL,
    idle_s INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    -- Stored bytes of the calls, and what the segments of the session will have at most.
    bytes INTEGER NOT NULL,
    segments INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    -- Whether a call was refused because a bound of the session was reached.
    is_full INTEGER NOT NULL,
    -- What happened to the calls, also to those that were refused: the sum of numbers for each kind.
    notes INTEGER NOT NULL DEFAULT 0,
    opened_us INTEGER NOT NULL,
    last_call_us INTEGER,
    expires_us INTEGER NOT NULL,
    -- When the sweep ends it; null once it has ended.
    due_us INTEGER,
    ended_us INTEGER,
    end_digest BLOB,
    -- JSON: the answer to the call that ended it.
    outcome TEXT,
    -- When its calls and keys are deleted, and when this row is.
    purge_us INTEGER,
    forget_us INTEGER,
    CHECK ((state IN ('open', 'finishing')) = (due_us IS NOT NULL)),
    CHECK ((state IN ('open', 'finishing')) = (ended_us IS NULL))
) STRICT;

CREATE INDEX session_due ON session (due_us) WHERE due_us IS NOT NULL;
CREATE INDEX session_purge ON session (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX session_forget ON session (forget_us) WHERE forget_us IS NOT NULL;

-- The policies whose rollouts a session records.
CREATE TABLE session_policy (
    session_pk INTEGER NOT NULL REFERENCES session (session_pk),
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    run INTEGER NOT NULL,
    rollout_key BLOB NOT NULL,
    group_key BLOB NOT NULL,
    group_size INTEGER NOT NULL,
    admission_id BLOB NOT NULL,
    version INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    -- Ids that were sampled in its calls.
    sampled INTEGER NOT NULL,
    -- Special tokens of the model in the texts of the calls.
    special_tokens INTEGER NOT NULL DEFAULT 0,
    -- JSON: warnings about the calls, a list of texts.
    warnings TEXT,
    is_live INTEGER NOT NULL,
    PRIMARY KEY (session_pk, policy_pk)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX session_policy_rollout ON session_policy (policy_pk, run, rollout_key);
CREATE INDEX session_policy_group ON session_policy (policy_pk, run, group_key) WHERE is_live = 1;
CREATE INDEX session_policy_by_policy ON session_policy (policy_pk, session_pk);

-- A secret is never here, only its hash.
CREATE TABLE session_key (
    hash BLOB PRIMARY KEY,
    session_pk INTEGER NOT NULL REFERENCES session (session_pk)
) STRICT, WITHOUT ROWID;

CREATE INDEX session_key_by_session ON session_key (session_pk);

-- A prompt is the first `shared` ids of the prompt and ids of the call `parent`, and the tail in `body`.
CREATE TABLE session_call (
    call_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    session_pk INTEGER NOT NULL REFERENCES session (session_pk),
    seq INTEGER NOT NULL,
    policy_pk INTEGER NOT NULL,
    parent INTEGER,
    shared INTEGER NOT NULL,
    prompt INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    agent TEXT,
    dialect TEXT NOT NULL,
    model TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    stopped_on_token INTEGER NOT NULL,
    delivered INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    ended_us INTEGER NOT NULL,
    body_digest BLOB NOT NULL,
    digest BLOB NOT NULL,
    -- Packed ids, log-probabilities and versions.
    body BLOB NOT NULL,
    -- Compressed JSON.
    request BLOB NOT NULL,
    response BLOB NOT NULL,
    UNIQUE (session_pk, seq)
) STRICT;

CREATE INDEX session_call_by_digest ON session_call (session_pk, body_digest, seq);

-- The state of foreign protocols that is not data: which trainer and which environments have registered, and how far
-- a trainer has read. Each is one document, changed by compare-and-set.
CREATE TABLE facade_state (
    -- The protocol and the policy.
    name TEXT NOT NULL PRIMARY KEY,
    -- One more with every change.
    revision INTEGER NOT NULL CHECK (revision > 0),
    -- JSON.
    body TEXT NOT NULL
) STRICT;

-- What the live page shows: what happened over time, the steps of trainers, and who waits.

-- The totals of all tallies of a policy at the beginning of a minute, if any of them had changed. They are totals and
-- not
-- differences, so that rows can be deleted and all sums stay right. An ordinary table: WITHOUT ROWID, rows of a
-- kilobyte would take an overflow page each.
CREATE TABLE history (
    history_pk INTEGER PRIMARY KEY,
    policy_pk INTEGER NOT NULL,
    minute INTEGER NOT NULL,
    -- The changes since the row before were made in this minute or later.
    since INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    -- The minute in which the row is deleted. The newest row of a policy stays.
    keep_until INTEGER NOT NULL,
    -- JSON, by the names of the tallies: the value, or the value and the amount.
    body TEXT NOT NULL,
    UNIQUE (policy_pk, minute)
) STRICT;

CREATE INDEX history_keep ON history (keep_until);

-- The last minute for which a replica wrote rows.
CREATE TABLE history_mark (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    minute INTEGER NOT NULL
) STRICT;

INSERT INTO history_mark (only_row, minute) VALUES (1, 0);

-- What the batches of a step had in all, written by their acks.
CREATE TABLE step_log (
    policy_pk INTEGER NOT NULL,
    run INTEGER NOT NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    -- Of the last batch.
    acked_us INTEGER NOT NULL,
    batches INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    -- Groups of several rewards that are all equal.
    flat_groups INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    reward_sum REAL NOT NULL,
    reward_count INTEGER NOT NULL,
    -- Mean of the rewards that arrived before the cut, weighted by the rollouts of the batches.
    all_mean REAL,
    stale_sum INTEGER NOT NULL,
    stale_max INTEGER NOT NULL,
    waited_us INTEGER NOT NULL,
    held_us INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    version INTEGER NOT NULL,
    -- 1 if a resume went back before this step.
    undone INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, run, step, epoch)
) STRICT, WITHOUT ROWID;

-- What operators and time did to a policy.
CREATE TABLE journal (
    journal_pk INTEGER PRIMARY KEY AUTOINCREMENT,
    policy_pk INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    kind TEXT NOT NULL,
    key_id TEXT,
    -- JSON.
    body TEXT NOT NULL
) STRICT;

CREATE INDEX journal_by_policy ON journal (policy_pk, journal_pk);

-- Consumers that wait for a batch, at whichever replica.
CREATE TABLE waiting_consumer (
    policy_pk INTEGER NOT NULL,
    consumer TEXT NOT NULL,
    since_us INTEGER NOT NULL,
    asked_us INTEGER NOT NULL,
    -- From then on it does not wait any more, unless it has asked again.
    until_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, consumer)
) STRICT, WITHOUT ROWID;

CREATE INDEX waiting_consumer_by_policy ON waiting_consumer (policy_pk, until_us);
