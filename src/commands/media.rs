//! The folder in which an export has what messages name, and from which an import uploads it. Each file has the digest of
//! its bytes as its name.

use std::{
    collections::HashSet,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use forebay_domain::{ids::BlobDigest, media};
use forebay_wire::MediaSpan;

/// A folder of media.
pub(crate) struct MediaFolder {
    path: PathBuf,
    /// Those that were written, or uploaded.
    done: HashSet<BlobDigest>,
}

impl MediaFolder {
    /// A folder to write to, which is created.
    pub(crate) fn create(path: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self::open(path))
    }

    pub(crate) fn open(path: &Path) -> Self {
        Self { path: path.to_owned(), done: HashSet::new() }
    }

    /// What messages and spans of segments name and nobody has asked for yet.
    pub(crate) fn named_first(&mut self, messages: Option<&str>, spans: &[MediaSpan]) -> Vec<BlobDigest> {
        let mut named = messages.map_or_else(Vec::new, media::named_in);
        named.extend(spans.iter().filter_map(|span| span.2.parse::<BlobDigest>().ok()));
        named.retain(|digest| self.done.insert(*digest));
        named
    }

    /// Whether a file is there already, of an export before.
    pub(crate) fn has(&self, digest: BlobDigest) -> bool {
        self.path.join(digest.to_string()).exists()
    }

    /// Writes a file, which has its name when it is whole on disk.
    pub(crate) fn write(&self, digest: BlobDigest, bytes: &[u8]) -> anyhow::Result<()> {
        ensure!(is_of(digest, bytes), "the service has sent other bytes than `{digest}` says");
        let path = self.path.join(digest.to_string());
        let write = || {
            // Another export may write to the same folder.
            let mut file = tempfile::NamedTempFile::new_in(&self.path)?;
            file.write_all(bytes)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(|error: std::io::Error| error).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads a file, if it is there.
    pub(crate) fn read(&self, digest: BlobDigest) -> anyhow::Result<Option<Vec<u8>>> {
        let path = self.path.join(digest.to_string());
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes.with_context(|| format!("cannot read {}", path.display()))?,
        };
        ensure!(is_of(digest, &bytes), "{} has other bytes than its name says", path.display());
        Ok(Some(bytes))
    }
}

fn is_of(digest: BlobDigest, bytes: &[u8]) -> bool {
    *blake3::hash(bytes).as_bytes() == digest.0
}

/// The media type that the first bytes of a file tell.
pub(crate) fn media_type(bytes: &[u8]) -> &'static str {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => "image/png",
        [0xff, 0xd8, 0xff, ..] => "image/jpeg",
        [b'G', b'I', b'F', b'8', ..] => "image/gif",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "image/webp",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => "audio/wav",
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "video/mp4",
        [0x1a, 0x45, 0xdf, 0xa3, ..] => "video/webm",
        [b'O', b'g', b'g', b'S', ..] => "audio/ogg",
        [b'I', b'D', b'3', ..] | [0xff, 0xfb, ..] => "audio/mpeg",
        _ => "application/octet-stream",
    }
}
