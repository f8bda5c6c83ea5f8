//! Panics: one line of the log each, and no line where a panic is only how a library says that its input is malformed.
//!
//! It is separate because a hook is one for the whole process, and the usual one writes text of any length beside a log
//! of JSON.

use std::{
    cell::Cell,
    panic::{PanicHookInfo, UnwindSafe, catch_unwind},
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
};

/// Characters of a message that are logged: a panic may quote what somebody sent.
const MESSAGE_CHARS_MAX: usize = 500;

static HOOK: Once = Once::new();

/// The log has started.
static LOGS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// What runs on this thread may panic over its input.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// From now on panics are logged instead of printed.
pub(crate) fn log() {
    set_hook();
    LOGS.store(true, Ordering::Release);
}

/// Runs what may panic over its input; none when it did. The caller says what was wrong with the input.
pub(crate) fn catch<T>(work: impl FnOnce() -> T + UnwindSafe) -> Option<T> {
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
            // Who asks for backtraces reads standard error himself.
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
