//! Postgres: every operation is a transaction of its own, in a task that no caller can cancel.
//!
//! A dropped `begin` would hand an open transaction to the next borrower of the connection (sqlx 0.9.0), and HTTP
//! handlers are dropped whenever a client hangs up: so callers only wait for the task. Transactions that the database
//! sacrifices to a deadlock run again. Nothing is kept in a session of the server: see `begin!` and `query`.

mod channel;
mod migrate;
mod probe;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sqlx::{
    Column as _, Connection as _, PgConnection, PgPool, Row as _, TypeInfo as _, ValueRef as _,
    postgres::{PgArguments, PgPoolOptions, PgRow},
    query::Query,
};

use self::channel::Channel;
use super::{Dialect, Op};
use crate::{
    buffer::payload::Codec,
    metrics::StoreMetrics,
    store::{
        OpenError, Peers, StoreError,
        health::Vitals,
        redact,
        rules_cache::RulesCache,
        sql::{Arg, Cell, Column, Connection, Row, Statement, Tx},
    },
};

/// Connections of one replica: twice the cores of a usual database server's share.
const CONNECTIONS_MAX: u32 = 16;

/// How long a request waits for a connection before it is answered 503.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs of one operation, first included, before a deadlock is reported.
const ATTEMPTS_MAX: u32 = 8;

/// Slots of one tally: concurrent transactions seldom meet in the same row.
const TALLY_SLOTS: i64 = 16;

/// A database shared by any number of replicas.
#[derive(Debug)]
pub(in crate::store) struct Postgres {
    pool: PgPool,
    rules: Arc<RulesCache>,
    metrics: StoreMetrics,
    vitals: Vitals,
}

/// A transaction begins with the limits of its session's waiting.
///
/// They are not startup parameters, which `PgBouncer` refuses, nor settings of the session: behind a pooler that gives each
/// transaction another connection to the server, only what the transaction itself sets is certain. It names its isolation
/// level, because the database may have another default: what is locked here is correct at READ COMMITTED, and a
/// serializable transaction would fail and run again whenever two of them meet.
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
    /// Connects, checks the settings on which durability rests, and brings the schema up to date.
    pub(in crate::store) async fn open(url: &str, metrics: StoreMetrics) -> Result<Self, OpenError> {
        let name = redact(url);
        let options = probe::options(url)?;
        migrate::prepare(&options, &name).await?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS_MAX)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            // A connection in an open transaction would carry it on: the pool closes it and opens another.
            .before_acquire(|connection, _| Box::pin(async move { Ok(!connection.is_in_transaction()) }))
            .connect_lazy_with(options);
        Ok(Self { pool, rules: Arc::new(RulesCache::default()), metrics, vitals: Vitals::default() })
    }
}

#[async_trait]
impl Dialect for Postgres {
    /// While versions roll, replicas of the one before read what this one writes, and would take any other form for
    /// damage.
    const PAYLOADS: Codec = Codec::Zstd;

    const INGESTS: usize = 4;

    const APPENDS_TALLIES: bool = true;

    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        let (pool, rules, metrics) = (self.pool.clone(), Arc::clone(&self.rules), self.metrics.clone());
        let vitals = self.vitals.clone();
        let caller = Arc::new(());
        let gone = Arc::downgrade(&caller);
        let task = tokio::spawn(async move {
            let abandoned = move || O::ABANDONABLE && gone.strong_count() == 0;
            let mut attempt = 1;
            loop {
                let started = std::time::Instant::now();
                let outcome = transact(&pool, &rules, &op, &abandoned).await;
                metrics.committed(1, started.elapsed(), outcome.is_ok());
                match &outcome {
                    Ok(_) if O::PROBES => vitals.committed(),
                    Ok(_) => {}
                    Err(error) => vitals.failed(error),
                }
                match outcome {
                    Err(error) if error.is_conflict() && attempt < ATTEMPTS_MAX => {
                        attempt += 1;
                        let pause = Duration::from_millis(rand::random_range(1..10) << attempt.min(6));
                        tokio::time::sleep(pause).await;
                    }
                    outcome => return outcome,
                }
            }
        });
        let outcome = task.await.map_err(|_| StoreError::Closed)?;
        drop(caller);
        outcome
    }

    async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        let (pool, rules) = (self.pool.clone(), Arc::clone(&self.rules));
        let task = tokio::spawn(async move {
            let mut transaction = pool.begin_with(BEGIN_READ).await?;
            let output = op.run(&mut Tx::new(&mut *transaction, &rules)).await;
            transaction.rollback().await?;
            output
        });
        task.await.map_err(|_| StoreError::Closed)?
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        Some(Arc::new(Channel::new(self.pool.clone())))
    }

    fn vitals(&self) -> &Vitals {
        &self.vitals
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}

