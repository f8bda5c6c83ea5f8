//! The clock of the database steps by hours, as after a failover: leases survive, and the service's time continues.
//!
//! Postgres runs with the shim, so that the test sets its clock. The service is the real binary with the real clock of
//! the machine.

use std::path::Path;

use serde_json::{Value, json};

use super::{Faults, SHIM};
use crate::support::{Cluster, eventually, process::Service, rollout, text, with};

const HOURS_3_S: i64 = 3 * 3600;

/// A server whose clock the test moves.
struct Stepping {
    // Declared first, so that it is dropped first: its folder contains the page.
    cluster: Cluster,
    faults: Faults,
}

impl Stepping {
    async fn start() -> Self {
        let start = || {
            let mut faults = None;
            let cluster = Cluster::start_with(|folder| {
                faults = Some(Faults::new(folder));
                environment(folder)
            });
            Self { cluster: cluster.expect("a cluster starts"), faults: faults.expect("the page is made") }
        };
        tokio::task::spawn_blocking(start).await.expect("nothing panics")
    }

    fn step_to_s(&self, seconds: i64) {
        self.faults.set_wall_clock_off_by_s(seconds);
    }
}

/// The account of the server cannot read the tests' folder, nor a page that only the tests' user may open.
fn environment(folder: &Path) -> Vec<(String, String)> {
    use std::os::unix::fs::PermissionsExt as _;
    let (shim, page) = (folder.join("shim.so"), folder.join("faults"));
    std::fs::copy(&*SHIM, &shim).expect("the shim can be copied");
    for (path, mode) in [(&shim, 0o755), (&page, 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("the file is ours");
    }
    let text = |path: &Path| path.to_str().expect("temporary paths are text").to_owned();
    vec![("LD_PRELOAD".to_owned(), text(&shim)), ("FAULTS_PAGE".to_owned(), text(&page))]
}

/// A caller of one replica.
struct Caller {
    http: reqwest::Client,
    service: Service,
}

impl Caller {
    async fn start(database: &str) -> Self {
        Self::of(Service::start(database).await)
    }

    fn of(service: Service) -> Self {
        Self { http: crate::support::http(), service }
    }

    async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let sent = self.http.post(format!("{}{path}", self.service.url)).json(&body).send().await;
        let response = sent.expect("the service answers");
        let status = response.status().as_u16();
        (status, response.json().await.unwrap_or_default())
    }

    async fn rules(&self, policy: &str, ttl_s: u64) {
        let rules = json!({"lease": {"ttl_s": ttl_s}});
        let sent = self.http.put(format!("{}/policies/{policy}", self.service.url)).json(&rules).send().await;
        assert!(sent.expect("the service answers").status().is_success());
    }

    async fn accept(&self, policy: &str, name: &str) {
        let (status, answer) = self.post("/trajectories", with(rollout(name, 1.0), json!({"policy": policy}))).await;
        assert_eq!(status, 201, "{answer}");
    }

    async fn lease(&self, policy: &str) -> Value {
        let (status, batch) = self.post("/batches", json!({"policy": policy})).await;
        assert_eq!(status, 201, "{batch}");
        batch
    }

    async fn state(&self, batch: &Value) -> String {
        let path = format!("{}/batches/{}", self.service.url, text(&batch["batch_id"]));
        let answer: Value =
            self.http.get(path).send().await.expect("the service answers").json().await.expect("a descriptor");
        text(&answer["state"]).to_owned()
    }

    /// Waits until this replica or another one has detected the clock's step and corrected for it.
    async fn goes_on(&self, log: &str) {
        eventually(log, || async { self.service.log().contains(log) }).await;
    }

    async fn ack(&self, batch: &Value, step: i64) {
        let path = format!("/batches/{}/ack", text(&batch["batch_id"]));
        let (status, answer) = self.post(&path, json!({"lease": batch["lease"], "step": step})).await;
        assert_eq!(status, 200, "{answer}");
    }
}

const TAKEN_BACK: &str = "the database's clock was stepped";

/// Holds some leases for minutes, and one that expires within a second, before and after a step of the clock.
async fn leases_survive_a_step_of(seconds: i64) {
    let stepping = Stepping::start().await;
    let database = stepping.cluster.fresh_database().await;
    let first = Caller::start(&database).await;
    first.rules("long", 3000).await;
    first.rules("short", 1).await;
    for name in ["a", "b", "c"] {
        first.accept("long", name).await;
    }
    first.accept("short", "s").await;
    let held = first.lease("long").await;
    stepping.step_to_s(seconds);
    // No replica has polled yet: the running replica answers the one that starts.
    let second = Caller::start(&database).await;
    let other = second.lease("long").await;
    first.goes_on(TAKEN_BACK).await;
    let third = Caller::start(&database).await;
    let last = third.lease("long").await;
    // Time continues at every replica, for leases that were granted by any replica.
    for caller in [&first, &second, &third] {
        let brief = caller.lease("short").await;
        eventually("the end of a lease", || async { first.state(&brief).await == "returned" }).await;
    }
    // Every replica's sweep has run.
    for (caller, batch, step) in [(&third, &held, 1), (&first, &other, 2), (&second, &last, 3)] {
        assert_eq!(caller.state(batch).await, "leased");
        caller.ack(batch, step).await;
    }
    for caller in [first, second, third] {
        caller.service.terminate().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_survive_a_step_back_by_hours() {
    leases_survive_a_step_of(-HOURS_3_S).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_survive_a_step_forward_by_hours() {
    leases_survive_a_step_of(HOURS_3_S).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_back_while_no_replica_runs_stops_no_lease_and_ends_none() {
    let stepping = Stepping::start().await;
    let database = stepping.cluster.fresh_database().await;
    let before = Caller::start(&database).await;
    before.rules("long", 3000).await;
    before.rules("short", 1).await;
    before.accept("long", "a").await;
    before.accept("short", "s").await;
    let held = before.lease("long").await;
    before.lease("short").await;
    before.service.terminate().await;
    stepping.step_to_s(-HOURS_3_S);
    let after = Caller::start(&database).await;
    after.goes_on(TAKEN_BACK).await;
    eventually("the end of a lease", || async { after.post("/batches", json!({"policy": "short"})).await.0 == 201 })
        .await;
    after.ack(&held, 1).await;
    // The next start continues from the end of this one.
    after.accept("long", "b").await;
    let held = after.lease("long").await;
    after.service.terminate().await;
    let again = Caller::start(&database).await;
    again.ack(&held, 2).await;
    again.service.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_time_continues_after_the_clock_was_set_back() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = super::database(folder.path());
    let faults = Faults::new(folder.path());
    let before = Caller::of(faults.start(&database).await.expect("it serves"));
    before.rules("long", 3000).await;
    before.rules("short", 1).await;
    before.accept("long", "a").await;
    before.accept("short", "s").await;
    let held = before.lease("long").await;
    before.lease("short").await;
    before.service.terminate().await;
    faults.set_wall_clock_off_by_s(-HOURS_3_S);
    let after = Caller::of(faults.start(&database).await.expect("it serves"));
    eventually("the end of a lease", || async { after.post("/batches", json!({"policy": "short"})).await.0 == 201 })
        .await;
    after.ack(&held, 1).await;
    after.service.terminate().await;
}
