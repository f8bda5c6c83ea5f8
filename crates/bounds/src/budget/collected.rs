//! The bytes of a body, collected piece by piece. Large bodies are in mapped memory, each in a mapping of its own.
//!
//! The allocator keeps freed memory: once a large block was freed, glibc takes later ones of that length from its heaps,
//! whose gaps are never given back. A flood of bodies of 8 MB left 100 to 150 MiB there, for which no budget paid. The
//! kernel has mapped memory back when the body is dropped, except a little that the next bodies take, and says so if there
//! is none, where the allocator would end the process.

use std::{
    io::{self, Read},
    ops::{Deref, DerefMut},
    sync::{Mutex, PoisonError},
};

use bytes::Bytes;
use memmap2::MmapMut;

/// A buffer on the heap grows up to this length, and then has its whole length at once: a buffer that grows several times
/// leaves gaps.
const GROWN_BYTES_MAX: usize = 256 << 10;

/// The longest buffer on the heap.
const HEAP_BYTES_MAX: usize = 1 << 20;

/// The most memory of bodies that were dropped which the process keeps for the next ones. The kernel clears the pages of a
/// new mapping when they are first written, which took a fifth of the time that the service has for a body of 4 MB.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// The mappings that are kept.
static KEPT: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

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
    Mapped { pages: Pages, length: usize },
}

/// A mapping, which is kept for the next body when it is dropped. It may have bytes of an earlier body.
#[derive(Debug)]
struct Pages(Option<MmapMut>);

impl Pages {
    /// The smallest kept mapping that is long enough and not much longer, or a new one.
    fn take(bytes: usize) -> Result<Self, NoMemory> {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |pages: &&MmapMut| (bytes..=bytes.saturating_mul(2)).contains(&pages.len());
        let smallest = kept.iter().filter(fits).map(|pages| pages.len()).min();
        if let Some(at) = smallest.and_then(|length| kept.iter().position(|pages| pages.len() == length)) {
            return Ok(Self(Some(kept.swap_remove(at))));
        }
        drop(kept);
        // Pages that nothing was written to take no memory.
        let pages = MmapMut::map_anon(bytes).map_err(|_| NoMemory)?;
        // A huge page is 2 MiB of memory as soon as a byte of it is written. Kernels without huge pages do not know this.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::NoHugePage);
        Ok(Self(Some(pages)))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let Some(pages) = self.0.take() else { return };
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.iter().map(|pages| pages.len()).sum::<usize>() + pages.len() <= KEPT_BYTES_MAX {
            kept.push(pages);
        }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }
}

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        self
    }
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
        let mut pages = Pages::take(whole)?;
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
    fn a_body_in_the_memory_of_another_one_has_only_its_own_bytes() {
        let collected = |byte: u8, bytes: usize| {
            let mut collected = Collected::new(bytes);
            collected.reserve(bytes).expect("there is memory");
            collected.extend(&vec![byte; bytes]);
            collected.into_bytes()
        };
        // No other test has a body that takes memory of this length, so the second one is in the first one's.
        let (long, short) = (KEPT_BYTES_MAX / 2, KEPT_BYTES_MAX / 2 - 1);
        let first = collected(1, long);
        let place = first.as_ptr();
        drop(first);
        let second = collected(2, short);
        assert_eq!(second.as_ptr(), place);
        assert_eq!((second.len(), second.iter().all(|byte| *byte == 2)), (short, true));
        // While a body is in the memory, no other one is.
        assert_ne!(collected(3, short).as_ptr(), place);
        assert!(second.iter().all(|byte| *byte == 2));
        drop(second);
        let kept = |kept: &Vec<MmapMut>| kept.iter().map(|pages| pages.len()).sum::<usize>();
        drop((0..40).map(|_| collected(4, HEAP_BYTES_MAX + 1)).collect::<Vec<_>>());
        assert!(kept(&KEPT.lock().expect("no test panicked")) <= KEPT_BYTES_MAX);
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
