//! A file as a stream of its decompressed bytes.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::Context as _;

/// The bytes of a buffer between a file and its reader.
const BUFFER_BYTES: usize = 256 << 10;

/// An open file.
pub(super) struct Source {
    bytes: Box<dyn BufRead>,
    position: Arc<Position>,
}

/// How much of a file was read.
pub(super) struct Position {
    read: AtomicU64,
    /// None if it is not known, as of a pipe.
    total: Option<u64>,
}

impl Source {
    /// Opens a file, and decompresses it if its name ends with `.gz` or `.zst`.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let context = || format!("cannot open {}", path.display());
        let (file, total): (Box<dyn Read>, _) = if path == Path::new("-") {
            (Box::new(io::stdin()), None)
        } else {
            let file = File::open(path).with_context(context)?;
            let total = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|metadata| metadata.len());
            (Box::new(file), total)
        };
        let position = Arc::new(Position { read: AtomicU64::new(0), total });
        let counted = BufReader::with_capacity(BUFFER_BYTES, Counted { file, position: Arc::clone(&position) });
        let bytes: Box<dyn BufRead> = match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => buffered(flate2::bufread::MultiGzDecoder::new(counted)),
            Some("zst") => buffered(zstd::Decoder::with_buffer(counted).with_context(context)?),
            _ => Box::new(counted),
        };
        Ok(Self { bytes, position })
    }

    pub(super) fn position(&self) -> Arc<Position> {
        Arc::clone(&self.position)
    }
}

impl Position {
    /// Bytes that were read from the file, and its size.
    pub(super) fn get(&self) -> (u64, Option<u64>) {
        (self.read.load(Ordering::Relaxed), self.total)
    }
}

fn buffered(decoder: impl Read + 'static) -> Box<dyn BufRead> {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(buffer)
    }
}

impl BufRead for Source {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.bytes.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        self.bytes.consume(amount);
    }
}

/// Counts the bytes that are read.
struct Counted {
    file: Box<dyn Read>,
    position: Arc<Position>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.position.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
