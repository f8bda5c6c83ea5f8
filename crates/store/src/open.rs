//! Opens the database that a URL names.

use std::{path::Path, sync::Arc};

use forebay_telemetry::metrics::StoreMetrics;
use sqlx::migrate::MigrateError;

use crate::{dialect, error::StoreError, segment_files, store::Store};

/// The store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL does not have the form of a database that this build supports.
    #[error("database `{0}` is not `sqlite:PATH`, `sqlite::memory:` or `postgres://...`")]
    Url(String),
    /// The file does not exist, and the command must not create it.
    #[error("database {0} does not exist: correct the path; only `forebay serve` creates a database")]
    Missing(String),
    /// The folder of the file does not exist. Most likely the path is mistyped.
    #[error("the folder {folder} of {name} does not exist: correct the path, or create the folder")]
    NoFolder {
        /// The file.
        name: String,
        /// The folder.
        folder: String,
    },
    /// The server does not answer, or rejects the connection.
    #[error("cannot open database {name}: {why}")]
    Unreachable {
        /// The database.
        name: String,
        /// The server's answer, or the error of the connection.
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
    /// Another process holds the file.
    #[error("database {0} is locked: another forebay serves it")]
    Locked(String),
    /// The write-ahead log beside the file does not belong to it.
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
    /// The payloads cannot be used: a segment file is missing, was replaced, or cannot be opened.
    #[error("cannot use the payloads of database {name}: {source}")]
    Payloads {
        /// The database.
        name: String,
        /// Why.
        source: StoreError,
    },
    /// A newer version wrote the database.
    #[error("database {name} was written by a newer forebay (schema {version}): upgrade, or restore a backup")]
    Newer {
        /// The database.
        name: String,
        /// Number of the unknown migration.
        version: i64,
    },
    /// A version before 0.1.0 wrote the database, and this one does not read its form.
    #[error(
        "database {name} was written by a forebay of before 0.1.0: write its rollouts to files with that program \
         (`forebay export --format forebay`), and post them to a new database with this one (`forebay import --format \
         forebay`)"
    )]
    TooOld {
        /// The database.
        name: String,
    },
    /// The schema cannot be brought up to date.
    #[error("cannot migrate database {name}")]
    Schema {
        /// The database.
        name: String,
        /// Why.
        source: Box<MigrateError>,
    },
    /// The database's settings or its state do not allow the guarantees of the service.
    #[error("{0}")]
    Settings(String),
}

impl OpenError {
    pub(crate) fn file(path: &Path, source: std::io::Error) -> Self {
        Self::File { name: path.display().to_string(), source }
    }

    pub(crate) fn database(path: &Path, source: sqlx::Error) -> Self {
        Self::Database { name: path.display().to_string(), source }
    }

    pub(crate) fn schema(name: &str, source: MigrateError) -> Self {
        match source {
            MigrateError::VersionMissing(version) if version < BASELINE => Self::TooOld { name: name.to_owned() },
            MigrateError::VersionMissing(version) | MigrateError::VersionTooNew(version, _) => {
                Self::Newer { name: name.to_owned(), version }
            }
            MigrateError::Execute(source) => Self::Database { name: name.to_owned(), source },
            source => Self::Schema { name: name.to_owned(), source: Box::new(source) },
        }
    }
}

/// The number of the first migration. Those of databases of before 0.1.0 are smaller.
pub(crate) const BASELINE: i64 = 100;

/// Where new payloads are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PayloadKind {
    /// In the database.
    Database,
    /// In segment files beside a SQLite database: each payload is written once, and purged ones give the disk back.
    Segments,
    /// In an object store beside a Postgres database: the payloads of a transaction are one object.
    Objects,
}

impl PayloadKind {
    /// Its name in configurations and in the database.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Database => "database",
            Self::Segments => "segments",
            Self::Objects => "objects",
        }
    }

    /// The kind that a database has if none is configured.
    #[must_use]
    pub fn default_of(url: &str) -> Self {
        match Place::of(url) {
            Ok(Place::Postgres) | Err(_) => Self::Database,
            Ok(Place::File(_) | Place::Temporary) => Self::Segments,
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        [Self::Database, Self::Segments, Self::Objects].into_iter().find(|kind| kind.as_str() == name)
    }
}

/// How payloads are stored.
#[derive(Clone, Debug)]
pub struct PayloadOptions {
    /// Where. None: as before; a new SQLite database has segment files.
    pub kind: Option<PayloadKind>,
    /// The length at which no more payloads are appended to a segment file.
    pub segment_file_bytes: u64,
    /// The URL of the object store for the kind `objects`.
    pub objects_url: Option<String>,
    /// What the process claims of the objects.
    pub objects_claim: ObjectsClaim,
    /// How long an object stays after the last payload in it was purged, so that an older copy of the database finds it.
    pub objects_grace_s: u64,
    /// Memory for payloads of objects that were written or read lately.
    pub objects_cache_bytes: u64,
}

impl Default for PayloadOptions {
    fn default() -> Self {
        Self {
            kind: None,
            segment_file_bytes: SEGMENT_FILE_BYTES,
            objects_url: None,
            objects_claim: ObjectsClaim::Own,
            objects_grace_s: OBJECTS_GRACE_S,
            objects_cache_bytes: OBJECTS_CACHE_BYTES,
        }
    }
}

/// What a process claims of the objects in a folder, which belong to one database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectsClaim {
    /// It uses them if its database is the owner. Otherwise it reads them, and stores payloads in the database.
    Own,
    /// It uses them, and fails if its database is not the owner.
    Require,
    /// It makes its database the owner.
    Adopt,
}

/// The length of segment files if none is configured. A purge gives the disk back file by file, so they are not larger.
pub const SEGMENT_FILE_BYTES: u64 = 64 << 20;

