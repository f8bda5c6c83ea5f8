//! Work that grows with the bytes of clients, agents and engines.
//!
//! On a thread of the async runtime it would hold up all other requests, so the runtime's other tasks move to another
//! thread while it runs. As much of it runs at a time as there are cores: more would only hold more memory.

use std::{num::NonZero, sync::LazyLock, time::Duration};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Notify, Semaphore, SemaphorePermit},
    task::JoinError,
};

/// Work on fewer bytes takes a millisecond at most, and moving the other tasks takes longer.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// How often a waiting future looks for a free core without being woken.
const RECHECK: Duration = Duration::from_millis(100);

static CORES: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));

static FREED: Notify = Notify::const_new();

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
pub async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let core = core().await;
    let work = move || {
        let done = work();
        drop(core);
        done
    };
    tokio::task::spawn_blocking(work).await
}

/// A core that long work has.
struct Core(Option<SemaphorePermit<'static>>);

impl Drop for Core {
    fn drop(&mut self) {
        drop(self.0.take());
        FREED.notify_one();
    }
}

/// Waits until a core is free, and takes it. Work that has a core never waits for another.
///
/// The semaphore's own queue would give a core to whoever is first in it, also if nobody polls that future: hyper
/// does not poll the body of an answer whose client has stopped reading, and as many such clients as there are cores
/// would stop all work. So a core is only taken while a future is polled, and is used in the same poll. The
/// future of such a client may still be the one that is woken for a free core; the others find it when they look again.
async fn core() -> Core {
    loop {
        let mut freed = std::pin::pin!(FREED.notified());
        // A core that is freed after the attempt wakes this future.
        freed.as_mut().enable();
        if let Ok(permit) = CORES.try_acquire() {
            return Core(Some(permit));
        }
        let _ = tokio::time::timeout(RECHECK, freed).await;
    }
}
