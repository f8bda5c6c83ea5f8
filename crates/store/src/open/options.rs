//! Where a store keeps its payloads.

use super::url::Place;

/// Where new payloads are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PayloadKind {
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
