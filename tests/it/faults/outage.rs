//! Postgres is killed, restarted, or drops connections under load: agents retry, and everything is stored exactly once.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};
use sqlx::Connection as _;

use crate::support::{Cluster, eventually, fresh_database, member, process::Service, text, with};

const LANES: usize = 4;

/// Posts groups of two until it is stopped, and repeats every post that does not succeed.
async fn produce(
    http: reqwest::Client,
    url: String,
    lane: usize,
    posted: Arc<Mutex<Vec<String>>>,
    stop: Arc<Mutex<bool>>,
) {
    for number in 0.. {
        if *stop.lock().expect("nobody panics") {
            return;
        }
        let group = format!("l{lane}n{number}");
        for index in 0..2 {
            let body = with(member(&group, index, index as f64), json!({"group_size": 2}));
            loop {
                let sent = http.post(format!("{url}/trajectories")).json(&body).send().await;
                let Ok(response) = sent else { continue };
                match response.status().as_u16() {
                    200 | 201 => break,
                    503 => tokio::task::yield_now().await,
                    status => panic!("{status}: {}", response.text().await.unwrap_or_default()),
                }
            }
        }
        posted.lock().expect("nobody panics").push(group);
    }
}

struct Load {
    http: reqwest::Client,
    service: Service,
    posted: Arc<Mutex<Vec<String>>>,
    stop: Arc<Mutex<bool>>,
    lanes: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    async fn start(database: &str) -> Self {
        let service = Service::start(database).await;
        let (http, posted, stop) = (crate::support::http(), Arc::default(), Arc::default());
        let lane = |lane| {
            tokio::spawn(produce(http.clone(), service.url.clone(), lane, Arc::clone(&posted), Arc::clone(&stop)))
        };
        let lanes = (0..LANES).map(lane).collect();
        Self { http, service, posted, stop, lanes }
    }

    fn count(&self) -> usize {
        self.posted.lock().expect("nobody panics").len()
    }

    /// Waits until this many more groups are posted.
    async fn more(&self, groups: usize) {
        let before = self.count();
        eventually("more posts", || async { self.count() >= before + groups }).await;
    }

    /// Stops posting, and checks that every posted group is delivered once and whole.
    async fn check(self) {
        *self.stop.lock().expect("nobody panics") = true;
        for lane in self.lanes {
            lane.await.expect("a producer only stops");
        }
        let posted: BTreeSet<String> = self.posted.lock().expect("nobody panics").iter().cloned().collect();
        let url = &self.service.url;
        let mut delivered = Vec::new();
        loop {
            let sent = self.http.post(format!("{url}/batches")).json(&json!({})).send().await;
            let response = sent.expect("the service answers");
            if response.status() == 204 {
                break;
            }
            let batch: Value = response.json().await.expect("a descriptor");
            let rows = self.http.get(format!("{url}{}", text(&batch["samples_url"]))).send().await;
            let rows = rows.expect("the service answers").text().await.expect("the stream ends well");
            let groups = rows.lines().map(|row| -> Value { serde_json::from_str(row).expect("a row") });
            delivered.extend(groups.map(|row| text(&row["group_id"]).to_owned()));
        }
        assert_eq!(delivered.len(), 2 * posted.len(), "rows are delivered once");
        assert_eq!(delivered.into_iter().collect::<BTreeSet<_>>(), posted);
        let stats = self.http.get(format!("{url}/stats")).send().await.expect("the service answers");
        let stats: Value = stats.json().await.expect("JSON");
        assert_eq!(stats["conserved"], true, "{stats}");
        assert!(self.service.stop().await.success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_crashes_and_comes_back_loses_nothing() {
    let start = || Cluster::start().expect("a cluster starts");
    let mut cluster = tokio::task::spawn_blocking(start).await.expect("nothing panics");
    let load = Load::start(&cluster.fresh_database().await).await;
    for _ in 0..3 {
        load.more(10).await;
        cluster.pg_ctl("stop --mode=immediate").expect("it can be killed");
        let ready = || async {
            let answer = load.http.get(format!("{}/readyz", load.service.url)).send().await;
            answer.expect("the service answers").status() == 200
        };
        eventually("readiness to go", || async { !ready().await }).await;
        cluster.pg_ctl("start --wait --timeout=60").expect("it recovers");
        eventually("readiness to come back", ready).await;
    }
    load.more(10).await;
    load.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_terminated_lose_nothing() {
    let database = fresh_database().await;
    let load = Load::start(&database).await;
    let mut connection = sqlx::PgConnection::connect(&database).await.expect("the server accepts");
    for _ in 0..20 {
        load.more(3).await;
        let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'forebay'";
        sqlx::query(terminate).execute(&mut connection).await.expect("the user is a superuser");
    }
    load.more(10).await;
    load.check().await;
}
