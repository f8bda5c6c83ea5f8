//! The durable half: one atomic operation per method, on SQLite or Postgres.
//!
//! Separate from [`buffer`](crate::buffer) so that the domain never mentions SQL and no transaction handle crosses the
//! trait. A decision that must be made under a lock is a pure function handed in ([`Decide`]). The store never mints an
//! id, and time is an argument.
//!
//! Read [`Store`] first, then one file of `ops`; [`dialect`] holds everything in which the databases differ.

mod backup;
mod dialect;
mod gather;
mod health;
mod model;
mod ops;
mod restore;
mod rules_cache;
mod sql;
mod sql_store;
mod staging;
mod tally;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use async_trait::async_trait;
use sqlx::migrate::MigrateError;
use tokio::sync::watch;

pub use backup::{BackupError, backup};
pub use health::Health;
pub use model::{
    Admit, Batch, BatchFilter, BatchMember, BundleOutcome, Claim, ClaimAnswer, Claimed, ClockReading, Contradiction,
    Counts, Decide, Examination, ExistingPolicy, Expired, Group, GroupFilter, Ingest, Ingested, KeyFilter, LeaseProof,
    Page, Policy, Publish, Resume, Resumed, RulesOfGroups, RulesWritten, StoredPayload, Story, StoryFilter, Tallies,
    WaitingFor, WriteRules,
};
pub use restore::{RestoreError, Restored, restore};

use self::sql_store::SqlStore;
use crate::{
    access::key::{KeyId, NewKey, StoredKey},
    buffer::{
        admission::Admitted,
        finalize::Cause,
        ids::{BatchId, Epoch, GroupId, GroupPk, PolicyName, PolicyPk, RolloutPk, Run, Step},
        payload::Codec,
        refusal::Refusal,
        replicas::{Heard, WakeUp},
    },
    clock::Timestamp,
    metrics::StoreMetrics,
};

/// An answer, or a refusal of the domain that changed nothing.
pub type Answer<T> = Result<Result<T, Refusal>, StoreError>;

