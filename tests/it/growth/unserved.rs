//! Statements that no request of the API runs: those that delete unused rules every ten minutes, those of a restore, those
//! for calls of agents, and those of facades.
//!
//! They run on a store in this process, where a subscriber receives their texts. In a service they would all be logged
//! only after it had looked for unused rules twice.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, Once, PoisonError},
};

use forebay::config::Config;
use forebay_domain::{
    batch::BatchSize,
    blobs::{self, KEPT_UNUSED_S, PIECE_BYTES},
    clock::{AnchoredClock, Clock as _, Timestamp},
    facades::FacadeState,
    formats::call::{CallColumns, pack_text},
    ids::{BlobDigest, Epoch, ExecutionId, GroupPk, PolicyName, RolloutId, Version},
    lease::Batch,
    lineage::Publish,
    looking::history::ReadHistory,
    rules::Rules,
    session::{
        CallHead, Delivery, FindAnswer, RecordCall, ReplayCall, ResumeSession, Session, SessionBounds, SessionFilter,
        SessionKeyHash, notes::SessionNotes,
    },
};
use forebay_service::{Buffer, lease::Holder, reading::Reader};
use forebay_store::{
    self as store, Store,
    ops::{
        blobs::{FindBlob, KeepBlobs, RetireBlobs, StorePieces, Stored},
        epochs::BeginEpochs,
        facades::{FindFacadeState, ListReadyGroups, NewestMembers, WriteFacadeState},
        policy::{FindPolicy, ListPolicies, PublishVersion},
        session::calls::{FindCalls, FindTexts, FindUnmarked, MarkCalls, MarkFull, NoteSession},
        unused_rules::{FindRulesOfGroups, ForgetRules, SupersededRules},
    },
};
use forebay_telemetry::metrics::Metrics;
use forebay_wire::PolicyRules;
use serde_json::json;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    subscriber::Interest,
};
use tracing_subscriber::{Layer, layer::Context, prelude::*};

use super::{Walked, named_in, names_of};
use crate::support::{rollout, with};

/// Files with statements that no request runs.
pub(super) const FILES: [&str; 10] = [
    "ops/blobs.rs",
    "unused_rules.rs",
    "epochs.rs",
    "session/attempts.rs",
    "session/calls.rs",
    "reads.rs",
    "executions.rs",
    "facades.rs",
    "history.rs",
    "steps.rs",
];

/// Runs the statements on the database of a stopped service. Returns each of them once.
pub(super) async fn walked(database: &str) -> Vec<Walked> {
    record();
    let store = store::open(database, Metrics::new().store()).await.expect("the store opens");
    let superseded = store.read(SupersededRules { limit: 10 }).await.expect("answered");
    assert!(!superseded.is_empty(), "the walk has replaced rules");
    let found = store.read(FindRulesOfGroups { after: GroupPk(0), limit: 10 }).await.expect("answered");
    let unused: Vec<i64> = superseded.into_iter().filter(|rules| !found.rules.contains(rules)).collect();
    store.write(ForgetRules(unused)).await.expect("answered");
    store.write(BeginEpochs(Epoch(1))).await.expect("answered");
    record_call(&store).await;
    read_by_name(store.clone()).await;
    keep_run(&store).await;
    take_snapshots(&store).await;
    upload(&store).await;
    store.close().await;
    // Other tests of this process run statements at the same time.
    let names = named_in(|path| FILES.iter().any(|file| path.ends_with(file)));
    let dialect = if database.starts_with("postgres") { Dialect::Postgres } else { Dialect::Sqlite };
    let told = TEXTS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let walked = told.into_iter().filter(|(of, _)| *of == dialect);
    let walked =
        walked.flat_map(|(_, text)| names_of(&text).into_iter().map(move |name| Walked { name, text: text.clone() }));
    walked.filter(|statement| names.contains(&statement.name)).collect()
}

/// Snapshots of policies that change, until the oldest is deleted, and a part of the history.
async fn take_snapshots(store: &Store) {
    let start = AnchoredClock::new().now().as_micros();
    let policy = PolicyName::default();
    // In one of sixty minutes, the oldest steps of the policy are deleted.
    let minutes = (1..=60).chain([100, 300_000]);
    for (version, minutes) in (1..).zip(minutes) {
        let now = Timestamp::from_micros(start + minutes * 60_000_000);
        let version = Version(1_000_000 + version);
        let publish =
            Publish { policy: policy.clone(), version, step: None, uri: None, epoch: None, force: false, now };
        store.write(PublishVersion(publish)).await.expect("answered").expect("it is above all others");
        store.snapshot(now).await.expect("written");
    }
    let policy = store.read(FindPolicy(policy)).await.expect("answered").expect("every service has it").policy_pk;
    let from = start / 60_000_000 - 60;
    store.read(ReadHistory { policy, from, to: from + 120, step: 1 }).await.expect("answered");
}

