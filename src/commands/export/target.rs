//! Where an export is written: a file, a folder or the standard output.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context as _, bail};
use forebay_exports::{Format, Ndjson, Pairs, Parquet, Requirement, Traces, Trajectories, Writer};

/// Bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// The ending of the names of unfinished exports.
const PARTIAL: &str = ".partial";

/// A place for an export. If it gets no name, the unfinished file is removed when it is dropped.
pub(super) struct Target {
    output: PathBuf,
    place: Place,
    bytes: Arc<AtomicU64>,
}

enum Place {
    Stdout,
    File(tempfile::NamedTempFile),
    Folder(tempfile::TempDir),
}

impl Target {
    /// Makes an unfinished file beside the one that is to be written.
    pub(super) fn open(output: &Path, format: Format, force: bool) -> anyhow::Result<Self> {
        let bytes = Arc::default();
        let is_folder = format == Format::Sts;
        if output == Path::new("-") {
            if is_folder {
                bail!("session traces are one file each: name a folder with --output");
            }
            return Ok(Self { output: output.to_owned(), place: Place::Stdout, bytes });
        }
        if output.exists() && (is_folder || !force || output.is_dir()) {
            let advice = if is_folder || output.is_dir() { "" } else { "; --force replaces it" };
            bail!("{} already exists{advice}", output.display());
        }
        let name = output.file_name().with_context(|| format!("{} names no file", output.display()))?;
        let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let prefix = format!(".{}.", name.to_string_lossy());
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(PARTIAL);
        let unmade = || format!("cannot write to the folder {}", folder.display());
        let place = if is_folder {
            Place::Folder(builder.tempdir_in(folder).with_context(unmade)?)
        } else {
            permit(&mut builder);
            Place::File(builder.tempfile_in(folder).with_context(unmade)?)
        };
        Ok(Self { output: output.to_owned(), place, bytes })
    }

    /// The number of bytes that are written so far.
    pub(super) fn bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.bytes)
    }

    /// What writes the export.
    pub(super) fn writer(
        &self,
        format: Format,
        required: Option<Requirement>,
        harness: String,
    ) -> anyhow::Result<Box<dyn Writer>> {
        if let Place::Folder(folder) = &self.place {
            return Ok(Box::new(Traces::new(folder.path().to_owned(), harness, Arc::clone(&self.bytes))));
        }
        let out: Box<dyn Write + Send> = match &self.place {
            Place::File(file) => Box::new(file.as_file().try_clone().context("cannot open the file again")?),
            Place::Stdout | Place::Folder(_) => Box::new(io::stdout()),
        };
        let out = BufWriter::with_capacity(BUFFER_BYTES, Counted { out, bytes: Arc::clone(&self.bytes) });
        let is_parquet = self.output.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"));
        Ok(match format {
            Format::Parquet => Box::new(Parquet::new(out, required)?),
            Format::Pairs if is_parquet => Box::new(Pairs::parquet(out)?),
            Format::Pairs => Box::new(Pairs::ndjson(out)),
            Format::Forebay => Box::new(Trajectories::new(out)),
            Format::Ndjson | Format::Sts => Box::new(Ndjson::new(out, required)),
        })
    }

    /// Gives the complete file its name.
    pub(super) fn name(self, force: bool) -> anyhow::Result<()> {
        let output = self.output;
        let unnamed = || format!("cannot write {}", output.display());
        match self.place {
            Place::Stdout => {}
            Place::File(file) => {
                file.as_file().sync_all().with_context(unnamed)?;
                let named = if force { file.persist(&output) } else { file.persist_noclobber(&output) };
                named.map_err(|error| error.error).with_context(unnamed)?;
            }
            Place::Folder(folder) => {
                // Renaming a folder replaces an empty one, so a folder that was made meanwhile stays if it has files.
                std::fs::rename(folder.path(), &output).with_context(unnamed)?;
                permit_folder(&output).with_context(unnamed)?;
                // It has another name now, under which it must not be removed.
                let _ = folder.keep();
            }
        }
        Ok(())
    }
}

/// The permissions that files usually have, instead of those of temporary files.
#[cfg(unix)]
fn permit(builder: &mut tempfile::Builder<'_, '_>) {
    use std::os::unix::fs::PermissionsExt as _;
    builder.permissions(std::fs::Permissions::from_mode(0o666));
}

#[cfg(not(unix))]
fn permit(_builder: &mut tempfile::Builder<'_, '_>) {}

#[cfg(unix)]
fn permit_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn permit_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

/// Counts the bytes that are written.
struct Counted {
    out: Box<dyn Write + Send>,
    bytes: Arc<AtomicU64>,
}

impl Write for Counted {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.out.write(buffer)?;
        self.bytes.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
