//! Work that grows with the bytes of clients, agents and engines.
//!
//! On a thread of the async runtime it would hold up all other requests, so the runtime's other tasks move to another
//! thread while it runs. As much of it runs at a time as there are cores: more would only hold more memory.

use std::{num::NonZero, sync::LazyLock};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Semaphore, SemaphorePermit},
    task::JoinError,
};

/// Work on fewer bytes takes a millisecond at most, and moving the other tasks takes longer.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// Does work on so many bytes. If the future is dropped while it waits, the work is not done.
pub async fn run<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes <= INLINE_BYTES_MAX {
        return work();
    }
    let _core = core().await;
    // A runtime of one thread has nowhere to move its tasks to. The service has several.
    let has_threads = Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread;
    if has_threads { tokio::task::block_in_place(work) } else { work() }
}

/// Does long work on a thread for it, when a core is free. Fails only if the runtime ends or the work panics.
///
/// The caller must not have a core already, because work that waits for another core could wait for itself.
pub async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let core = core().await;
    let work = move || {
        let done = work();
        drop(core);
        done
    };
    tokio::task::spawn_blocking(work).await
}

/// Waits until a core is free for long work, and takes it.
pub async fn core() -> SemaphorePermit<'static> {
    static CORES: LazyLock<Semaphore> =
        LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
    CORES.acquire().await.expect("the semaphore is never closed")
}
