//! The bytes of a body, collected piece by piece. Large bodies are in memory that is mapped for them alone.
//!
//! The allocator keeps freed memory: once a large block was freed, glibc takes later ones of that length from its heaps,
//! whose gaps are never given back. A flood of bodies of 8 MB left 100 to 150 MiB there, for which no budget paid. The
//! kernel has mapped memory back when the body is dropped, and says so if there is none, where the allocator would end the
//! process.

use std::io::{self, Read};

use bytes::Bytes;
use memmap2::MmapMut;

/// A buffer on the heap grows up to this length, and then has its whole length at once: a buffer that grows several times
/// leaves gaps.
const GROWN_BYTES_MAX: usize = 256 << 10;

/// The longest buffer on the heap. The kernel clears the pages of each mapping, which takes about 4% of the time that the
/// service has for a body.
const HEAP_BYTES_MAX: usize = 1 << 20;

/// The system has no memory for a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;

/// Bytes that are collected.
#[derive(Debug)]
pub struct Collected {
    memory: Memory,
    bytes_max: usize,
}

#[derive(Debug)]
enum Memory {
    Heap(Vec<u8>),
    Mapped { pages: MmapMut, length: usize },
}

impl Collected {
    /// Collects at most this many bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self { memory: Memory::Heap(Vec::new()), bytes_max }
    }

    pub fn length(&self) -> usize {
        match &self.memory {
            Memory::Heap(bytes) => bytes.len(),
            Memory::Mapped { length, .. } => *length,
        }
    }

    /// Makes room for `bytes` in total. Fails if the system has no memory for so many.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), NoMemory> {
        let Memory::Heap(heap) = &mut self.memory else { return Ok(()) };
        let whole = self.bytes_max.max(bytes);
        let room = if bytes <= GROWN_BYTES_MAX { bytes } else { whole };
        if room <= HEAP_BYTES_MAX {
            return heap.try_reserve_exact(room.saturating_sub(heap.len())).map_err(|_| NoMemory);
        }
        // Pages that nothing was written to take no memory.
        let mut pages = MmapMut::map_anon(whole).map_err(|_| NoMemory)?;
        // A huge page is 2 MiB of memory as soon as a byte of it is written. Kernels without huge pages do not know this.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::NoHugePage);
        let length = heap.len();
        pages[..length].copy_from_slice(heap);
        self.memory = Memory::Mapped { pages, length };
        Ok(())
    }

    /// Adds bytes for which there is room.
    pub fn extend(&mut self, bytes: &[u8]) {
        match &mut self.memory {
            Memory::Heap(heap) => heap.extend_from_slice(bytes),
            Memory::Mapped { pages, length } => {
                pages[*length..*length + bytes.len()].copy_from_slice(bytes);
                *length += bytes.len();
            }
        }
    }

    /// Adds what is read until there are `bytes` in total, for which there is room, or the source ends.
    pub fn fill(&mut self, source: &mut impl Read, bytes: usize) -> io::Result<()> {
        match &mut self.memory {
            Memory::Heap(heap) => {
                source.take(bytes.saturating_sub(heap.len()) as u64).read_to_end(heap)?;
            }
            Memory::Mapped { pages, length } => {
                while *length < bytes {
                    match source.read(&mut pages[*length..bytes])? {
                        0 => break,
                        count => *length += count,
                    }
                }
            }
        }
        Ok(())
    }

    pub fn into_bytes(self) -> Bytes {
        match self.memory {
            Memory::Heap(mut heap) => {
                heap.shrink_to_fit();
                heap.into()
            }
            Memory::Mapped { pages, length } => Bytes::from_owner(pages).slice(..length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_the_same_on_the_heap_and_in_mapped_memory() {
        let sent: Vec<u8> = (0..HEAP_BYTES_MAX + 70_000).map(|index| (index % 251) as u8).collect();
        for bytes in [0, 1, GROWN_BYTES_MAX, GROWN_BYTES_MAX + 1, HEAP_BYTES_MAX, HEAP_BYTES_MAX + 1, sent.len()] {
            let sent = &sent[..bytes];
            let mut collected = Collected::new(bytes);
            for piece in sent.chunks(60_000) {
                collected.reserve(collected.length() + piece.len()).expect("there is memory");
                collected.extend(piece);
            }
            assert_eq!(matches!(collected.memory, Memory::Mapped { .. }), bytes > HEAP_BYTES_MAX, "{bytes}");
            assert_eq!(collected.into_bytes(), sent);
            let (mut read, mut source) = (Collected::new(bytes + 1), sent);
            for room in [bytes / 3, bytes, bytes + 1] {
                read.reserve(room).expect("there is memory");
                read.fill(&mut source, room).expect("memory can be read");
                assert_eq!(read.length(), room.min(bytes));
            }
            assert_eq!(read.into_bytes(), sent);
        }
    }

    #[test]
    fn memory_that_the_system_does_not_have_is_refused() {
        let mut collected = Collected::new(isize::MAX as usize);
        collected.reserve(GROWN_BYTES_MAX).expect("the first bytes are on the heap");
        collected.extend(b"begin");
        assert_eq!(collected.reserve(GROWN_BYTES_MAX + 1), Err(NoMemory));
        assert_eq!(collected.into_bytes(), b"begin"[..]);
    }
}
