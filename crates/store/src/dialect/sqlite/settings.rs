//! What all connections have in common: the schema, the settings of the file, and the version of SQLite.

use std::{path::Path, time::Duration};

use sqlx::{
    SqliteConnection,
    migrate::Migrator,
    sqlite::{SqliteAutoVacuum, SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};

use crate::open::error::OpenError;

/// Older versions can corrupt a database in WAL mode with two connections.
const VERSION_MIN: i64 = 3_051_003;

/// Page size of new databases. Rows that a commit changes are on many pages, and each is written whole: twice as many
/// bytes are written with pages of 16 KiB, and with 4 KiB the larger trees cost more time than the bytes save.
pub(super) const PAGE_BYTES: u32 = 8_192;

/// Size at which the log is also truncated. It grows this large when readers keep it from being reused.
pub(super) const WAL_BYTES_MAX: u64 = 64 << 20;

/// How long a connection waits for a lock of another, for example while the log is reset.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The steps that make the schema.
pub(super) static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/sqlite");

/// The settings with which the file is created and opened.
pub(super) fn file_options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .page_size(PAGE_BYTES)
        .auto_vacuum(SqliteAutoVacuum::Incremental)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(BUSY_TIMEOUT)
}

pub(super) async fn check_version(connection: &mut SqliteConnection) -> Result<(), OpenError> {
    let version: String = sqlx::query_scalar("SELECT sqlite_version()")
        .fetch_one(connection)
        .await
        .map_err(|error| OpenError::Settings(error.to_string()))?;
    let number = version.split('.').try_fold(0_i64, |number, part| Some(number * 1_000 + part.parse::<i64>().ok()?));
    if number.is_some_and(|number| number >= VERSION_MIN) {
        return Ok(());
    }
    Err(OpenError::Settings(format!("SQLite {version} can corrupt its log: 3.51.3 or newer is needed")))
}