/// The operations of the buffer, each atomic and durable when it answers.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Stage 2: stores bundles, each all or nothing, and decides the groups that they complete.
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError>;
    /// Reserves room for rollouts that are about to start.
    async fn admit(&self, admit: Admit) -> Answer<Admitted>;
    /// Stage 3, by hand: decides an open group as if it had timed out.
    async fn close_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        decide: Arc<dyn Decide>,
        now: Timestamp,
    ) -> Answer<Group>;
    /// Discards a group that is open, ready or quarantined.
    async fn discard_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        reason: String,
        now: Timestamp,
    ) -> Answer<Group>;
    /// Stage 4 and 5: gives the batch that the request holds, one that came back, or a new one, in this order.
    async fn claim(&self, claim: Claim) -> Answer<ClaimAnswer>;
    /// Heartbeat.
    async fn extend(&self, proof: LeaseProof, ttl_s: u64) -> Answer<Batch>;
    /// The batch was consumed by a step.
    async fn ack(&self, proof: LeaseProof, step: Step) -> Answer<Batch>;
    /// The batch is given back; named groups are quarantined and the batch is split.
    async fn nack(&self, proof: LeaseProof, reason: Option<String>, groups: Vec<GroupId>) -> Answer<Batch>;
    /// A quarantined batch, or the quarantined groups of a split one, come back with a fresh count.
    async fn readmit(&self, batch_id: BatchId) -> Answer<Batch>;
    /// A payload of this group is damaged: the group is quarantined before it is delivered.
    async fn quarantine_damaged(&self, batch_id: BatchId, group: GroupPk) -> Result<(), StoreError>;
    /// Stage 6: what was acked at or before the step is settled; the last settled step and the batches settled now.
    async fn checkpoint(
        &self,
        policy: PolicyName,
        step: Step,
        force: bool,
        epoch: Option<Epoch>,
        now: Timestamp,
    ) -> Answer<(Step, u64)>;
    /// A trainer starts from a step.
    async fn resume(&self, resume: Resume) -> Answer<Resumed>;
    /// A fresh start of the policy; the new run and epoch and the groups discarded.
    async fn reset(&self, policy: PolicyName, epoch: Option<Epoch>, now: Timestamp) -> Answer<(Run, Epoch, u64)>;
    /// Every policy begins an epoch, this one or a later one, and its leases end; how many policies there are.
    async fn begin_epochs(&self, first: Epoch) -> Result<u64, StoreError>;
    /// A new weight version; true unless it was an identical repeat.
    async fn publish(&self, publish: Publish) -> Answer<bool>;

    /// Writes the rules of a policy, which is created where it does not exist.
    async fn write_rules(&self, write: WriteRules) -> Answer<RulesWritten>;
    /// One policy.
    async fn policy(&self, name: PolicyName) -> Result<Option<Policy>, StoreError>;
    /// Policies after a name, in order.
    async fn policies(&self, after: String, limit: u32) -> Result<Vec<Policy>, StoreError>;
    /// Tallies of every policy, or of one.
    async fn tallies(&self, policy: Option<PolicyPk>) -> Result<BTreeMap<PolicyName, Tallies>, StoreError>;
    /// What a trainer of the policy is waiting for.
    async fn waiting_for(&self, policy: PolicyPk, run: Run, now: Timestamp) -> Result<WaitingFor, StoreError>;

    /// One batch.
    async fn batch(&self, batch_id: BatchId) -> Result<Option<Batch>, StoreError>;
    /// Batches in the order in which they were cut.
    async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, StoreError>;
    /// Stage 5: the rollouts of a batch in order, without payloads; none when payloads are purged.
    async fn batch_members(&self, batch: Batch) -> Result<Option<Vec<BatchMember>>, StoreError>;
    /// Payloads of rollouts, in the order asked for; missing ones are left out.
    async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError>;

    /// Rollouts in the order in which they arrived.
    async fn stories(&self, filter: StoryFilter) -> Result<Page<Story>, StoreError>;
    /// Groups in the order in which they were opened.
    async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, StoreError>;

    /// Stores a key, unless `live_max` are there that are not revoked.
    async fn create_key(&self, key: NewKey, live_max: u32) -> Answer<StoredKey>;
    /// Keys in the order in which they were created.
    async fn keys(&self, filter: KeyFilter) -> Result<Vec<StoredKey>, StoreError>;
    /// Revokes a key; the key as it is then, or none of this id. A repeat changes nothing.
    async fn revoke_key(&self, key_id: KeyId, now: Timestamp) -> Result<Option<StoredKey>, StoreError>;
    /// Writes when keys were last accepted; an earlier time than the written one changes nothing.
    async fn write_key_uses(&self, uses: Vec<(KeyId, Timestamp)>) -> Result<(), StoreError>;

    /// Sweep: whether time has made anything due; reads only, so that an idle service writes nothing.
    async fn anything_due(&self, now: Timestamp) -> Result<bool, StoreError>;
    /// Sweep: adds changes of tallies that were appended to the tallies themselves, on the database that appends them.
    async fn fold_tallies(&self) -> Result<(), StoreError>;
    /// Sweep: leases past their end come back, up to `limit`.
    async fn expire_leases(&self, now: Timestamp, limit: u32) -> Result<Expired, StoreError>;
    /// Sweep: open groups past their deadline, up to `limit`.
    async fn overdue_groups(&self, now: Timestamp, limit: u32) -> Result<Vec<GroupPk>, StoreError>;
    /// Sweep: decides an overdue group; its policy and state, or none if somebody else did.
    async fn decide_overdue(
        &self,
        group: GroupPk,
        cause: Cause,
        decide: Arc<dyn Decide>,
        now: Timestamp,
    ) -> Result<Option<(PolicyName, Group)>, StoreError>;
    /// Sweep: purges payloads and forgets tombstones that are due, up to `limit` groups each; how many were done.
    async fn retire(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
    /// Sweep: gives back the room of admissions past their end, up to `limit`; how many there were.
    async fn expire_admissions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
    /// Sweep: discards groups that a post slipped into a run that `reset` had just ended.
    async fn discard_stragglers(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;

    /// Upkeep: rules that no policy has now, up to `limit`.
    async fn superseded_rules(&self, limit: u32) -> Result<Vec<i64>, StoreError>;
    /// Upkeep: which rules the groups after one have, up to `limit` groups.
    async fn rules_of_groups(&self, after: GroupPk, limit: u32) -> Result<RulesOfGroups, StoreError>;
    /// Upkeep: deletes rules, except those of policies; how many were deleted.
    async fn forget_rules(&self, rules: Vec<i64>) -> Result<u64, StoreError>;

    /// Diagnosis: reads every row and compares it with what others say of it.
    async fn examine(&self) -> Result<Examination, StoreError>;
    /// Diagnosis: what the database says of its own file.
    async fn integrity(&self) -> Result<Vec<String>, StoreError>;
    /// Diagnosis: the rollouts with payloads of the groups after one, `groups` groups at a time.
    async fn group_members(&self, after: GroupPk, groups: u32) -> Result<Vec<BatchMember>, StoreError>;
    /// The clock that replicas share, and how far the service has come.
    async fn read_clock(&self) -> Result<ClockReading, StoreError>;
    /// The service has reached a time: written if anything else was since the last mark, or if it answers a question.
    async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError>;
    /// Replaces the offset of service time at a time that was reached, unless it is another one by then.
    async fn correct_clock(&self, from_us: i64, to_us: i64, now: Timestamp) -> Result<bool, StoreError>;
    /// Asks running replicas to look at the clock; the number of the question.
    async fn ask_clock(&self) -> Result<i64, StoreError>;
    /// The form in which payloads are to be packed for it.
    fn payload_codec(&self) -> Codec;
    /// The way to the other replicas, where the database can be shared.
    fn peers(&self) -> Option<Arc<dyn Peers>>;
    /// What the last writes say about the next.
    fn health(&self) -> watch::Receiver<Health>;
    /// Answers when the store can read and write; after a failed write, by writing.
    async fn ping(&self) -> Result<(), StoreError>;
    /// Flushes and closes; calls after it fail.
    async fn close(&self);
}

/// The way to the replicas that share the database. What is lost on it costs time alone.
#[async_trait]
pub trait Peers: Send + Sync + 'static {
    /// Tells all replicas, this one included.
    async fn tell(&self, wake_ups: Vec<WakeUp>) -> Result<(), StoreError>;
    /// Hands over what is told, until the store is closed.
    async fn listen(&self, heard: &(dyn Fn(Heard) + Send + Sync));
}

