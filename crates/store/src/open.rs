//! Opens the database that a URL names.

pub(crate) mod error;
pub(crate) mod options;
pub(crate) mod url;

use std::{path::Path, sync::Arc};

use forebay_telemetry::metrics::StoreMetrics;
use futures::{FutureExt as _, future::LocalBoxFuture};

use self::{
    error::OpenError,
    options::{PayloadKind, PayloadOptions},
    url::Place,
};
use crate::{
    dialect::{
        postgres::Postgres,
        sqlite::{Sqlite, SqliteReading},
    },
    folders, segment_files,
    store::Store,
};

/// Checks the form of the URL of an object store.
pub fn check_objects_url(url: &str) -> Result<(), String> {
    segment_files::check_url(url).map(drop)
}

/// A store that was opened.
pub struct Opened {
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
pub fn open_or_create(
    url: &str,
    payloads: PayloadOptions,
    metrics: StoreMetrics,
) -> LocalBoxFuture<'_, Result<Opened, OpenError>> {
    // Boxed, so that it is compiled here and not by each caller: see `Op`. The compiler cannot prove that it is `Send`,
    // and nobody opens a store in another task.
    open_place(url, payloads, metrics).boxed_local()
}

async fn open_place(url: &str, payloads: PayloadOptions, metrics: StoreMetrics) -> Result<Opened, OpenError> {
    let place = Place::of(url)?;
    check_kind(payloads.kind, &place)?;
    let (store, is_new): (Arc<Store>, bool) = match place {
        Place::Temporary => (Arc::new(Store::new(Sqlite::open_temporary(payloads, metrics).await?)), true),
        Place::File(path) => {
            check_folder(url)?;
            let is_new = !path.exists();
            (Arc::new(Store::new(Sqlite::open(path, payloads, metrics).await?)), is_new)
        }
        Place::Postgres => {
            let is_new = Postgres::probe(url).await?;
            (Arc::new(Store::new(Postgres::open(url, payloads, metrics).await?)), is_new)
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
            Ok(Arc::new(Store::new(SqliteReading::open(path).await?)))
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
        Place::Postgres => Postgres::check_url(url),
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
    let folder = folders::folder_of(path);
    if folder.is_dir() {
        return Ok(());
    }
    Err(OpenError::NoFolder { name: path.display().to_string(), folder: folder.display().to_string() })
}
