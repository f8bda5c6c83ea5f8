//! Whether a file has the whole schema.
//!
//! Separate from SQLite's own check, which compares an index with its table and does not miss an index that is not in the
//! schema. It would find pages that nothing uses, but not if the first table that it comes by is a view, because it takes
//! the view's missing root page for the mark of a partial check.

use std::{collections::BTreeSet, path::Path};

use rusqlite::{Connection, OpenFlags};

use super::settings::MIGRATIONS;

/// The tables, indexes and views that a file of this version lacks.
pub(crate) fn missing_from(path: &Path) -> Result<Vec<String>, rusqlite::Error> {
    let whole = Connection::open_in_memory()?;
    for step in MIGRATIONS.iter() {
        whole.execute_batch(step.sql.as_str())?;
    }
    let found = names(&Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?)?;
    let missing = names(&whole)?.difference(&found).map(|(kind, name)| format!("{kind} {name} is missing")).collect();
    Ok(missing)
}

fn names(connection: &Connection) -> Result<BTreeSet<(String, String)>, rusqlite::Error> {
    let mut names = connection.prepare("SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")?;
    names.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}
