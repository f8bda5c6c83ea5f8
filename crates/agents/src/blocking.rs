//! Work on the bytes of agents, on threads where it may take its time.

use forebay_bounds::work;
use forebay_gateway::{
    DialectError,
    cancel::{Cancellation, Waiting},
};

/// Runs work on such a thread, when one of the cores is free for it. If the future is dropped because the agent has left,
/// the work is cancelled.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce(&Cancellation) -> Result<T, DialectError> + Send + 'static,
) -> Result<T, DialectError> {
    let waiting = Waiting::default();
    let cancellation = waiting.cancellation();
    work::on_thread(move || work(&cancellation)).await.map_err(|_| DialectError::Internal)?
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn work_is_cancelled_when_its_caller_leaves() {
        let (begins, mut begun) = oneshot::channel();
        let (ends, ended) = oneshot::channel();
        let work = move |cancellation: &Cancellation| {
            begins.send(cancellation.is_cancelled()).expect("the test waits");
            while !cancellation.is_cancelled() {
                std::thread::yield_now();
            }
            ends.send(()).expect("the test waits");
            Ok(())
        };
        let mut running = Box::pin(run(work));
        tokio::select! {
            _ = &mut running => panic!("the work ends only if it is cancelled"),
            was_cancelled = &mut begun => assert!(!was_cancelled.expect("the work begins")),
        }
        drop(running);
        ended.await.expect("the work has ended");
    }
}
