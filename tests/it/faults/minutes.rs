//! `kill -9` between two minutes of the history: the series has a gap, no wrong point, and the sum of the ledger.
//!
//! Each process begins in a later minute, by the shim. Nothing waits for the machine's minutes to pass.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::Faults;
use crate::support::{eventually, process::Service, rollout};

/// Seconds after the begin of a minute at which every process starts, so that the minute does not end while it runs.
const INTO_A_MINUTE_S: i64 = 5;

const METRICS: [&str; 3] = ["received", "kept", "tokens_received"];

/// The tokens of a rollout of these tests.
const TOKENS: f64 = 3.0;

/// A service whose processes are killed.
struct Killed<'f> {
    faults: &'f Faults,
    database: String,
    /// The minute in which the first process starts.
    first: i64,
    /// Seconds from the clock of the machine to the begin of that minute.
    offset_s: i64,
    http: reqwest::Client,
}

impl<'f> Killed<'f> {
    fn new(faults: &'f Faults, database: String) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is set");
        let now = i64::try_from(now.as_secs()).expect("it is in this age");
        let first = now / 60 + 1;
        Self { faults, database, first, offset_s: first * 60 - now, http: crate::support::http() }
    }

    /// A process that starts this many minutes after the first one.
    async fn start(&self, minutes: i64) -> Service {
        self.faults.set_wall_clock_off_by_s(self.offset_s + minutes * 60 + INTO_A_MINUTE_S);
        self.faults.start(&self.database).await.expect("it serves")
    }

    async fn get(&self, service: &Service, path: &str) -> Value {
        let sent = self.http.get(format!("{}{path}", service.url)).send().await;
        sent.expect("the service answers").json().await.expect("JSON")
    }

    async fn post(&self, service: &Service, name: &str) {
        let sent = self.http.post(format!("{}/trajectories", service.url)).json(&rollout(name, 1.0)).send().await;
        assert_eq!(sent.expect("the service answers").status(), 201);
    }

    /// Kills a process while an agent posts, after at least one of these posts was acknowledged.
    async fn kill_under_load(&self, service: Service) {
        let (http, url) = (self.http.clone(), format!("{}/trajectories", service.url));
        let agent = tokio::spawn(async move {
            for number in 0.. {
                let body = rollout(&format!("load-{number}"), 1.0);
                let Ok(answer) = http.post(&url).json(&body).send().await else { break };
                assert_eq!(answer.status(), 201);
            }
        });
        eventually("some posts", || async { self.received(&service).await >= 10.0 }).await;
        service.kill().await;
        agent.await.expect("the agent only stops");
    }

    /// All rollouts that the ledger has counted.
    async fn received(&self, service: &Service) -> f64 {
        let stats = self.get(service, "/stats").await;
        assert_eq!(stats["conserved"], true, "{stats}");
        stats["policies"]["default"]["received"].as_f64().expect("a number")
    }

    /// What the minutes had from the first one, by metric.
    async fn series(&self, service: &Service, minutes: i64) -> [Vec<Option<f64>>; 3] {
        let time = |minute: i64| jiff::Timestamp::from_second(minute * 60).expect("it is a time").to_string();
        let (from, to) = (time(self.first), time(self.first + minutes));
        let metrics = METRICS.join(",");
        let path = format!("/policies/default/series?from={from}&to={to}&metrics={metrics}");
        let found = self.get(service, &path).await;
        METRICS.map(|metric| {
            let column = found["metrics"][metric].as_array().unwrap_or_else(|| panic!("{found}"));
            column.iter().map(Value::as_f64).collect()
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_between_two_minutes_leaves_a_gap_and_no_wrong_point() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let faults = Faults::new(folder.path());
    let killed = Killed::new(&faults, super::database(folder.path()));

    // The process ends before any of what it counted is in the history.
    let service = killed.start(0).await;
    for name in ["a", "b", "c"] {
        killed.post(&service, name).await;
    }
    service.kill().await;

    // The next process finds it, and ends between two minutes as well.
    let service = killed.start(1).await;
    eventually("the first minute", || async { killed.series(&service, 1).await[0] == [Some(3.0)] }).await;
    assert_eq!(killed.series(&service, 2).await[0], [Some(3.0), Some(0.0)]);
    killed.kill_under_load(service).await;

    // Five minutes later, the gap is known, and so is what the ledger had counted before it.
    let service = killed.start(7).await;
    let before = killed.received(&service).await;
    let gap = [None; 5];
    let expected = |last: &[f64]| -> Vec<Option<f64>> {
        let known = [Some(3.0), Some(before - 3.0)].into_iter();
        known.chain(gap).chain(last.iter().copied().map(Some)).collect()
    };
    eventually("the gap", || async { killed.series(&service, 8).await[0] == expected(&[0.0]) }).await;
    killed.post(&service, "d").await;
    assert_eq!(killed.series(&service, 8).await[0], expected(&[1.0]));
    service.kill().await;

    // Each process finds the same, and the buckets add up to the ledger.
    let service = killed.start(8).await;
    let expected = expected(&[1.0, 0.0]);
    eventually("the last minute", || async { killed.series(&service, 9).await[0] == expected }).await;
    let [received, kept, tokens] = killed.series(&service, 9).await;
    let total = killed.received(&service).await;
    assert!(total > 10.0, "{total}");
    let sum = received.iter().flatten().sum::<f64>();
    assert!((sum - total).abs() < 1e-9, "{sum} of {total}");
    assert_eq!(kept, received);
    assert_eq!(tokens, received.iter().map(|count| count.map(|count| count * TOKENS)).collect::<Vec<_>>());
    service.terminate().await;
}
