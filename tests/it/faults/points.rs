//! The service is killed, or its disk fails, at the nth write or sync, for every n until a run ends without a fault.
//! Acknowledged data is stored, other data is stored completely or not at all, and continuing the work ends in the same
//! state.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};

use super::{Call, EIO, Fault, Faults, On, database};
use crate::support::{endure, group, member, process::Service, text, with, with_image};

/// Calls of the script: method, path, body. `{batch}` and `{lease}` are those of the last lease.
fn script() -> Vec<(&'static str, &'static str, Value)> {
    let lease = |request_id: &str| ("POST", "/batches", json!({"consumer": "t", "request_id": request_id}));
    let ack = |step: i64| ("POST", "/batches/{batch}/ack", json!({"lease": "{lease}", "step": step}));
    vec![
        ("PUT", "/policies/default", json!({"group": {"size": 2}, "staleness": {"max": 8}})),
        ("POST", "/admissions", json!({"rollouts": 2})),
        ("POST", "/trajectories", member("a", 0, 1.0)),
        ("POST", "/trajectories", member("a", 1, 0.0)),
        ("POST", "/trajectories", group("b", &[1.0, 0.5])),
        lease("first"),
        ack(1),
        ("POST", "/policies/default/checkpoints", json!({"step": 1})),
        ("PUT", "/policies/default/version", json!({"version": 1, "step": 1})),
        lease("second"),
        ("POST", "/batches/{batch}/nack", json!({"lease": "{lease}", "reason": "test"})),
        lease("third"),
        ack(2),
        ("POST", "/policies/default/resume", json!({"step": 1})),
        lease("fourth"),
        ack(2),
        ("POST", "/trajectories", member("c", 0, 1.0)),
        ("POST", "/trajectories", with(group("e", &[1.0])[0].clone(), with_image(&[7; 100]))),
        ("POST", "/groups/discard", json!({"group_id": "c", "reason": "test"})),
        ("POST", "/trajectories", member("a", 2, 1.0)),
        ("PUT", "/policies/scored", json!({"scores": {"required": ["tests", "judge"], "reward": "scores.judge"}})),
        ("POST", "/trajectories", with(member("d", 0, 1.0), json!({"policy": "scored"}))),
        ("POST", "/scores", score("tests", 1.0)),
        ("POST", "/scores", score("judge", 0.25)),
    ]
}

fn score(name: &str, value: f64) -> Value {
    json!({"policy": "scored", "rollout_id": "d-0", "name": name, "value": value})
}

/// State that outlives the process: the service's files, and what its clients know.
struct Run<'a> {
    faults: &'a Faults,
    database: String,
    http: reqwest::Client,
    service: Option<Service>,
    lease: Value,
    /// Number of processes that ended in the middle of the script.
    deaths: usize,
}

impl Run<'_> {
    /// Returns the service, and starts it again without a fault if it has ended.
    async fn url(&mut self) -> String {
        while self.service.is_none() {
            match self.faults.start(&self.database).await {
                Ok(service) => self.service = Some(service),
                Err(status) => {
                    assert!(self.faults.struck() > 0, "it ended before it served: {status}");
                    self.died();
                }
            }
        }
        self.service.as_ref().map(|service| service.url.clone()).expect("it was started above")
    }

    fn died(&mut self) {
        self.deaths += 1;
        assert!(self.deaths < 4, "one fault ends one life");
        self.faults.disarm();
    }

    /// Makes one call, repeating it until it is answered.
    async fn call(&mut self, method: &str, path: &str, body: &Value) {
        let mut repeated = false;
        loop {
            let url = self.url().await;
            let fill = |text: &str| {
                let field = |name: &str| self.lease[name].as_str().unwrap_or_default().to_owned();
                text.replace("{batch}", &field("batch_id")).replace("{lease}", &field("lease"))
            };
            let body: Value = serde_json::from_str(&fill(&body.to_string())).expect("ids need no escapes");
            let method = method.parse().expect("a method");
            let sent = self.http.request(method, format!("{url}{}", fill(path))).json(&body).send().await;
            let answer = match sent {
                Ok(response) => {
                    let status = response.status().as_u16();
                    response.json::<Value>().await.ok().map(|body| (status, body))
                }
                Err(_) => None,
            };
            match answer {
                Some((200 | 201, body)) => {
                    if path == "/batches" {
                        self.lease = body;
                    }
                    return;
                }
                // The call took effect and its answer was lost, so the repeat is refused with this problem.
                Some((409, body)) if repeated && matches!(text(&body["type"]), "lease-lost" | "group-decided") => {
                    return;
                }
                // A service whose store is broken ends by itself.
                Some((503, _)) | None => {
                    let service = self.service.take().expect("it was called");
                    let status = service.ended().await;
                    assert!(!status.success(), "it ended as if nothing had happened");
                    self.died();
                    repeated = true;
                }
                Some((status, body)) => panic!("{path}: {status} {body}"),
            }
        }
    }

    /// The whole ledger, without ids and times that differ between runs.
    async fn state(&mut self) -> BTreeMap<&'static str, Value> {
        let url = self.url().await;
        let mut state = BTreeMap::new();
        for path in [
            "/trajectories?limit=100",
            "/groups",
            "/batches?policy=default",
            "/policies/default",
            "/stats",
            "/trajectories?policy=scored",
            "/scores?policy=scored&rollout_id=d-0",
        ] {
            let response = self.http.get(format!("{url}{path}")).send().await.expect("the service answers");
            let mut body: Value = response.json().await.expect("JSON");
            strip(&mut body);
            state.insert(path, body);
        }
        state
    }
}

