//! `forebay bench`: runs `forebay-bench`, which is a separate program so that the service does not contain it.

use std::{ffi::OsString, io, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use anyhow::Context as _;

/// The name of the load generator's program.
const PROGRAM: &str = "forebay-bench";

/// Replaces this process with the load generator. Returns only if that fails.
pub(crate) fn bench(arguments: &[OsString]) -> anyhow::Result<()> {
    let error = Command::new(program()).args(arguments).exec();
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Err(error).with_context(|| {
        if is_missing {
            format!(
                "`{PROGRAM}` is neither in the folder of this program nor in PATH; `cargo build --release -p {PROGRAM}` builds it"
            )
        } else {
            format!("cannot start `{PROGRAM}`")
        }
    })
}

/// The path of the load generator. The one in this program's folder is preferred, because both have the same version;
/// otherwise it is searched for in PATH.
fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PROGRAM.into())
}
