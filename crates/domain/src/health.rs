//! The health of a store.

/// What the last writes say about the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Writes are expected to succeed.
    #[default]
    Writable,
    /// The database writes, but the object store took no payload. Posts fail, and everything else goes on. A task tries
    /// again.
    WithoutPayloads,
    /// The last write failed for a reason that may pass, such as a full disk or a database that cannot be reached. The
    /// sweep tries again.
    Failing,
    /// The process has to end, for one of two reasons. A write to the file failed, so only a restart shows what is on
    /// disk: after a failed fsync the kernel may have dropped the pages and would report success to a second one. Or
    /// the file was removed or replaced, so everything written to it is lost.
    Broken,
}
