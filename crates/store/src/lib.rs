//! The operations on rollouts, each atomic and durable, on SQLite and Postgres.
//!
//! An operation is a value. [`Store::write`] and [`Store::read`] run it inside one transaction, and its effect is durable
//! when they return. The requests of [`forebay_domain`] are operations themselves; [`ops`] has the others. The decisions
//! that an operation makes under its locks are functions of the domain. The store creates no ids, and the time is an
//! argument.
//!
//! `dialect` holds everything in which the databases differ.

mod backup;
mod dialect;
pub mod error;
mod folders;
mod group_commit;
mod health;
mod object_care;
mod op;
mod open;
pub mod ops;
mod payloads;
pub mod peers;
mod restore;
mod rules_cache;
mod segment_files;
mod snapshot_times;
mod sql;
mod staging;
mod store;
mod tally;

pub use self::{
    backup::{BackupError, backup},
    open::{
        Opened, check_folder, check_objects_url, check_url,
        error::OpenError,
        open, open_existing, open_existing_with, open_or_create, open_reading,
        options::{
            OBJECTS_CACHE_BYTES, OBJECTS_GRACE_S, ObjectsClaim, PayloadKind, PayloadOptions, SEGMENT_FILE_BYTES,
        },
        url::redact,
    },
    restore::{RestoreError, Restored, restore},
    store::Store,
};