/// Uploads that go on, that are others than their digests say, and that expire.
async fn upload(store: &Store) {
    let (image, now) = (vec![7; PIECE_BYTES as usize + 1], AnchoredClock::new().now());
    let [right, wrong] = [&image[..], b"other"].map(|bytes| BlobDigest(*blake3::hash(bytes).as_bytes()));
    let bytes = image.len() as u64;
    let pieces =
        |from: usize, to: usize| vec![blobs::piece(bytes, from as u64 / PIECE_BYTES, image[from..to].to_vec().into())];
    for (digest, whole) in [(right, Stored::UpTo(bytes)), (wrong, Stored::Differs)] {
        let store_pieces = |first, pieces| StorePieces { digest, bytes, media_type: None, first, pieces, now };
        let first = store.write(store_pieces(0, pieces(0, PIECE_BYTES as usize))).await.expect("answered");
        assert_eq!(first, Stored::UpTo(PIECE_BYTES));
        assert!(store.write(KeepBlobs { uploads: [(digest, bytes)].into(), now }).await.expect("answered").len() == 1);
        let all = store.write(store_pieces(1, pieces(PIECE_BYTES as usize, image.len()))).await.expect("answered");
        assert_eq!(all, whole);
    }
    assert!(store.read(FindBlob(right)).await.expect("answered").is_some());
    let now = now.plus_seconds(2 * KEPT_UNUSED_S);
    assert!(store.write(RetireBlobs { now, limit: 10 }).await.expect("answered") > 0);
}

/// Reads a batch as a consumer that is known by its name.
async fn read_by_name(store: Arc<Store>) {
    let options = Config::parse("").expect("the defaults are valid").buffer;
    let buffer = Buffer::start(store, Arc::new(AnchoredClock::new()), Arc::new(Metrics::new()), options, Vec::new());
    let buffer = buffer.await.expect("the store can be used");
    let policy = PolicyName::parse("read").expect("it is a name");
    let rules = Rules::parse(PolicyRules::default()).expect("the defaults are valid");
    buffer.put_policy(policy.clone(), Arc::new(rules)).await.expect("written");
    let reader = Reader::new(policy.clone(), "walk").expect("it is a name");
    for name in ["acked", "returned"] {
        let sent = with(rollout(name, 1.0), json!({"policy": "read", "execution_id": "task"}));
        let sent = serde_json::from_value(sent).expect("it is a trajectory");
        let prepared = buffer.prepare(vec![sent]).expect("it is valid");
        buffer.ingest(prepared).await.expect("stored");
        let leased = buffer.lease(reader.request(BatchSize::Rules), || true).await.expect("answered");
        let Batch { batch_id, lease, .. } = leased.expect("a group is ready").batch;
        let holder = Holder { batch_id, lease: lease.expect("it was just leased"), epoch: None };
        buffer.release_read(&reader, holder).await.expect("the lease lives");
        let leased = buffer.lease(reader.request(BatchSize::Rules), || true).await.expect("answered");
        let Batch { batch_id, lease, .. } = leased.expect("it came back").batch;
        let holder = Holder { batch_id, lease: lease.expect("it was just leased"), epoch: None };
        buffer.mark_read(&reader, vec![holder]).await.expect("the lease lives");
        if name == "acked" {
            assert_eq!(buffer.ack_reads(&reader).await.expect("answered"), 1);
        }
    }
    assert_eq!(buffer.give_back_reads(&reader).await.expect("answered"), 1);
    let execution = ExecutionId::parse("task").expect("it is an id");
    let latest = buffer.latest_group(policy, execution).await.expect("answered");
    assert_eq!(latest.map(|latest| latest.group_id).as_deref(), Some("returned"));
}

/// Keeps the state of a foreign protocol, and reads the line of ready groups and the newest group of every policy.
async fn keep_run(store: &Store) {
    let name = || "atropos:walk".to_owned();
    for revision in 1..=2 {
        let state = FacadeState { revision, body: "{}".to_owned() };
        assert!(store.write(WriteFacadeState { name: name(), state }).await.expect("answered"));
    }
    assert_eq!(store.read(FindFacadeState { name: name(), known: 2 }).await.expect("answered"), None);
    let mut newest = 0;
    for policy in
        store.read(ListPolicies { after: String::new(), limit: 100, evaluations: true }).await.expect("answered")
    {
        store.read(ListReadyGroups { policy: policy.name.clone(), limit: 10 }).await.expect("answered");
        newest += store.read(NewestMembers { policy: policy.name }).await.expect("answered").len();
    }
    assert!(newest > 0, "some policy has a ready group");
}

