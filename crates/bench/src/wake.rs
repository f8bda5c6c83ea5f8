//! Measures how soon a waiting trainer gets its batch: from the last post of a group to the descriptor.
//!
//! There is one producer, one trainer and one group at a time, on an idle service, so that no time in a queue is
//! measured.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::Serialize;

use crate::{
    protocol::{Protocol as _, forebay::Forebay},
    tally::{Latencies, LatencySummary},
    target::{Answer, Target},
    template::Bodies,
};

/// Longest wait for the batch of a group that was posted.
const WAIT: Duration = Duration::from_secs(10);

/// Time for the trainer's request to arrive and to wait before the group is posted.
const SETTLE: Duration = Duration::from_millis(20);

/// When the rounds end.
pub(crate) struct Rounds {
    pub(crate) warmup: Duration,
    pub(crate) duration: Duration,
    /// Number of rounds, all of which are measured, instead of a time.
    pub(crate) most: Option<u64>,
}

/// The times until descriptors arrived.
#[derive(Debug, Serialize)]
pub(crate) struct Wake {
    /// Time from the answer to the post; 0 if the descriptor arrived first.
    pub(crate) after_answer_ms: LatencySummary,
    /// Time from when the post was sent.
    pub(crate) after_post_ms: LatencySummary,
}

/// Runs all rounds.
pub(crate) async fn measure(
    forebay: Arc<Forebay>,
    target: &Target,
    bodies: &Bodies,
    rounds: &Rounds,
) -> anyhow::Result<Wake> {
    let (mut after_answer, mut after_post) = (Latencies::new(), Latencies::new());
    let start = Instant::now();
    let is_last = |number| match rounds.most {
        Some(most) => number >= most,
        None => start.elapsed() >= rounds.warmup + rounds.duration,
    };
    for number in 0.. {
        if is_last(number) {
            break;
        }
        let trainer = tokio::spawn({
            let forebay = Arc::clone(&forebay);
            async move { forebay.lease(WAIT).await }
        });
        tokio::time::sleep(SETTLE).await;
        let body = bodies.body(number);
        let sent = Instant::now();
        let Answer::Accepted(_) = target.post(forebay.path(), &body).await? else {
            bail!("--wake needs an idle service, and this one is busy");
        };
        let answered = Instant::now();
        let leased = trainer.await.context("the generator is broken")??;
        let (batch, received) = leased.with_context(|| format!("no batch came in {} s", WAIT.as_secs()))?;
        forebay.ack(&batch).await?;
        if rounds.most.is_some() || start.elapsed() >= rounds.warmup {
            after_answer.record(received.saturating_duration_since(answered));
            after_post.record(received - sent);
        }
    }
    let nothing = "no round ended in the measured time: let it run longer";
    Ok(Wake {
        after_answer_ms: after_answer.summary().context(nothing)?,
        after_post_ms: after_post.summary().context(nothing)?,
    })
}
