PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE _sqlx_migrations (
    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    success BOOLEAN NOT NULL,
    checksum BLOB NOT NULL,
    execution_time BIGINT NOT NULL
);
INSERT INTO _sqlx_migrations VALUES(1,'ledger','2026-11-22 10:10:42',1,X'34829929b72e7342d688b6a2ed1686ee6b2d05b8c38895cb5150c80ad0c69edbc1635864a93be07a2f6a95344182d7fd',178852418);
INSERT INTO _sqlx_migrations VALUES(2,'overload','2026-11-22 10:10:42',1,X'e12b87c9baaae3a3a8f3b6bf872d992b5226d9325f52df9090fe9078c4047c9d3d627085842eb9769cbb550a31059a68',95888883);
INSERT INTO _sqlx_migrations VALUES(3,'keys','2026-11-22 10:10:42',1,X'9ec6d064bd60ae5d3878d6d71e2385d77508d185a721688c8eb57dde06a55ac095784f3f4f0cb0d3bc76e1e51f5a96b0',51945001);
INSERT INTO _sqlx_migrations VALUES(4,'seals','2026-11-22 10:10:42',1,X'9bdfc6fd8021b1636e1b4eae012504f55577f509eb260fbd2edc1509aa8eaa64d9fdec731cc7623f65be14ff88413743',80883180);
INSERT INTO _sqlx_migrations VALUES(5,'orders','2026-11-22 10:10:42',1,X'119886114af16eb7e52ad4bf75275dd365c7aa0bce8e5abe501e60f8b0fc0f667021b44f1f168f1d4e449fe0635910c9',59641872);
INSERT INTO _sqlx_migrations VALUES(6,'key form','2026-11-22 10:10:43',1,X'79ac830a221f576be808e4f793d690618638ba406ee3041d23b5574802edce6ffcf5916d49cd8acfa9a129c990cab6d7',95312905);
INSERT INTO _sqlx_migrations VALUES(7,'lineage and clock','2026-11-22 10:10:43',1,X'5c06fef68c6c845a6545173e43980a25296ec75aa2e5964af0ad45383f608228655c00696e222cbeb2bbe4a02288e5cf',92120560);
INSERT INTO _sqlx_migrations VALUES(10,'tally changes','2026-11-22 10:10:43',1,X'c7d5c4c9c3c1803bd8c9cb317c898aada22306f96831b47d2e6204872d2bd57b07841d3ad425025595852a7475fa0df3',20591718);
INSERT INTO _sqlx_migrations VALUES(11,'restored epoch','2026-11-22 10:10:43',1,X'3002e00c4eedf1714add6ecafb255705dcc8ee041861b983ef4a229e462506e6dec5107eaf19bb3236deec415192038d',43798813);
CREATE TABLE rules (
    rules_pk INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    created_us INTEGER NOT NULL
) STRICT;
INSERT INTO rules VALUES(1,'{"require":["tokens"],"group":{"size":1,"timeout_s":3600,"on_drop":"refill"},"batch":{"groups":1,"order":"fifo"},"lease":{"ttl_s":600,"max_deliveries":5,"max_resumes":20},"advantage":"grpo","loss_weighting":"rollout_mean","staleness":{"action":"drop"},"backlog":{"max_ready_rollouts":65536,"max_bytes":8589934592},"settle":"checkpoint","retention":{"trained_s":604800,"settled_s":3600,"dropped_s":0,"tombstone_s":604800},"filter":[]}',1795342243714654);
INSERT INTO rules VALUES(2,'{"require":[],"group":{"size":3,"timeout_s":3600,"on_drop":"refill"},"batch":{"groups":1,"order":"fifo"},"lease":{"ttl_s":86400,"max_deliveries":5,"max_resumes":20},"advantage":"grpo","loss_weighting":"rollout_mean","staleness":{"max":8,"action":"mask"},"backlog":{"max_ready_rollouts":65536,"max_bytes":8589934592},"settle":"checkpoint","retention":{"trained_s":604800,"settled_s":3600,"dropped_s":0,"tombstone_s":604800},"filter":[{"name":"cut","scope":"rollout","when":"status == \"truncated\"","action":"mask"},{"name":"infra","scope":"rollout","when":"status == \"aborted\"","action":"drop"}]}',1795342244216370);
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
, steps_known INTEGER NOT NULL DEFAULT 0, restored_epoch INTEGER) STRICT;
INSERT INTO policy VALUES(1,'default',2,1,0,0,NULL,NULL,NULL,NULL,'{"rewards":5,"reward_sum":1.75,"dropped":{"infra":1}}',1795342243714654,0,NULL);
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
    acked_us INTEGER, resumes INTEGER NOT NULL DEFAULT 0,
    CHECK ((state = 'leased') = (expires_us IS NOT NULL))
) STRICT;
INSERT INTO batch VALUES(1,X'01a202bc9d78733d955fe43d70a47640',1,1,'leased',NULL,'fa889d3226ad4330a8de7416ebf525d6','fixture','fixture',0,86400,1795428645240036,1,0,NULL,1,3,4,15,'rollout_mean',1.0,4,6,0,0,1,'{"dropped/infra":1.0,"reward/all":0.35,"reward/trained":0.625,"staleness/max":0.0,"staleness/mean":0.0}',1247,1795342245240036,NULL,0);
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
    forget_us INTEGER, mask_below INTEGER, seal BLOB, resumes INTEGER NOT NULL DEFAULT 0,
    UNIQUE (policy_pk, run, group_key),
    CHECK ((state = 'open') = (deadline_us IS NOT NULL)),
    CHECK (state <> 'ready' OR ready_seq IS NOT NULL),
    CHECK (state <> 'batched' OR batch_pk IS NOT NULL)
) STRICT;
INSERT INTO rollout_group VALUES(1,1,1,X'67726f7570','group',2,NULL,'batched',NULL,NULL,3,3,2,1,1,1,1247,1795342244539136,NULL,1795342245003860,1,4,4,15,6,1.25,2,0,1,0,1,1,NULL,NULL,NULL,NULL,X'e37c8bed1e22f268dd3611c99c5d180d',0);
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
    received_us INTEGER NOT NULL, trained_spans TEXT, seal BLOB,
    UNIQUE (policy_pk, run, rollout_key)
) STRICT;
INSERT INTO rollout VALUES(1,1,1,X'61626f72746564','aborted',1,'dropped','infra',NULL,0.0,NULL,X'11eab26f73977e3b6e3493399baa60f923949acdedcb488dc4fe5370d734e64d',0,1,NULL,NULL,1,1,4,2,315,1795342244539136,NULL,X'7e61734a9d024af7b403caf9df7085a9');
INSERT INTO rollout VALUES(2,1,1,X'636f6d706c65746564','completed',1,'kept',NULL,NULL,1.0,1.1208949227935947057,X'372ea1ceb069dacf6585bae3d1e25a17546312f1ec07afee692b2ec8b03e7ecf',0,0,0,1,2,2,7,4,626,1795342244706217,'[[0,0,1],[0,1,1],[1,0,2]]',X'62fb9dbdcc080a3d0285ba28eb218995');
INSERT INTO rollout VALUES(3,1,1,X'7472756e6361746564','truncated',1,'masked','cut',NULL,0.0,-0.80063923056685348811,X'2e7068a52c1c8e51016a29ecceea83400fe1fdb5ad0c84512ea52fc82241ef91',0,1,NULL,NULL,1,1,4,2,317,1795342244836014,NULL,X'6acae10037a88c47cbc67168fdcf6a2b');
INSERT INTO rollout VALUES(4,1,1,X'6661696c6564','failed',1,'kept',NULL,NULL,0.25,-0.32025569222674138414,X'aa1e798cba051caef09c744d7431e3640e0876cac55fd29e0f9e092be0fff20f',0,1,0,0,1,1,4,2,314,1795342245003860,'[[0,0,2]]',X'6d14d9a8d88effd8b70bf2170557d4ea');
INSERT INTO rollout VALUES(5,1,1,X'6c617465','late',1,'late','group-decided',NULL,0.5,NULL,X'6436011ddcd20f86ac33615cd20d6ab2be4e6643814dcd4bdb40deb0fd4f3000',0,1,NULL,NULL,1,1,4,2,317,1795342245086600,NULL,X'2bb2821c0d3bead273d11479d5a4d332');
CREATE TABLE payload (
    rollout_pk INTEGER PRIMARY KEY REFERENCES rollout (rollout_pk),
    codec INTEGER NOT NULL,
    digest BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;
INSERT INTO payload VALUES(2,2,X'8dbd7140de945877c5faab8b1c1565fcdfe2af217fc2396b4414763bd83e6f6c',X'2d020000130000007b22656e7669726f6e6d656e74223a2266697874757265222c22737461747573223a22636f6d706c65746564222c2273616d706c696e67223a7b2274656d7065726174757265223a312e302c22746f705f70223a302e37352c22746f705f6b223a32307d2c227265776172645f636f6d706f6e656e7473223a7b22666f726d6174223a302e352c227465737473223a312e307d2c226d65737361676573223a5b7b22726f6c65223a202275736572222c2022636f6e74656e74223a2022685c7530306539227d5d2c226d65746164617461223a7b2261223a205b312c20322e352c206e756c6c2c20747275655d2c202262223a203132333435363738393031323334353637383930313233343536373839302c202263223a207b7d7d2c227365676d656e7473223a5b7b226b696e64223a227475726e222c22746f6b656e73223a342c22726573706f6e7365223a332c226c6f6770726f6273223a747275652c22746561636865725f6c6f6770726f6273223a66616c73652c2276616c756573223a66616c73652c2276657273696f6e73223a5b5b302c302c315d2c5b312c312c325d5d2c2269645f6279746573223a327d2c7b226b696e64223a6e756c6c2c22746f6b656e73223a332c22726573706f6e7365223a322c226c6f6770726f6273223a747275652c22746561636865725f6c6f6770726f6273223a747275652c2276616c756573223a747275652c2276657273696f6e73223a6e756c6c2c2269645f6279746573223a337d5d7d01000200030004000507000008000070110103000000bf000080be000000becdccccbdcdcc4cbe000000bf0000c0bf0000003f0000803e');
INSERT INTO payload VALUES(3,2,X'96ea30da436d5bcbbe3cb99109f96d2f64d71525f3cbc6aa56390db738a53011',X'1e010000090000007b22656e7669726f6e6d656e74223a6e756c6c2c22737461747573223a227472756e6361746564222c2273616d706c696e67223a7b2274656d7065726174757265223a312e302c22746f705f70223a312e302c22746f705f6b223a2d317d2c227265776172645f636f6d706f6e656e7473223a7b7d2c226d65737361676573223a6e756c6c2c226d65746164617461223a6e756c6c2c227365676d656e7473223a5b7b226b696e64223a6e756c6c2c22746f6b656e73223a342c22726573706f6e7365223a332c226c6f6770726f6273223a747275652c22746561636865725f6c6f6770726f6273223a66616c73652c2276616c756573223a66616c73652c2276657273696f6e73223a6e756c6c2c2269645f6279746573223a327d5d7d010002000300050005000000bf000080be000000be');
INSERT INTO payload VALUES(4,2,X'b794cf4085dac796aade0df27837f5e0e332ecf0e99aa49e0a2cc186da4b8373',X'1b010000090000007b22656e7669726f6e6d656e74223a6e756c6c2c22737461747573223a226661696c6564222c2273616d706c696e67223a7b2274656d7065726174757265223a312e302c22746f705f70223a312e302c22746f705f6b223a2d317d2c227265776172645f636f6d706f6e656e7473223a7b7d2c226d65737361676573223a6e756c6c2c226d65746164617461223a6e756c6c2c227365676d656e7473223a5b7b226b696e64223a6e756c6c2c22746f6b656e73223a342c22726573706f6e7365223a332c226c6f6770726f6273223a747275652c22746561636865725f6c6f6770726f6273223a66616c73652c2276616c756573223a66616c73652c2276657273696f6e73223a6e756c6c2c2269645f6279746573223a327d5d7d010002000300060005000000bf000080be000000be');
CREATE TABLE batch_group (
    batch_pk INTEGER NOT NULL REFERENCES batch (batch_pk),
    place INTEGER NOT NULL,
    group_pk INTEGER NOT NULL REFERENCES rollout_group (group_pk),
    PRIMARY KEY (batch_pk, place)
) STRICT, WITHOUT ROWID;
INSERT INTO batch_group VALUES(1,0,1);
CREATE TABLE tally (
    policy_pk INTEGER NOT NULL,
    name TEXT NOT NULL,
    slot INTEGER NOT NULL,
    value INTEGER NOT NULL,
    amount REAL NOT NULL,
    latest_us INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, name, slot)
) STRICT, WITHOUT ROWID;
INSERT INTO tally VALUES(1,'assumed_version',0,4,0.0,0);
INSERT INTO tally VALUES(1,'batch.leased',0,1,0.0,0);
INSERT INTO tally VALUES(1,'dropped.infra',0,1,0.0,0);
INSERT INTO tally VALUES(1,'group.batched',0,1,0.0,0);
INSERT INTO tally VALUES(1,'group.open',0,0,0.0,0);
INSERT INTO tally VALUES(1,'group.ready',0,0,0.0,0);
INSERT INTO tally VALUES(1,'live_bytes',0,1247,0.0,0);
INSERT INTO tally VALUES(1,'received',0,5,0.0,1795342245086600);
INSERT INTO tally VALUES(1,'reward',0,5,1.75,0);
INSERT INTO tally VALUES(1,'rollout.dropped',0,1,0.0,0);
INSERT INTO tally VALUES(1,'rollout.late',0,1,0.0,0);
INSERT INTO tally VALUES(1,'rollout.leased',0,3,0.0,0);
INSERT INTO tally VALUES(1,'rollout.open',0,0,0.0,0);
INSERT INTO tally VALUES(1,'rollout.ready',0,0,0.0,0);
CREATE TABLE recent (
    policy_pk INTEGER NOT NULL,
    minute INTEGER NOT NULL,
    name TEXT NOT NULL,
    slot INTEGER NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (policy_pk, minute, name, slot)
) STRICT, WITHOUT ROWID;
INSERT INTO recent VALUES(1,29922370,'dropped.infra',0,1);
CREATE TABLE ready_sequence (
    value INTEGER NOT NULL
) STRICT;
INSERT INTO ready_sequence VALUES(1);
CREATE TABLE admission (
    admission_pk INTEGER PRIMARY KEY,
    admission_id BLOB NOT NULL UNIQUE,
    policy_pk INTEGER NOT NULL REFERENCES policy (policy_pk),
    granted INTEGER NOT NULL,
    used INTEGER NOT NULL,
    version INTEGER NOT NULL,
    expires_us INTEGER NOT NULL,
    CHECK (used BETWEEN 0 AND granted)
) STRICT;
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
CREATE TABLE key_form (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    form TEXT NOT NULL CHECK (form IN ('hashed', 'ordered'))
) STRICT;
INSERT INTO key_form VALUES(1,'ordered');
CREATE TABLE service_clock (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    offset_us INTEGER NOT NULL,
    latest_us INTEGER NOT NULL,
    asked INTEGER NOT NULL,
    answered INTEGER NOT NULL
) STRICT;
INSERT INTO service_clock VALUES(1,0,1795342245539754,0,0);
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence VALUES('rollout_group',1);
INSERT INTO sqlite_sequence VALUES('rollout',5);
INSERT INTO sqlite_sequence VALUES('batch',1);
CREATE INDEX batch_by_policy ON batch (policy_pk, run, state, step);
CREATE INDEX batch_by_expiry ON batch (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX rollout_group_by_policy ON rollout_group (policy_pk, group_pk);
CREATE INDEX rollout_group_ready ON rollout_group (policy_pk, run, ready_seq) WHERE state = 'ready';
CREATE INDEX rollout_group_open ON rollout_group (policy_pk, run) WHERE state = 'open';
CREATE INDEX rollout_group_deadline ON rollout_group (deadline_us) WHERE deadline_us IS NOT NULL;
CREATE INDEX rollout_group_batch ON rollout_group (batch_pk) WHERE batch_pk IS NOT NULL;
CREATE INDEX rollout_group_purge ON rollout_group (purge_us) WHERE purge_us IS NOT NULL;
CREATE INDEX rollout_group_forget ON rollout_group (forget_us) WHERE forget_us IS NOT NULL;
CREATE INDEX rollout_by_group ON rollout (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON rollout (policy_pk, rollout_pk);
CREATE INDEX batch_group_by_group ON batch_group (group_pk);
CREATE INDEX recent_by_minute ON recent (minute);
CREATE INDEX admission_by_policy ON admission (policy_pk, expires_us);
CREATE INDEX admission_by_expiry ON admission (expires_us);
CREATE INDEX access_key_live ON access_key (key_pk) WHERE revoked_us IS NULL;
CREATE INDEX rollout_group_freshest
ON rollout_group (policy_pk, run, COALESCE(version_min, 9223372036854775807) DESC, ready_seq)
WHERE state = 'ready';
CREATE INDEX batch_returned ON batch (policy_pk, run, COALESCE(step, 9223372036854775807), batch_pk)
WHERE state = 'returned';
CREATE INDEX batch_in_order ON batch (policy_pk, batch_pk);
CREATE VIEW tally_now AS
SELECT policy_pk, name, value, amount, latest_us
FROM tally;
COMMIT;
