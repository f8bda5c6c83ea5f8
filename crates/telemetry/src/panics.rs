//! Panics: each is logged as one line, except where a panic is only how a library reports malformed input.
//!
//! It is separate because the panic hook is global to the process. The default hook writes text of any length, which
//! would break a log of JSON lines.

use std::{
    cell::Cell,
    panic::{PanicHookInfo, UnwindSafe, catch_unwind},
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
};

/// The most characters of a panic message that are logged. The bound exists because the message may quote input of any
/// length.
const MESSAGE_CHARS_MAX: usize = 500;

static HOOK: Once = Once::new();

/// Whether the log has started.
static LOGS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether a panic on this thread is expected, because malformed input may cause it.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// From now on panics are logged instead of printed.
pub fn log() {
    set_hook();
    LOGS.store(true, Ordering::Release);
}

/// Runs code that may panic on malformed input, and returns nothing if it panicked. The caller reports what was wrong
/// with the input.
pub fn catch<T>(work: impl FnOnce() -> T + UnwindSafe) -> Option<T> {
    set_hook();
    EXPECTED.set(true);
    let outcome = catch_unwind(work);
    EXPECTED.set(false);
    outcome.ok()
}

fn set_hook() {
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if EXPECTED.get() {
                return;
            }
            let logs = LOGS.load(Ordering::Acquire);
            if logs {
                write(panic);
            }
            // If backtraces are requested, the default hook prints them to standard error.
            if !logs || std::env::var_os("RUST_BACKTRACE").is_some() {
                usual(panic);
            }
        }));
    });
}

fn write(panic: &PanicHookInfo<'_>) {
    let message: String =
        panic.payload_as_str().unwrap_or("without a message").chars().take(MESSAGE_CHARS_MAX).collect();
    let location = panic.location().map(ToString::to_string);
    tracing::error!(panic.message = message, panic.location = location, "the service has a bug: a task panicked");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expected_panic_ends_in_nothing_and_the_next_is_unexpected() {
        assert_eq!(catch(|| 7), Some(7));
        assert_eq!(catch(|| -> u8 { panic!("the test wants it") }), None);
        assert!(!EXPECTED.get());
    }
}
