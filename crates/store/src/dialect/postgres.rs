//! Postgres: every operation is a transaction of its own, in a task that no caller can cancel.
//!
//! sqlx 0.9.0 would hand an open transaction to the next user of the connection if a `begin` were dropped, and HTTP
//! handlers are dropped whenever a client disconnects. Callers therefore only wait for the task. Transactions that the
//! database aborts because of a deadlock run again. Behind a pooler, no state is kept in a session of the server: see
//! [`session`] and `begin!`.
//!
//! Locks are `FOR NO KEY UPDATE`, so that checks of foreign keys do not wait for them. Rollouts and payloads have no
//! foreign keys, because Postgres checks each with a query that locks the row it finds, and these checks took about a
//! tenth of the time of ingest. They are inserted and deleted under the lock of their group, and the doctor finds rows
//! without their parent.
//!
//! When several keys are looked up, each is looked up in the index by itself (`CROSS JOIN LATERAL ... OFFSET 0`),
//! because without statistics Postgres prefers to read a range and to filter it.

mod channel;
mod migrate;
mod objects;
mod owner;
mod probe;
mod session;
mod tls;

use async_trait::async_trait;
use forebay_telemetry::metrics::StoreMetrics;
use sqlx::{Connection as _, PgConnection, PgPool, pool::PoolConnectionMetadata, postgres::PgPoolOptions};
use std::{sync::Arc, time::Duration};
use tracing::{Instrument as _, instrument};

use self::{
    channel::Channel,
    session::{Kind, Session},
};
use super::SqlDialect;
use crate::{
    error::{DatabaseFailure, StoreError, is_conflict},
    health::HealthReporter,
    object_care::ObjectCare,
    op::{AnyOp, AnyOutput},
    open::{
        error::OpenError,
        options::{PayloadKind, PayloadOptions},
        url::redact,
    },
    ops::tallies,
    peers::Peers,
    rules_cache::RulesCache,
    segment_files::{Objects, PlaceReader, Standing},
    sql::Tx,
};

/// Connections of one replica: twice the number of cores that a replica usually has on the database server.
const CONNECTIONS_MAX: u32 = 16;

/// How long a request waits for a connection before it is answered 503.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may have been idle and is used without a test, because it answered so lately.
const UNTESTED_MAX: Duration = Duration::from_secs(1);

/// The most runs of one operation, including the first, before a deadlock is reported.
const ATTEMPTS_MAX: u32 = 8;

/// Slots of one tally. With several slots, concurrent transactions seldom change the same row.
const TALLY_SLOTS: i64 = 16;

/// A database shared by any number of replicas.
#[derive(Debug)]
pub(crate) struct Postgres {
    pool: PgPool,
    sessions: Kind,
    rules: Arc<RulesCache>,
    metrics: StoreMetrics,
    health_reporter: HealthReporter,
    care: Option<Arc<ObjectCare>>,
}

/// Begins a transaction and sets its timeouts.
///
/// The timeouts are not startup parameters, because `PgBouncer` refuses those. They are not settings of the session
/// either, because a pooler may give each transaction another session, so only the transaction's own settings are
/// certain. The isolation level is named, because the database may have another default. The locks make READ COMMITTED
/// correct here, and serializable transactions would fail and run again whenever two of them conflict.
macro_rules! begin {
    ($mode:literal) => {
        concat!(
            "BEGIN ISOLATION LEVEL ",
            $mode,
            "; SET LOCAL statement_timeout = '60s'; SET LOCAL lock_timeout = '10s'; ",
            "SET LOCAL idle_in_transaction_session_timeout = '60s'"
        )
    };
}
const BEGIN_WRITE: &str = begin!("READ COMMITTED");
const BEGIN_READ: &str = begin!("REPEATABLE READ READ ONLY");

impl Postgres {
    /// Connects, checks the settings that durability depends on, and brings the schema up to date.
    pub(crate) async fn open(url: &str, payloads: PayloadOptions, metrics: StoreMetrics) -> Result<Self, OpenError> {
        let name = redact(url);
        let shown = name.clone();
        let options = probe::options(url)?;
        migrate::prepare(&options, &name).await?;
        let database = |source| OpenError::Database { name, source };
        let grace_s = payloads.objects_grace_s;
        let stores = payloads.kind.is_some();
        let claim = payloads.objects_claim;
        let objects::Opened { kind, objects } = objects::open(&options, &shown, payloads, &metrics).await?;
        let (sessions, options) = session::kind(url, options).await.map_err(database)?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS_MAX)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .after_connect(move |connection, _| Box::pin(session::check(connection, sessions)))
            // The pool would test every connection before it is used, which takes a round trip.
            .test_before_acquire(false)
            .before_acquire(|connection, meta| Box::pin(check_idle(connection, meta)))
            .connect_lazy_with(options);
        let health_reporter = HealthReporter::default();
        let writes_objects = stores && kind == PayloadKind::Objects;
        let standing = match objects.as_ref().filter(|_| writes_objects) {
            Some(objects) => owner::claim(&pool, objects, claim).await?,
            None => Standing::Unclaimed,
        };
        let care = |objects| Arc::new(ObjectCare::new(objects, writes_objects, standing, grace_s, metrics.clone()));
        let care = objects.map(care);
        Ok(Self { pool, sessions, rules: Arc::new(RulesCache::default()), metrics, health_reporter, care })
    }
}

