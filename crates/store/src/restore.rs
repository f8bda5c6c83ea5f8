//! Replaces a SQLite database with a copy.
//!
//! Replacing the file by hand is not enough, because SQLite would replay the old database's log into the copy. Also,
//! running trainers hold leases and epochs that the copy does not know. Every policy therefore begins a new epoch, and
//! trainers must resume.

use std::{
    fs::File,
    io::{self, ErrorKind, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use forebay_domain::{clock::Timestamp, ids::Epoch};
use forebay_telemetry::metrics::StoreMetrics;
use rusqlite::{Connection, OpenFlags};

use super::{
    dialect::sqlite::{Files, Names, Sqlite, missing_from},
    folders::{SEGMENTS, folder_of, sync_folder, with_suffix},
    segment_files::{self, NamedFiles, SegmentFolder, new_store_id, rename_files},
    staging::Staged,
    store::Store,
};
use crate::{
    error::StoreError,
    open::{error::OpenError, options::PayloadOptions},
    ops::epochs::BeginEpochs,
};

/// The ending of the names of unfinished restores.
const RESTORING: &str = ".restoring";

/// The first bytes of every SQLite file.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// Counts the tables that databases of Forebay have in all versions.
const OUR_TABLES: &str = "SELECT COUNT(*) FROM sqlite_schema WHERE type = 'table'
    AND name IN ('_sqlx_migrations', 'policy', 'rules', 'rollout_group', 'rollout', 'payload', 'batch')";

/// The number of these tables.
const OUR_TABLES_COUNT: i64 = 7;

/// The most findings of SQLite that an error names.
const FINDINGS_MAX: usize = 5;

/// A copy cannot be restored. The database is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The URL does not name a SQLite file.
    #[error("`{0}` is not `sqlite:PATH`; restore Postgres with `pg_restore` or `psql` while no service uses it")]
    NotAFile(String),
    /// The copy cannot be used.
    #[error("{path} cannot be restored: {why}")]
    Copy {
        /// The copy.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The database or the copy cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file cannot be used.
    #[error("cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The copy cannot be changed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The result of a restore.
#[derive(Debug)]
pub struct Restored {
    pub database: PathBuf,
    /// The path of the replaced database, with its log beside it, if there was one.
    pub replaced: Option<PathBuf>,
    /// The number of policies that began an epoch.
    pub policies: u64,
}

/// Replaces the database that `url` names with a copy. No process may be using the database. `now` is part of the name
/// of the replaced file and of the new epochs.
pub async fn restore(url: &str, copy: &Path, now: Timestamp, metrics: StoreMetrics) -> Result<Restored, RestoreError> {
    let path =
        crate::open::url::sqlite_path(url).ok_or_else(|| RestoreError::NotAFile(crate::open::url::redact(url)))?;
    if !copy.exists() {
        let why = "it does not exist: name a file that `forebay backup` made".to_owned();
        return Err(RestoreError::Copy { path: copy.to_owned(), why });
    }
    crate::open::check_folder_of(path)?;
    let files = Files::hold(path)?;
    let mut staged = stage(copy, &files.names)?;
    check(copy, staged.path())?;
    stage_segments(copy, &mut staged)?;
    staged.unlock();
    let store = Store::new(Sqlite::open(staged.path(), PayloadOptions::default(), metrics).await?);
    // The new epoch is greater than any that was begun since the copy was made, also after an earlier restore of the
    // same copy, because no policy is resumed a thousand times a second.
    let epochs = store.write(BeginEpochs(Epoch(now.as_micros() / 1_000))).await;
    store.close().await;
    let policies = epochs?;
    check_schema(copy, staged.path())?;
    let mut swap = Swap::new(files, staged, now)?;
    for step in STEPS {
        step(&mut swap)?;
    }
    Ok(Restored { database: swap.files.names.database.clone(), replaced: swap.replaced, policies })
}

/// Copies the copy to a file from which one rename can put it in place.
fn stage(copy: &Path, names: &Names) -> Result<Staged, RestoreError> {
    let wrong = |why: &str| RestoreError::Copy { path: copy.to_owned(), why: why.to_owned() };
    let unreadable = |source| RestoreError::File { path: copy.to_owned(), source };
    let mut from = File::open(copy).map_err(unreadable)?;
    let found = from.metadata().map_err(unreadable)?;
    if !found.is_file() {
        return Err(wrong("it is not a file"));
    }
    if names.database.metadata().is_ok_and(|database| (database.dev(), database.ino()) == (found.dev(), found.ino())) {
        return Err(wrong("it is the database itself"));
    }
    if from.try_lock_shared().is_err() {
        return Err(wrong("it is being served: make a copy of it with `forebay backup`"));
    }
    if Names::of(copy)?.has_log()? {
        return Err(wrong(
            "it has a log beside it, so it is not complete: make a complete copy of both with `forebay backup NEW \
             --database sqlite:COPY`, and restore that",
        ));
    }
    let mut magic = [0; MAGIC.len()];
    if from.read_exact(&mut magic).is_err() || &magic != MAGIC {
        return Err(wrong("it is not a SQLite database"));
    }
    let unwritable = |source| RestoreError::File { path: names.database.clone(), source };
    let staged = Staged::new(&names.database, RESTORING).map_err(unwritable)?;
    let mut to = staged.file().map_err(unwritable)?;
    let copied = io::Write::write_all(&mut to, &magic).and_then(|()| io::copy(&mut from, &mut to));
    copied.map_err(unwritable)?;
    Ok(staged)
}

/// Copies the segment files that the copy names, to a folder beside the staged database. They get a new number in their
/// names, so that they and those of the replaced database can be in one folder.
fn stage_segments(copy: &Path, staged: &mut Staged) -> Result<(), RestoreError> {
    let wrong = |why: String| RestoreError::Copy { path: copy.to_owned(), why };
    let unread = |error: rusqlite::Error| wrong(format!("it cannot be read: {error}"));
    let Some(named) = NamedFiles::read(staged.path()).map_err(unread)? else { return Ok(()) };
    let to = SegmentFolder::new(Names::of(staged.path())?.segments, new_store_id());
    let from = SegmentFolder::new(Names::of(copy)?.segments, named.store_id);
    match named.copy(&from, &to, None) {
        Ok(Some(_)) => {}
        Ok(None) => {
            let why = "segment files of it are missing: the folder COPY-segments belongs beside the copy".to_owned();
            return Err(wrong(why));
        }
        Err(error) => return Err(wrong(format!("its segment files cannot be used: {error}"))),
    }
    rename_files(staged.path(), &to).map_err(unread)
}

/// Checks that a file is an undamaged database of Forebay.
fn check(copy: &Path, staged: &Path) -> Result<(), RestoreError> {
    let wrong = |why: String| RestoreError::Copy { path: copy.to_owned(), why };
    let read = || -> Result<(i64, Vec<String>), rusqlite::Error> {
        let connection = Connection::open_with_flags(staged, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let tables = connection.query_row(OUR_TABLES, [], |row| row.get(0))?;
        let mut findings = connection.prepare(&format!("PRAGMA integrity_check({FINDINGS_MAX})"))?;
        let findings = findings.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
        Ok((tables, findings))
    };
    match read() {
        Err(error) => Err(wrong(format!("it cannot be read: {error}"))),
        Ok((tables, _)) if tables != OUR_TABLES_COUNT => Err(wrong("it is not a database of Forebay".to_owned())),
        Ok((_, findings)) if findings != ["ok"] => Err(wrong(format!("it is damaged: {}", findings.join("; ")))),
        Ok(_) => Ok(()),
    }
}

/// Checks that a database of this version has its whole schema.
fn check_schema(copy: &Path, staged: &Path) -> Result<(), RestoreError> {
    let wrong = |why: String| RestoreError::Copy { path: copy.to_owned(), why };
    let missing = missing_from(staged).map_err(|error| wrong(format!("it cannot be read: {error}")))?;
    if missing.is_empty() { Ok(()) } else { Err(wrong(format!("it is damaged: {}", missing.join("; ")))) }
}

/// Replaces the database with the copy.
struct Swap {
    files: Files,
    staged: Option<Staged>,
    /// The folder of the staged segment files.
    segments: PathBuf,
    now: Timestamp,
    replaced: Option<PathBuf>,
    /// The segment files of the replaced database. Those of an interrupted restore are among them.
    old_segments: Vec<PathBuf>,
}

type Step = fn(&mut Swap) -> Result<(), RestoreError>;

/// The steps of the replacement. After a crash between any two of them, one of three states is left: the old database
/// with its log, the copy, or the copy beside a log that does not belong to it. In the last state the service refuses
/// to start until the log is moved away.
///
/// Segment files of both databases have different names, so those of the copy are put in place first.
const STEPS: [Step; 6] = [
    Swap::keep_aside,
    Swap::pin_log,
    Swap::put_segments_in_place,
    Swap::put_in_place,
    Swap::remove_log,
    Swap::remove_old_segments,
];

impl Swap {
    fn new(files: Files, staged: Staged, now: Timestamp) -> Result<Self, RestoreError> {
        let segments = Names::of(staged.path())?.segments;
        Ok(Self { files, staged: Some(staged), segments, now, replaced: None, old_segments: Vec::new() })
    }

    /// Gives the database and its log second names, or copies them if the file system has no hard links.
    fn keep_aside(&mut self) -> Result<(), RestoreError> {
        let names = &self.files.names;
        if !names.database.exists() && !names.wal.exists() {
            return Ok(());
        }
        let aside = free_name(&names.database, self.now);
        for (from, suffix) in [(&names.database, ""), (&names.wal, "-wal")] {
            let to = with_suffix(&aside, suffix);
            let kept = std::fs::hard_link(from, &to).or_else(|_| std::fs::copy(from, &to).map(drop));
            match kept {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                kept => kept.map_err(|source| RestoreError::File { path: to, source })?,
            }
        }
        let segments = &names.segments;
        let unkept = |source| RestoreError::File { path: segments.clone(), source };
        segment_files::keep(segments, &with_suffix(&aside, SEGMENTS)).map_err(unkept)?;
        self.old_segments = entries(segments).map_err(unkept)?;
        self.sync_folder()?;
        self.replaced = Some(aside);
        Ok(())
    }

    fn put_segments_in_place(&mut self) -> Result<(), RestoreError> {
        let to = &self.files.names.segments;
        let failed = |source| RestoreError::File { path: to.clone(), source };
        let staged = entries(&self.segments).map_err(failed)?;
        if !staged.is_empty() && !to.exists() {
            std::fs::create_dir(to).map_err(failed)?;
            inherit_owner(&self.files.names.database, to);
        }
        for from in staged {
            inherit_owner(&self.files.names.database, &from);
            std::fs::rename(&from, to.join(from.file_name().unwrap_or_default())).map_err(failed)?;
        }
        if to.exists() {
            sync_folder(to).map_err(failed)?;
        }
        self.sync_folder()
    }

    /// They have second names beside the replaced database.
    fn remove_old_segments(&mut self) -> Result<(), RestoreError> {
        for path in std::mem::take(&mut self.old_segments) {
            std::fs::remove_file(&path).map_err(|source| RestoreError::File { path, source })?;
        }
        Ok(())
    }

    fn pin_log(&mut self) -> Result<(), RestoreError> {
        Ok(self.files.pin_log()?)
    }

    fn put_in_place(&mut self) -> Result<(), RestoreError> {
        let path = self.files.names.database.clone();
        let Some(staged) = self.staged.take() else { return Ok(()) };
        let replaced = inherit(&path, staged.path()).and_then(|()| staged.replace(&path));
        replaced.map_err(|source| RestoreError::File { path, source })
    }

    fn remove_log(&mut self) -> Result<(), RestoreError> {
        let names = &self.files.names;
        for path in [&names.wal, &names.shm] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed.map_err(|source| RestoreError::File { path: path.clone(), source })?,
            }
        }
        self.sync_folder()
    }

    fn sync_folder(&self) -> Result<(), RestoreError> {
        let folder = folder_of(&self.files.names.database);
        sync_folder(folder).map_err(|source| RestoreError::File { path: folder.to_owned(), source })
    }
}

/// The files in a folder; none if there is no folder.
fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| entry.map(|entry| entry.path())).collect(),
    }
}