/// The grace of objects if none is configured: a day.
pub const OBJECTS_GRACE_S: u64 = 86_400;

/// The memory for payloads of objects if none is configured.
pub const OBJECTS_CACHE_BYTES: u64 = 64 << 20;

/// Checks the form of the URL of an object store.
pub fn check_objects_url(url: &str) -> Result<(), String> {
    segment_files::check_url(url).map(drop)
}

/// A store that was opened.
pub struct Opened {
    /// The store.
    pub store: Arc<Store>,
    /// Whether the database was created, so that it is empty.
    pub is_new: bool,
}

/// Opens the database that a URL names. A database that does not exist is created, in a folder that exists.
pub async fn open(url: &str, metrics: StoreMetrics) -> Result<Arc<Store>, OpenError> {
    open_or_create(url, PayloadOptions::default(), metrics).await.map(|opened| opened.store)
}

/// Like [`open`], and tells whether the database was created. New payloads are stored as `payloads` says, and others move
/// there in idle moments.
pub async fn open_or_create(url: &str, payloads: PayloadOptions, metrics: StoreMetrics) -> Result<Opened, OpenError> {
    let place = Place::of(url)?;
    check_kind(payloads.kind, &place)?;
    let (store, is_new): (Arc<Store>, bool) = match place {
        Place::Temporary => (Arc::new(Store::sqlite(dialect::Sqlite::open_temporary(payloads, metrics).await?)), true),
        Place::File(path) => {
            check_folder(url)?;
            let is_new = !path.exists();
            (Arc::new(Store::sqlite(dialect::Sqlite::open(path, payloads, metrics).await?)), is_new)
        }
        Place::Postgres => {
            let is_new = dialect::Postgres::probe(url).await?;
            (Arc::new(Store::postgres(dialect::Postgres::open(url, payloads, metrics).await?)), is_new)
        }
    };
    Ok(Opened { store, is_new })
}

/// Checks that a database can have payloads of this kind.
fn check_kind(kind: Option<PayloadKind>, place: &Place<'_>) -> Result<(), OpenError> {
    let why = match (kind, place) {
        (Some(PayloadKind::Segments), Place::Postgres) => {
            "payloads = \"segments\" is for SQLite: segment files are on one machine. Use \"objects\" or \"database\""
        }
        (Some(PayloadKind::Objects), Place::File(_) | Place::Temporary) => {
            "payloads = \"objects\" is for Postgres. Use \"segments\" or \"database\""
        }
        _ => return Ok(()),
    };
    Err(OpenError::Settings(why.to_owned()))
}

/// Opens the database that a URL names. A file that does not exist is not created.
pub async fn open_existing(url: &str, metrics: StoreMetrics) -> Result<Arc<Store>, OpenError> {
    open_existing_with(url, PayloadOptions::default(), metrics).await
}

/// Like [`open_existing`], and stores payloads as `payloads` says.
pub async fn open_existing_with(
    url: &str,
    payloads: PayloadOptions,
    metrics: StoreMetrics,
) -> Result<Arc<Store>, OpenError> {
    if let Place::File(path) = Place::of(url)? {
        check_exists(path)?;
    }
    open_or_create(url, payloads, metrics).await.map(|opened| opened.store)
}

/// Opens a database only for reading. A SQLite file may be served by another process meanwhile, and its schema must be
/// that of this version. The schema of a Postgres database is brought up to date, as by [`open`].
pub async fn open_reading(url: &str, metrics: StoreMetrics) -> Result<Arc<Store>, OpenError> {
    match Place::of(url)? {
        Place::File(path) => {
            check_exists(path)?;
            Ok(Arc::new(Store::reading(dialect::SqliteReading::open(path).await?)))
        }
        Place::Temporary => Err(OpenError::Missing(url.to_owned())),
        Place::Postgres => open(url, metrics).await,
    }
}

/// Checks that a file exists, for commands that must not create it.
pub(crate) fn check_exists(path: &Path) -> Result<(), OpenError> {
    match path.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(OpenError::Missing(path.display().to_string()))
        }
        // Opening the file reports any other error.
        _ => Ok(()),
    }
}

/// Whether a URL has a form that names a database.
pub fn check_url(url: &str) -> Result<(), OpenError> {
    match Place::of(url)? {
        Place::Postgres => dialect::Postgres::check_url(url),
        Place::File(_) | Place::Temporary => Ok(()),
    }
}

/// Checks that the folder of a file exists, so that a mistyped path creates neither folders nor an empty database.
pub fn check_folder(url: &str) -> Result<(), OpenError> {
    match Place::of(url)? {
        Place::File(path) => check_folder_of(path),
        Place::Temporary | Place::Postgres => Ok(()),
    }
}

pub(crate) fn check_folder_of(path: &Path) -> Result<(), OpenError> {
    let folder = dialect::folder_of(path);
    if folder.is_dir() {
        return Ok(());
    }
    Err(OpenError::NoFolder { name: path.display().to_string(), folder: folder.display().to_string() })
}

/// The kind and the address of a database.
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
pub(crate) fn sqlite_path(url: &str) -> Option<&Path> {
    match Place::of(url) {
        Ok(Place::File(path)) => Some(path),
        _ => None,
    }
}

/// A database URL that may be shown: without the password, and without parameters, which may contain a password as
/// well.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let rest = match rest.rsplit_once('@') {
        // The user ends at the first colon, and the password at the last at-sign.
        Some((user, host)) => format!("{}@{host}", user.split(':').next().unwrap_or_default()),
        None => rest.to_owned(),
    };
    format!("{scheme}://{}", rest.split('?').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use crate::open::redact;

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