async fn transact<O: Op>(
    pool: &PgPool,
    rules: &RulesCache,
    op: &O,
    abandoned: &(impl Fn() -> bool + Sync),
) -> Result<O::Output, StoreError> {
    let mut transaction = pool.begin_with(BEGIN_WRITE).await?;
    let mut tx = Tx::new(&mut *transaction, rules);
    let output = op.run(&mut tx).await;
    let output = match output {
        Ok(output) => {
            let tallies = tx.take_tallies();
            tallies.write(&mut tx, rand::random_range(0..TALLY_SLOTS)).await.map(|()| output)
        }
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

#[async_trait]
impl Connection for PgConnection {
    async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError> {
        Ok(bind(statement, args).execute(self).await?.rows_affected())
    }

    async fn fetch(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError> {
        let rows = bind(statement, args).fetch_all(self).await?;
        let Some(first) = rows.first() else { return Ok(Vec::new()) };
        let columns: Arc<[String]> = first.columns().iter().map(|column| column.name().to_owned()).collect();
        let read = |row| {
            let cells = (0..columns.len()).map(|index| cell(row, index)).collect::<Result<_, _>>()?;
            Ok(Row::new(Arc::clone(&columns), cells))
        };
        rows.iter().map(read).collect()
    }

    fn takes_arrays(&self) -> bool {
        true
    }

    async fn insert(
        &mut self,
        statement: Statement,
        columns: &[Column],
        rows: Vec<Vec<Arg>>,
    ) -> Result<u64, StoreError> {
        let mut arrays: Vec<Array> = columns.iter().map(|column| Array::of(*column, rows.len())).collect();
        for row in rows {
            for (array, value) in arrays.iter_mut().zip(row) {
                array.push(value)?;
            }
        }
        let query = arrays.into_iter().fold(query(statement), |query, array| match array {
            Array::Int(values) => query.bind(values),
            Array::Real(values) => query.bind(values),
            Array::Text(values) => query.bind(values),
            Array::Blob(values) => query.bind(values),
        });
        Ok(query.execute(self).await?.rows_affected())
    }
}

/// The values of one column of several rows.
enum Array {
    Int(Vec<Option<i64>>),
    Real(Vec<Option<f64>>),
    Text(Vec<Option<String>>),
    Blob(Vec<Option<Vec<u8>>>),
}

impl Array {
    fn of(column: Column, rows: usize) -> Self {
        match column {
            Column::Int => Self::Int(Vec::with_capacity(rows)),
            Column::Real => Self::Real(Vec::with_capacity(rows)),
            Column::Text => Self::Text(Vec::with_capacity(rows)),
            Column::Blob => Self::Blob(Vec::with_capacity(rows)),
        }
    }

    fn push(&mut self, value: Arg) -> Result<(), StoreError> {
        match (self, value) {
            (Self::Int(values), Arg::Int(value)) => values.push(value),
            (Self::Real(values), Arg::Real(value)) => values.push(value),
            (Self::Text(values), Arg::Text(value)) => values.push(value),
            (Self::Blob(values), Arg::Blob(value)) => values.push(value),
            (Self::Blob(values), Arg::Shared(value)) => values.push(Some(value.to_vec())),
            (_, value) => return Err(StoreError::Corrupt(format!("{value:?} is not of its column's type"))),
        }
        Ok(())
    }
}

/// A statement that the server plans anew whenever it runs.
///
/// A plan that is kept was made for the tables as they were then. Nothing replaces it before the first ANALYZE, and on a
/// new database it goes through all rows of tables that were nearly empty when it was made. A statement without a name
/// also works behind a pooler that gives each transaction another connection to the server.
fn query(statement: Statement) -> Query<'static, sqlx::Postgres, PgArguments> {
    sqlx::query(statement.postgres).persistent(false)
}

fn bind(statement: Statement, args: Vec<Arg>) -> Query<'static, sqlx::Postgres, PgArguments> {
    args.into_iter().fold(query(statement), |query, arg| match arg {
        Arg::Int(value) => query.bind(value),
        Arg::Real(value) => query.bind(value),
        Arg::Text(value) => query.bind(value),
        Arg::Blob(value) => query.bind(value),
        Arg::Shared(value) => query.bind(value.to_vec()),
        Arg::Reals(values) => query.bind(values),
        Arg::Keys(keys) => query.bind(keys),
        Arg::IdKeys(keys) => query.bind(keys.iter().map(|key| key.as_bytes().to_vec()).collect::<Vec<_>>()),
    })
}

fn cell(row: &PgRow, index: usize) -> Result<Cell, sqlx::Error> {
    let value = row.try_get_raw(index)?;
    if value.is_null() {
        return Ok(Cell::Null);
    }
    Ok(match value.type_info().name() {
        "INT8" => Cell::Int(row.try_get_unchecked(index)?),
        "FLOAT8" => Cell::Real(row.try_get_unchecked(index)?),
        "BYTEA" => Cell::Blob(row.try_get_unchecked(index)?),
        _ => Cell::Text(row.try_get_unchecked(index)?),
    })
}