/// Gives a file the permissions of the file that it replaces and, if that is allowed, its owner.
fn inherit(from: &Path, to: &Path) -> io::Result<()> {
    inherit_owner(from, to);
    let Ok(replaced) = from.metadata() else { return Ok(()) };
    std::fs::set_permissions(to, replaced.permissions())
}

/// Gives a file the owner of another one, if that is allowed.
fn inherit_owner(from: &Path, to: &Path) {
    if let Ok(from) = from.metadata() {
        let _ = std::os::unix::fs::chown(to, Some(from.uid()), Some(from.gid()));
    }
}

/// A free name for the replaced database.
fn free_name(database: &Path, now: Timestamp) -> PathBuf {
    // Some file systems do not allow colons in names.
    let time: String = now.to_string().chars().take_while(|&c| c != '.').filter(|c| !"-:".contains(*c)).collect();
    let first = with_suffix(database, &format!(".replaced-{time}Z"));
    let later = (2..).map(|number| with_suffix(&first, &format!("-{number}")));
    let free = std::iter::once(first.clone()).chain(later).find(|name| !name.exists());
    free.expect("numbers do not run out")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{open::open, store::Store};
    use forebay_domain::{
        ids::PolicyName,
        policies::{ExistingPolicy, WriteRules},
        rules::Rules,
    };
    use forebay_telemetry::metrics::Metrics;

    const NOW: Timestamp = Timestamp::from_micros(1_767_225_600_000_000);

    async fn opened(database: &Path) -> Result<Arc<Store>, OpenError> {
        open(&format!("sqlite:{}", database.display()), Metrics::new().store()).await
    }

    /// The names of the policies, after a check of integrity.
    async fn policies(store: &Arc<Store>) -> Vec<String> {
        assert_eq!(store.integrity().await.expect("it can be read"), Vec::<String>::new());
        let policies = store
            .read(crate::ops::policy::ListPolicies { after: String::new(), limit: 9, evaluations: false })
            .await
            .expect("it can be read");
        policies.into_iter().map(|policy| policy.name.as_str().to_owned()).collect()
    }

    async fn put(store: &Arc<Store>, name: &str) {
        let rules = Rules::parse(serde_json::from_str("{}").expect("JSON")).expect("defaults are valid");
        let (policy, rules) = (PolicyName::parse(name).expect("a name"), Arc::new(rules));
        let write = WriteRules { policy, rules, existing: ExistingPolicy::Keep, quotas: None, by: None, now: NOW };
        assert!(store.write(write).await.is_ok_and(|written| written.is_ok()));
    }

    /// The files of a database whose process was killed: the file on disk and its log.
    async fn killed(at: &Path, suffixes: &[&str]) {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let live = folder.path().join("live.db");
        let store = opened(&live).await.expect("it opens");
        put(&store, "before").await;
        for suffix in suffixes {
            std::fs::copy(with_suffix(&live, suffix), with_suffix(at, suffix)).expect("it can be copied");
        }
        store.close().await;
    }

    #[tokio::test]
    async fn a_restore_that_is_interrupted_anywhere_leaves_one_of_both_whole() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let (source, copy) = (folder.path().join("source.db"), folder.path().join("copy.db"));
        let store = opened(&source).await.expect("it opens");
        put(&store, "copied").await;
        store.close().await;
        crate::backup::backup(&format!("sqlite:{}", source.display()), &copy, None).expect("it can be copied");

        // Without the lock file, there is no note about which file the log belongs to.
        let noted: [&[&str]; 2] = [&["", "-wal", ".lock"], &["", "-wal"]];
        for (steps, suffixes) in (0..=STEPS.len()).flat_map(|steps| noted.map(|suffixes| (steps, suffixes))) {
            let database = folder.path().join(format!("f{steps}-{}.db", suffixes.len()));
            killed(&database, suffixes).await;
            let files = Files::hold(&database).expect("nobody has it");
            let staged = stage(&copy, &files.names).expect("it can be copied");
            let mut swap = Swap::new(files, staged, NOW).expect("it has a folder");
            for step in &STEPS[..steps] {
                step(&mut swap).expect("the step succeeds");
            }
            drop(swap);
            match opened(&database).await {
                Ok(store) => {
                    assert_eq!(policies(&store).await, [if steps < 4 { "before" } else { "copied" }], "{steps}");
                    store.close().await;
                }
                Err(error) => assert!(steps == 4 && matches!(error, OpenError::Log(_)), "{steps}: {error}"),
            }
            let again = restore(&format!("sqlite:{}", database.display()), &copy, NOW, Metrics::new().store()).await;
            assert!(again.is_ok_and(|restored| restored.replaced.is_some()), "{steps}");
            let store = opened(&database).await.expect("it opens");
            assert_eq!(policies(&store).await, ["copied"], "{steps}");
            store.close().await;
        }
    }
}