#[async_trait]
impl SqlDialect for Postgres {
    fn ingests(&self) -> usize {
        4
    }

    fn appends_tallies(&self) -> bool {
        true
    }

    async fn write_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        let (pool, rules, metrics) = (self.pool.clone(), Arc::clone(&self.rules), self.metrics.clone());
        let (sessions, health_reporter) = (self.sessions, self.health_reporter.clone());
        let objects = self.care.as_ref().filter(|care| care.writes_objects()).map(|care| care.objects().clone());
        let caller = Arc::new(());
        let gone = Arc::downgrade(&caller);
        let work = async move {
            let is_abandonable = op.is_abandonable();
            let abandoned = move || is_abandonable && gone.strong_count() == 0;
            let mut attempt = 1;
            loop {
                let started = std::time::Instant::now();
                let outcome = transact(&pool, sessions, objects.as_ref(), &rules, &*op, &abandoned).await;
                metrics.committed(1, started.elapsed(), outcome.is_ok());
                match &outcome {
                    Ok(_) if op.probes() => match probe(objects.as_ref()).await {
                        Ok(()) => health_reporter.committed(),
                        Err(error) => health_reporter.failed(&error),
                    },
                    Ok(_) => {}
                    Err(error) => health_reporter.failed(error),
                }
                match outcome {
                    Err(error) if is_conflict(&error) && attempt < ATTEMPTS_MAX => {
                        attempt += 1;
                        let pause = Duration::from_millis(rand::random_range(1..10) << attempt.min(6));
                        tokio::time::sleep(pause).await;
                    }
                    outcome => return outcome,
                }
            }
        };
        let outcome = tokio::spawn(work.in_current_span()).await.map_err(|_| StoreError::Closed)?;
        drop(caller);
        outcome
    }

    async fn read_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        let (pool, sessions, rules) = (self.pool.clone(), self.sessions, Arc::clone(&self.rules));
        let work = async move {
            let mut transaction = pool.begin_with(BEGIN_READ).await?;
            let output = op.run(&mut Tx::new(&mut Session::new(&mut transaction, sessions), &rules)).await;
            transaction.rollback().await?;
            output
        };
        tokio::spawn(work.in_current_span()).await.map_err(|_| StoreError::Closed)?
    }

    fn places(&self) -> Option<PlaceReader> {
        self.care.as_ref().map(|care| PlaceReader::Objects(care.objects().clone()))
    }

    fn object_care(&self) -> Option<&ObjectCare> {
        self.care.as_deref()
    }

    async fn prove_ownership(&self, objects: &Objects, has_owned: bool) -> Result<Standing, StoreError> {
        let (pool, objects) = (self.pool.clone(), objects.clone());
        let prove = async move {
            let proved = owner::prove(&pool, &objects, has_owned).await;
            proved.map_err(|error| StoreError::Database(DatabaseFailure::new(error)))
        };
        tokio::spawn(prove.in_current_span()).await.map_err(|_| StoreError::Closed)?
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        Some(Arc::new(Channel::new(self.pool.clone())))
    }

    fn health_reporter(&self) -> &HealthReporter {
        &self.health_reporter
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}

/// Whether the pool may hand a connection out. Otherwise the pool closes it and opens another.
async fn check_idle(connection: &mut PgConnection, meta: PoolConnectionMetadata) -> Result<bool, sqlx::Error> {
    if meta.idle_for > UNTESTED_MAX {
        connection.ping().await?;
    }
    // The next user would continue an open transaction.
    Ok(!connection.is_in_transaction())
}

/// Whether the object store can be written. The commit of the database has shown nothing about it.
async fn probe(objects: Option<&Objects>) -> Result<(), StoreError> {
    match objects {
        Some(objects) => Ok(objects.check().await?),
        None => Ok(()),
    }
}

#[instrument(name = "commit", level = "debug", skip_all, err(level = "debug"))]
async fn transact(
    pool: &PgPool,
    sessions: Kind,
    objects: Option<&Objects>,
    rules: &RulesCache,
    op: &dyn AnyOp,
    abandoned: &(dyn Fn() -> bool + Sync),
) -> Result<AnyOutput, StoreError> {
    let mut transaction = pool.begin_with(BEGIN_WRITE).await?;
    let mut session = Session::new(&mut transaction, sessions);
    if objects.is_some() {
        session.collect_payloads();
    }
    let mut tx = Tx::new(&mut session, rules);
    let output = op.run(&mut tx).await;
    let output = match output {
        Ok(output) => {
            let tallies = tx.take_tallies();
            tallies::write(tallies, &mut tx, rand::random_range(0..TALLY_SLOTS)).await.map(|()| output)
        }
        Err(error) => Err(error),
    };
    let output = match (output, objects) {
        (Ok(output), Some(objects)) => session.write_payloads(objects).await.map(|()| output),
        (output, _) => output,
    };
    let output = match output {
        Ok(output) => session.send_inserts().await.map(|()| output),
        Err(error) => Err(error),
    };
    match output {
        Ok(_) if abandoned() => {
            transaction.rollback().await?;
            Err(StoreError::Closed)
        }
        Ok(output) => {
            transaction.commit().await?;
            Ok(output)
        }
        Err(error) => {
            transaction.rollback().await?;
            Err(error)
        }
    }
}