/// Removes what may differ: times, ids that the service creates, and the epoch, which a repeated resume increases.
fn strip(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(strip),
        Value::Object(fields) => {
            fields.retain(|name, _| {
                // The service mints the ids of executions that nobody names.
                name != "execution_id"
                    && !name.ends_with("_at")
                    && !matches!(name.as_str(), "batch_id" | "batches_url" | "samples_url" | "lease" | "epoch" | "next")
                    && name != "expires_in_ms"
                    // An admission whose answer was lost may have reserved room that nobody uses.
                    && name != "reserved_rollouts"
            });
            if let Some(batches) = fields.get_mut("batches").filter(|batches| batches.is_array()) {
                // Batch ids differ between runs, so only their number is compared.
                *batches = batches.as_array().map_or(0, Vec::len).into();
            }
            fields.values_mut().for_each(strip);
        }
        _ => {}
    }
}

/// Runs the whole script with one fault. Returns the end state, and whether the fault struck.
async fn run(folder: &Path, fault: Option<(Fault, Call, On, i64)>) -> (BTreeMap<&'static str, Value>, bool) {
    let faults = Faults::new(folder);
    if let Some((fault, call, on, nth)) = fault {
        faults.arm(fault, call, on, nth);
    }
    let database = database(folder);
    let http = crate::support::http();
    let mut run = Run { faults: &faults, database, http, service: None, lease: Value::Null, deaths: 0 };
    for (method, path, body) in script() {
        run.call(method, path, &body).await;
    }
    // A graceful stop copies the log back into the database, so the fault may also strike the writes of this
    // checkpoint.
    if let Some(service) = run.service.take() {
        service.stop().await;
    }
    let struck = faults.struck() > 0;
    faults.disarm();
    let state = run.state().await;
    assert_eq!(state["/stats"]["conserved"], true, "{}", state["/stats"]);
    if let Some(service) = run.service.take() {
        service.stop().await;
    }
    (state, struck)
}

/// Strikes every nth call, in steps, until one run ends without a fault.
async fn everywhere(fault: Fault, call: Call, on: On, step: usize) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (undisturbed, _) = run(folder.path(), None).await;
    let mut strikes = 0;
    for nth in (1..).step_by(step) {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let (state, struck) = run(folder.path(), Some((fault, call, on, nth))).await;
        for (path, expected) in &undisturbed {
            assert_eq!(&state[path], expected, "{path} after {fault:?} at {call:?} {nth} of {on:?}");
        }
        if !struck {
            break;
        }
        strikes += 1;
    }
    endure::report(&format!("{fault:?} at {call:?} on {on:?}"), strikes, "lives, each at another call");
    assert!(strikes > 0, "no call was struck");
}

/// Number of calls that are skipped between two strikes; 0 in the long version.
fn step(short: usize) -> usize {
    endure::size(short, 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_before_a_commit_is_synced() {
    everywhere(Fault::KillBefore, Call::Sync, On::Wal, step(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_after_a_commit_and_before_its_answer() {
    everywhere(Fault::KillAfter, Call::Sync, On::Wal, step(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_in_the_middle_of_a_commit() {
    everywhere(Fault::KillBefore, Call::Write, On::Wal, step(41)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_while_the_log_is_copied_back() {
    everywhere(Fault::KillBefore, Call::Write, On::Database, step(11)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sync_that_fails_ends_the_process_and_loses_nothing() {
    everywhere(Fault::Fail(EIO), Call::Sync, On::Any, step(3)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_fails_ends_the_process_and_loses_nothing() {
    everywhere(Fault::Fail(EIO), Call::Write, On::Wal, step(41)).await;
}