/// The store cannot answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// Postgres failed; whether a commit happened is known only by looking.
    #[error("the database failed: {0}")]
    Database(Arc<sqlx::Error>),
    /// A SQLite file failed; whether a commit happened is known only by looking.
    #[error("the database failed: {0}")]
    Sqlite(Arc<rusqlite::Error>),
    /// A file of the database was removed or replaced while it was open.
    #[error("{0}")]
    Displaced(String),
    /// A row says something that the schema and this version rule out.
    #[error("the store is corrupt: {0}")]
    Corrupt(String),
    /// The store is closed or closing.
    #[error("the store is closed")]
    Closed,
}

impl StoreError {
    /// The database sacrificed this transaction to another one: running it again may succeed.
    fn is_conflict(&self) -> bool {
        // unique_violation: two replicas created the same row at once, and the loser must look again.
        const CONFLICTS: [&str; 3] = ["40001", "40P01", "23505"];
        let Self::Database(error) = self else { return false };
        let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
        code.is_some_and(|code| CONFLICTS.contains(&code.as_str()))
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(Arc::new(error))
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(Arc::new(error))
    }
}

/// The store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL names no database that this build knows.
    #[error("database `{0}` is not `sqlite:PATH`, `sqlite::memory:` or `postgres://...`")]
    Url(String),
    /// The file is not there, and is not to be made.
    #[error("database {0} does not exist")]
    Missing(String),
    /// The folder of the file is not there: most likely the path is mistyped.
    #[error("the folder {folder} of database {name} does not exist: correct the path, or create the folder")]
    NoFolder {
        /// The file.
        name: String,
        /// The folder.
        folder: String,
    },
    /// The server does not answer, or does not let this service in.
    #[error("cannot open database {name}: {why}")]
    Unreachable {
        /// The database.
        name: String,
        /// What it answered.
        why: String,
    },
    /// A file or folder cannot be used.
    #[error("cannot use {name}")]
    File {
        /// The file.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// Another process has the file.
    #[error("database {0} is locked: another forebay serves it")]
    Locked(String),
    /// The write-ahead log beside the file is not the file's own.
    #[error("{0}")]
    Log(String),
    /// The database cannot be opened: damaged, not a database, or unreachable.
    #[error("cannot open database {name}")]
    Database {
        /// The database.
        name: String,
        /// Why.
        source: sqlx::Error,
    },
    /// A SQLite file cannot be used.
    #[error("cannot use database {name}")]
    Sqlite {
        /// The database.
        name: String,
        /// Why.
        source: rusqlite::Error,
    },
    /// A newer version wrote the database.
    #[error("database {name} was written by a newer forebay (schema {version}): upgrade, or restore a backup")]
    Newer {
        /// The database.
        name: String,
        /// Number of the unknown migration.
        version: i64,
    },
    /// The schema cannot be brought up to date.
    #[error("cannot migrate database {name}")]
    Schema {
        /// The database.
        name: String,
        /// Why.
        source: Box<MigrateError>,
    },
    /// The database runs with settings on which no promise can rest.
    #[error("{0}")]
    Settings(String),
}

impl OpenError {
    fn file(path: &Path, source: std::io::Error) -> Self {
        Self::File { name: path.display().to_string(), source }
    }

    fn database(path: &Path, source: sqlx::Error) -> Self {
        Self::Database { name: path.display().to_string(), source }
    }

