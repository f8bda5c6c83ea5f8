//! Histories: agents and trainers call the real binary over HTTP while it is killed, stopped and disconnected. Every
//! call is recorded as answered, refused or unknown. From this record, a checker that is independent of the service
//! verifies that nothing was lost, trained twice, leased twice or delivered in part.

mod check;
mod players;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering},
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use sqlx::Connection as _;

use self::check::check;
use crate::support::{endure, eventually, fresh_database, process::Service};

/// Rollouts of a group, posted by different agents.
const GROUP_SIZE: usize = 3;
const AGENTS: usize = 6;
const TRAINERS: usize = 3;

/// How a call ended.
#[derive(Clone, Debug)]
enum Outcome {
    /// It was answered with success.
    Ok(Value),
    /// It was refused, and nothing changed.
    Refused(u16, Value),
    /// It got no answer, or an error that leaves open whether it took effect.
    Unknown,
}

/// The kind of call.
#[derive(Clone, Debug)]
enum Call {
    Post {
        rollouts: Vec<String>,
    },
    Lease,
    /// The rollouts that a lease delivered, in order.
    Read {
        batch: String,
        rollouts: Vec<String>,
    },
    Extend {
        batch: String,
        lease: String,
    },
    Ack {
        batch: String,
        lease: String,
    },
    Nack {
        batch: String,
        lease: String,
    },
}

/// One call, with the positions of its start and its end in the order of all events.
#[derive(Clone, Debug)]
struct Event {
    invoked: u64,
    ended: u64,
    call: Call,
    outcome: Outcome,
}

/// State that all clients share.
struct World {
    http: reqwest::Client,
    /// Addresses of the replicas; `None` while a replica is down.
    replicas: Mutex<Vec<Option<String>>>,
    order: AtomicU64,
    history: Mutex<Vec<Event>>,
    /// Rollouts that an agent knows to be stored.
    stored: AtomicUsize,
    step: AtomicI64,
    seed: u64,
}

impl World {
    fn new(replicas: usize) -> Arc<Self> {
        Arc::new(Self {
            http: crate::support::http(),
            replicas: Mutex::new(vec![None; replicas]),
            order: AtomicU64::new(0),
            history: Mutex::default(),
            stored: AtomicUsize::new(0),
            step: AtomicI64::new(0),
            seed: endure::seed(),
        })
    }

    fn random(&self, player: usize) -> StdRng {
        StdRng::seed_from_u64(self.seed * 1_000 + player as u64)
    }

    fn now(&self) -> u64 {
        self.order.fetch_add(1, Ordering::SeqCst)
    }

    fn record(&self, invoked: u64, call: Call, outcome: &Outcome) {
        let event = Event { invoked, ended: self.now(), call, outcome: outcome.clone() };
        self.history.lock().expect("no player panics").push(event);
    }

    /// Any replica that is running.
    fn url(&self, random: &mut StdRng) -> Option<String> {
        let replicas = self.replicas.lock().expect("no player panics");
        let up: Vec<&String> = replicas.iter().flatten().collect();
        (!up.is_empty()).then(|| up[random.random_range(0..up.len())].clone())
    }

    fn set(&self, replica: usize, url: Option<String>) {
        self.replicas.lock().expect("no player panics")[replica] = url;
    }
}

/// Runs a whole history and checks it. `disturb` is called between portions of it.
async fn play(database: &str, replicas: usize, groups: usize, postgres: bool) {
    let world = World::new(replicas);
    let mut services = Vec::new();
    for replica in 0..replicas {
        let service = Service::start(database).await;
        world.set(replica, Some(service.url.clone()));
        services.push(service);
    }
    let rules =
        json!({"group": {"size": GROUP_SIZE}, "batch": {"groups": 2}, "lease": {"ttl_s": 1, "max_deliveries": 1000}});
    let url = format!("{}/policies/default", services[0].url);
    world.http.put(url).json(&rules).send().await.expect("the service answers");
    let agents: Vec<_> =
        (0..AGENTS).map(|agent| tokio::spawn(players::agent(Arc::clone(&world), agent, groups))).collect();
    let trainers: Vec<_> =
        (0..TRAINERS).map(|trainer| tokio::spawn(players::trainer(Arc::clone(&world), trainer, groups))).collect();
    let mut random = world.random(99);
    let mut faults = 0;
    let all = groups * GROUP_SIZE;
    while world.stored.load(Ordering::SeqCst) < all {
        // The next fault comes after some more rollouts, or when all are stored.
        let goal = (world.stored.load(Ordering::SeqCst) + 12).min(all);
        eventually("progress", || async { world.stored.load(Ordering::SeqCst) >= goal }).await;
        disturb(&world, &mut services, database, postgres, &mut random).await;
        faults += 1;
    }
    for player in agents.into_iter().chain(trainers) {
        player.await.expect("a player only ends");
    }
    let url = services[0].url.clone();
    let history = world.history.lock().expect("no player panics").clone();
    check(&world.http, &url, &history, groups).await;
    let kind = if postgres { "three replicas on Postgres" } else { "one process on SQLite" };
    endure::report(
        &format!("Calls in checked histories, {kind}"),
        history.len(),
        &format!("{faults} faults, 0 anomalies"),
    );
    for service in services {
        service.stop().await;
    }
}

/// One fault: a replica is killed and restarted, or stopped and continued, or all connections to Postgres end.
async fn disturb(world: &World, services: &mut [Service], database: &str, postgres: bool, random: &mut StdRng) {
    let replica = random.random_range(0..services.len());
    match random.random_range(0..3) {
        0 => {
            world.set(replica, None);
            services[replica].signal("KILL").await;
            // Only one process can serve a file, so the old one must end first.
            let started = loop {
                match Service::try_start(database, &[]).await {
                    Ok(service) => break service,
                    Err(_) => tokio::task::yield_now().await,
                }
            };
            world.set(replica, Some(started.url.clone()));
            let dead = std::mem::replace(&mut services[replica], started);
            dead.ended().await;
        }
        1 => {
            services[replica].signal("STOP").await;
            // Continues the replica after 40 events of the others, or after a fixed time if nobody can work.
            let before = world.order.load(Ordering::SeqCst);
            for _ in 0..200 {
                if world.order.load(Ordering::SeqCst) > before + 40 {
                    break;
                }
                tokio::task::yield_now().await;
            }
            services[replica].signal("CONT").await;
        }
        _ if postgres => {
            let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'forebay'";
            let mut connection = sqlx::PgConnection::connect(database).await.expect("the server accepts");
            sqlx::query(terminate).execute(&mut connection).await.expect("the user is a superuser");
        }
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_on_sqlite_keeps_its_promises_under_faults() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("forebay.db").display());
    play(&database, 1, endure::size(100, 4_000), false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_on_postgres_keep_their_promises_under_faults() {
    play(&fresh_database().await, 3, endure::size(100, 4_000), true).await;
}