/// Records a call in a session that the walk has left open, and begins another attempt of it.
async fn record_call(store: &Store) {
    let policy = PolicyName::parse("records").expect("it is a name");
    let rollout_id = Some(RolloutId::parse("kept").expect("it is an id"));
    let filter = SessionFilter { policy: policy.clone(), rollout_id, limit: 1, ..SessionFilter::default() };
    let found = store.read(filter).await.expect("answered").entries;
    let Session { session_pk, session_id, .. } = *found.first().expect("the walk has left a session open");
    let now = Timestamp::from_micros(1);
    let head = CallHead {
        agent: None,
        dialect: "chat".to_owned(),
        model: "any".to_owned(),
        finish_reason: "stop".to_owned(),
        stopped_on_token: true,
        body_digest: [0; 32],
        retry_count: 0,
        started_at: now,
    };
    let columns = CallColumns { tail: vec![1], ids: vec![2], logprobs: vec![0.0], ..CallColumns::default() };
    let (body, digest) = columns.pack();
    let record = RecordCall {
        session_pk,
        attempt: 1,
        policy,
        head,
        parent: None,
        shared: 0,
        prompt: 1,
        sampled: 1,
        oldest_version: None,
        special_tokens: 0,
        warnings: Vec::new(),
        body,
        digest,
        request: pack_text("{}"),
        response: pack_text("{}"),
        segments: 1,
        tokens: 2,
        bounds: SessionBounds { bytes_max: 1_000, segments_max: 10, tokens_max: 10 },
        now,
    };
    let call = store.write(record).await.expect("answered").expect("recorded");
    assert!(
        store
            .read(FindUnmarked { session: session_pk, ended_after: Timestamp::from_micros(0) })
            .await
            .expect("answered")
    );
    let find = FindAnswer {
        session_pk,
        attempt: 1,
        dialect: "chat".to_owned(),
        body_digest: [0; 32],
        retry_count: 1,
        sending: Vec::new(),
    };
    assert!(store.read(find).await.expect("answered").is_some());
    let key = SessionKeyHash::of("second");
    let resume = ResumeSession { session_id, key, after: Some(1), now };
    assert_eq!(store.write(resume).await.expect("answered").expect("it is open").attempt, 2);
    let replay = ReplayCall {
        session_pk,
        attempt: 2,
        equal: vec![1],
        before: Vec::new(),
        dialect: "chat".to_owned(),
        body_digest: [0; 32],
        retry_count: 0,
        now,
    };
    assert!(store.write(replay).await.expect("answered").expect("it is the last attempt").is_some());
    store.write(MarkCalls { calls: vec![call.call_pk], delivery: Delivery::Delivered }).await.expect("answered");
    assert_eq!(store.read(FindCalls { session: session_pk, after: 0, limit: 10 }).await.expect("answered").len(), 1);
    assert_eq!(store.read(FindTexts { session: session_pk, after: 0, limit: 10 }).await.expect("answered").len(), 1);
    store.write(MarkFull(session_pk)).await.expect("answered");
    store.write(NoteSession { session: session_pk, notes: SessionNotes::LONE_SURROGATES }).await.expect("answered");
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Dialect {
    Sqlite,
    Postgres,
}

static TEXTS: Mutex<BTreeSet<(Dialect, String)>> = Mutex::new(BTreeSet::new());

/// Starts to collect the texts of this process's named statements.
fn record() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing_subscriber::registry().with(Recorder).try_init().expect("no test has a subscriber of its own");
    });
}

struct Recorder;

impl<S: Subscriber> Layer<S> for Recorder {
    /// All other events are ignored, so that other tests are not slowed down.
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if metadata.target() == "sqlx::query" { Interest::always() } else { Interest::never() }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(None);
        event.record(&mut text);
        // SQLite's statements run without sqlx.
        let is_ours = event.metadata().module_path().is_some_and(|module| module.starts_with("forebay"));
        let dialect = if is_ours { Dialect::Sqlite } else { Dialect::Postgres };
        let text = text.0.map(|text| (dialect, text.trim().to_owned()));
        TEXTS.lock().unwrap_or_else(PoisonError::into_inner).extend(text);
    }
}

/// The statement of an event.
struct Text(Option<String>);

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "db.statement" {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}