    fn schema(name: &str, source: MigrateError) -> Self {
        match source {
            MigrateError::VersionMissing(version) | MigrateError::VersionTooNew(version, _) => {
                Self::Newer { name: name.to_owned(), version }
            }
            MigrateError::Execute(source) => Self::Database { name: name.to_owned(), source },
            source => Self::Schema { name: name.to_owned(), source: Box::new(source) },
        }
    }
}

/// A store that was opened.
pub struct Opened {
    /// The store.
    pub store: Arc<dyn Store>,
    /// There was no database before, and there is an empty one now.
    pub is_new: bool,
}

/// Opens the database that a URL names, and creates it where there is none, in a folder that exists.
pub async fn open(url: &str, metrics: StoreMetrics) -> Result<Arc<dyn Store>, OpenError> {
    open_or_create(url, metrics).await.map(|opened| opened.store)
}

/// The same, and tells whether it was created.
pub async fn open_or_create(url: &str, metrics: StoreMetrics) -> Result<Opened, OpenError> {
    let (store, is_new): (Arc<dyn Store>, bool) = match Place::of(url)? {
        Place::Temporary => (Arc::new(SqlStore::new(dialect::Sqlite::open_temporary(metrics).await?)), true),
        Place::File(path) => {
            check_folder(url)?;
            let is_new = !path.exists();
            (Arc::new(SqlStore::new(dialect::Sqlite::open(path, metrics).await?)), is_new)
        }
        Place::Postgres => {
            let is_new = dialect::Postgres::probe(url).await?;
            (Arc::new(SqlStore::new(dialect::Postgres::open(url, metrics).await?)), is_new)
        }
    };
    Ok(Opened { store, is_new })
}

/// Opens the database that a URL names; a file that is not there is not made.
pub async fn open_existing(url: &str, metrics: StoreMetrics) -> Result<Arc<dyn Store>, OpenError> {
    match Place::of(url)? {
        Place::File(path) if !path.exists() => Err(OpenError::Missing(path.display().to_string())),
        _ => open(url, metrics).await,
    }
}

/// Whether a URL has a form that names a database.
pub fn check_url(url: &str) -> Result<(), OpenError> {
    match Place::of(url)? {
        Place::Postgres => dialect::Postgres::check_url(url),
        Place::File(_) | Place::Temporary => Ok(()),
    }
}

/// Whether the folder of a file is there. A mistyped path makes neither folders nor an empty database.
pub fn check_folder(url: &str) -> Result<(), OpenError> {
    let Place::File(path) = Place::of(url)? else { return Ok(()) };
    match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) if !folder.is_dir() => {
            Err(OpenError::NoFolder { name: path.display().to_string(), folder: folder.display().to_string() })
        }
        _ => Ok(()),
    }
}

/// What a database URL names.
enum Place<'u> {
    Temporary,
    File(&'u Path),
    Postgres,
}

impl<'u> Place<'u> {
    fn of(url: &'u str) -> Result<Self, OpenError> {
        let path = url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
        match path {
            _ if url == "sqlite::memory:" => Ok(Self::Temporary),
            Some(path) if !path.is_empty() => Ok(Self::File(Path::new(path))),
            _ if url.starts_with("postgres://") || url.starts_with("postgresql://") => Ok(Self::Postgres),
            _ => Err(OpenError::Url(redact(url))),
        }
    }
}

/// The file that a URL names, if it names one.
fn sqlite_path(url: &str) -> Option<&Path> {
    match Place::of(url) {
        Ok(Place::File(path)) => Some(path),
        _ => None,
    }
}

/// A database URL as it may be shown: without the password and without parameters, which may hold one as well.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let rest = match rest.rsplit_once('@') {
        // The user ends at the first colon, the password at the last at-sign.
        Some((user, host)) => format!("{}@{host}", user.split(':').next().unwrap_or_default()),
        None => rest.to_owned(),
    };
    format!("{scheme}://{}", rest.split('?').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::redact;

    #[test]
    fn passwords_stay_out_of_messages() {
        assert_eq!(redact("postgres://me:se:cret@db/forebay"), "postgres://me@db/forebay");
        assert_eq!(redact("postgres://me:p@ss@db/forebay"), "postgres://me@db/forebay");
        assert_eq!(redact("postgres://db/forebay?user=me&password=secret"), "postgres://db/forebay");
        assert_eq!(redact("postgers://me:secret@db/forebay"), "postgers://me@db/forebay");
        assert_eq!(redact("postgres://db/forebay"), "postgres://db/forebay");
        assert_eq!(redact("sqlite:data/forebay.db"), "sqlite:data/forebay.db");
    }
}
