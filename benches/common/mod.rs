//! Shared code of the benchmarks: the service in the same process as its client, bodies like those of agents, and
//! medians.

use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use forebay::{config::Config, server::Server};
use forebay_api::http::guard::Access;
use forebay_domain::clock::AnchoredClock;
use forebay_service::{Buffer, keyring::Keyring};
use forebay_store as store;
use forebay_telemetry::metrics::Metrics;
use tokio::{net::TcpListener, sync::oneshot};

/// Number of rollouts in a body.
pub(crate) const ROLLOUTS: usize = 8;

/// Number of tokens in a rollout.
pub(crate) const TOKENS: usize = 2_000;

/// Starts the service on a database, with a backlog that never fills. Returns its address and a guard that stops it
/// when dropped.
pub(crate) async fn forebay(database: &str) -> anyhow::Result<(String, oneshot::Sender<()>)> {
    forebay_client::install_tls_provider();
    let config = Config::parse(
        "[policy_defaults]\nbacklog = { max_ready_rollouts = 1_000_000_000, max_bytes = 1_000_000_000_000 }",
    )?;
    let metrics = Arc::new(Metrics::new());
    let store = store::open(database, metrics.store()).await?;
    let clock = Arc::new(AnchoredClock::new());
    let buffer =
        Buffer::start(store.clone(), Arc::clone(&clock) as _, Arc::clone(&metrics), config.buffer, config.policies)
            .await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let (stop, stopped) = oneshot::channel::<()>();
    let keyring = Arc::new(Keyring::start(store, clock, false).await?);
    let access = Access { keyring, hosts: Arc::new([]) };
    let server = Server::new(listener, buffer, metrics, config.bodies, config.server, access)?;
    tokio::spawn(async move { server.run(async { drop(stopped.await) }).await });
    Ok((url, stop))
}

/// The parts of a rollout after its ids, with numbers as Python prints them.
pub(crate) fn template() -> Vec<String> {
    let rollout = |rollout: usize| {
        let (mut tokens, mut mask, mut logprobs) = (String::from("1"), String::new(), String::new());
        for index in 0..TOKENS - 1 {
            let noise = (index * 2_654_435_761 + rollout * 40_503) % 1_000_003;
            let comma = if index == 0 { "" } else { ", " };
            let _ = write!(tokens, ", {}", noise % 128_000);
            let _ = write!(mask, "{comma}{}", u8::from(!noise.is_multiple_of(7)));
            let _ = write!(logprobs, "{comma}{}", f64::from(-(noise as f32) / 400_000.0));
        }
        format!(
            r#""group_size": {ROLLOUTS}, "status": "completed", "reward": {}, "segments": [{{"tokens": [{tokens}], "loss_mask": [{mask}], "logprobs": [{logprobs}]}}]}}"#,
            rollout % 2
        )
    };
    (0..ROLLOUTS).map(rollout).collect()
}

/// A body whose group has not been posted before.
pub(crate) fn body(template: &[String]) -> String {
    static NEXT_GROUP: AtomicU64 = AtomicU64::new(0);
    named(template, NEXT_GROUP.fetch_add(1, Ordering::Relaxed))
}

fn named(template: &[String], group: u64) -> String {
    let mut body = String::with_capacity(template.iter().map(|part| part.len() + 64).sum());
    for (rollout, part) in template.iter().enumerate() {
        let separator = if rollout == 0 { '[' } else { ',' };
        let _ = write!(body, r#"{separator}{{"rollout_id": "g{group}-{rollout}", "group_id": "g{group}", {part}"#);
    }
    body.push(']');
    body
}

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
