//! Work that takes long does not hold up other tasks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use forebay_bounds::work;
use futures::FutureExt as _;

/// How long a test waits for something that happens at once on an idle machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// Bytes of a long body.
const LONG: usize = 16 << 20;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

#[test]
fn other_tasks_go_on_while_work_runs_on_the_only_thread() {
    let runtime = runtime();
    let (other, progress) = mpsc::channel();
    let work = runtime.spawn(async move {
        tokio::spawn(async move {
            for step in 0..3 {
                other.send(step).expect("the work waits");
                tokio::task::yield_now().await;
            }
        });
        // This work ends when the other task has made its steps.
        work::run(LONG, move || (0..3).all(|step| progress.recv_timeout(PATIENCE) == Ok(step))).await
    });
    assert!(runtime.block_on(work).expect("the task goes on"), "the other task made no step");
}

#[test]
fn as_much_work_runs_at_a_time_as_there_are_cores() {
    let runtime = runtime();
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let (running, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let calls: Vec<_> = (0..4 * cores)
        .map(|_| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            runtime.spawn(async move {
                let work = || {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::yield_now();
                    running.fetch_sub(1, Ordering::SeqCst);
                };
                work::run(LONG, work).await;
            })
        })
        .collect();
    for call in calls {
        runtime.block_on(call).expect("the task goes on");
    }
    assert!(most.load(Ordering::SeqCst) <= cores);
}

#[test]
fn work_that_nobody_polls_keeps_no_core() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    runtime().block_on(async {
        let (begins, begun) = mpsc::channel();
        let (ends, end) = tokio::sync::watch::channel(false);
        let taken: Vec<_> = (0..cores)
            .map(|_| {
                let (begins, end) = (begins.clone(), end.clone());
                let work = move || {
                    begins.send(()).expect("the test waits");
                    while !*end.borrow() {
                        std::thread::yield_now();
                    }
                };
                tokio::spawn(work::on_thread(work))
            })
            .collect();
        for _ in 0..cores {
            begun.recv_timeout(PATIENCE).expect("all cores are taken");
        }
        // These wait for a core, and are not polled any more.
        let mut unpolled: Vec<_> = (0..cores).map(|_| Box::pin(work::on_thread(|| ()))).collect();
        assert!(unpolled.iter_mut().all(|future| future.now_or_never().is_none()));
        ends.send(true).expect("the work waits");
        for work in taken {
            work.await.expect("the task goes on").expect("the work is done");
        }
        let later = tokio::time::timeout(PATIENCE, work::on_thread(|| ())).await;
        later.expect("there are free cores").expect("the work is done");
        drop(unpolled);
    });
}
