//! A database that is only read, also while another process serves it.
//!
//! Separate from the dialect, which holds the files, brings the schema up to date and writes. SQLite lets
//! other processes read a file in WAL mode, each on a snapshot of its own.

use async_trait::async_trait;
use sqlx::{Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{path::Path, sync::Arc};

use super::{
    direct::Direct,
    files::{Files, Names},
    readers::Readers,
    segments,
    settings::{BUSY_TIMEOUT, MIGRATIONS, check_version},
};
use crate::{
    dialect::SqlDialect,
    error::StoreError,
    health::HealthReporter,
    op::{AnyOp, AnyOutput},
    open::error::{BASELINE, OpenError},
    peers::Peers,
    rules_cache::RulesCache,
    segment_files::{PlaceReader, Reader, SegmentFolder},
};

/// The readers of a database.
#[derive(Debug)]
pub(crate) struct SqliteReading {
    readers: Readers,
    segment_files: Arc<Reader>,
    health_reporter: HealthReporter,
}

impl SqliteReading {
    /// Opens a database that exists and has the schema of this version.
    pub(crate) async fn open(path: &Path) -> Result<Self, OpenError> {
        Files::check_log(path)?;
        let unopened = |source| OpenError::database(path, source);
        let options = SqliteConnectOptions::new().filename(path).read_only(true).busy_timeout(BUSY_TIMEOUT);
        let mut connection = SqliteConnection::connect_with(&options).await.map_err(unopened)?;
        check_version(&mut connection).await?;
        check_schema(&mut connection, path).await?;
        let unused = |source| OpenError::Sqlite { name: path.display().to_string(), source };
        let readers = Readers::open(path.to_owned(), Arc::new(RulesCache::default())).map_err(unused)?;
        connection.close().await.map_err(unopened)?;
        let recorded = segments::recorded(&mut Direct::reading(path).map_err(unused)?).await;
        let recorded = recorded.map_err(|source| OpenError::Payloads { name: path.display().to_string(), source })?;
        // Without a recorded number, no row names a segment file.
        let store_id = recorded.map_or(0, |recorded| recorded.store_id);
        let folder = SegmentFolder::new(Names::of(path)?.segments, store_id);
        Ok(Self { readers, segment_files: Arc::new(Reader::new(folder)), health_reporter: HealthReporter::default() })
    }
}

/// Checks that the schema is the one that the statements are written for.
async fn check_schema(connection: &mut SqliteConnection, path: &Path) -> Result<(), OpenError> {
    let newest = MIGRATIONS.iter().map(|step| step.version).max().unwrap_or(0);
    let found =
        sqlx::query_scalar("SELECT COALESCE(MAX(version), 0) FROM _sqlx_migrations").fetch_one(connection).await;
    let found: i64 = found.map_err(|source| OpenError::database(path, source))?;
    let name = path.display().to_string();
    match found.cmp(&newest) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(OpenError::Newer { name, version: found }),
        std::cmp::Ordering::Less if (1..BASELINE).contains(&found) => Err(OpenError::TooOld { name }),
        std::cmp::Ordering::Less => Err(OpenError::Settings(format!(
            "database {name} has the schema of an older forebay: start `forebay serve` or run `forebay doctor` of this \
             version, which bring it up to date, or use the program of that version"
        ))),
    }
}

#[async_trait]
impl SqlDialect for SqliteReading {
    fn ingests(&self) -> usize {
        1
    }

    /// Nothing is ever written.
    async fn write_any(&self, _op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        Err(StoreError::Closed)
    }

    async fn read_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        self.readers.read(op).await
    }

    fn places(&self) -> Option<PlaceReader> {
        Some(PlaceReader::Files(Arc::clone(&self.segment_files)))
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        None
    }

    fn health_reporter(&self) -> &HealthReporter {
        &self.health_reporter
    }

    async fn close(&self) {
        self.readers.close().await;
    }
}
