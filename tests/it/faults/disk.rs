//! Disks that are full, read-only or slow, descriptors that run out, and a wall clock that jumps.

use futures::StreamExt as _;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, process::Command};

use super::{Call, EIO, ENOSPC, EROFS, Fault, Faults, On, database};
use crate::support::{endure, eventually, member, process::Service, rollout, text, with};

/// How many answers a client may lose before it gets one.
const ANSWERS_LOST_MAX: usize = 20;

struct Machine {
    folder: tempfile::TempDir,
    faults: Faults,
    http: reqwest::Client,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let faults = Faults::new(folder.path());
        Self { folder, faults, http: crate::support::http() }
    }

    async fn start(&self) -> Service {
        self.faults.start(&database(self.folder.path())).await.expect("it serves before it ends")
    }

    /// Posts a body. If the service cannot write, it answers without reading a large body to its end. A busy client may
    /// lose that answer, and then posts again.
    async fn post(&self, service: &Service, body: &Value) -> (u16, Value) {
        let send = async || self.http.post(format!("{}/trajectories", service.url)).json(body).send().await;
        let mut answer = send().await;
        for _ in 0..ANSWERS_LOST_MAX {
            if answer.is_err() {
                answer = send().await;
            }
        }
        let response = answer.expect("the service answers");
        (response.status().as_u16(), response.json().await.expect("answers are JSON"))
    }

    async fn get(&self, service: &Service, path: &str) -> (u16, Value) {
        let response = self.http.get(format!("{}{path}", service.url)).send().await.expect("the service answers");
        (response.status().as_u16(), response.json().await.unwrap_or_default())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_refuses_work_until_there_is_space() {
    let machine = Machine::new();
    let mut service = machine.start().await;
    assert_eq!(machine.post(&service, &rollout("before", 1.0)).await.0, 201);
    machine.faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Any);
    let (status, problem) = machine.post(&service, &rollout("during", 1.0)).await;
    assert_eq!((status, &problem["type"]), (503, &json!("store-unavailable")));
    assert!(problem["retry_after_s"].is_u64(), "{problem}");
    // From here on no body is read; the service answers after the head.
    let address = service.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.expect("it accepts");
    let head = "POST /trajectories HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("it reads");
    let mut answer = vec![0; 12];
    tokio::io::AsyncReadExt::read_exact(&mut stream, &mut answer).await.expect("it answers");
    assert_eq!(answer, b"HTTP/1.1 503");
    assert_eq!(machine.get(&service, "/readyz").await.0, 503);
    assert_eq!(machine.get(&service, "/healthz").await.0, 200);
    assert_eq!(machine.get(&service, "/trajectories?rollout_id=before").await.0, 200, "reading goes on");
    machine.faults.disarm();
    eventually("readiness", || async { machine.get(&service, "/readyz").await.0 == 200 }).await;
    assert_eq!(machine.post(&service, &rollout("during", 1.0)).await.0, 201, "what was refused left nothing behind");
    assert!(service.runs());
    assert_eq!(machine.get(&service, "/stats").await.1["conserved"], true);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_on_a_full_disk_serves_reads_with_the_room_that_is_kept_for_it() {
    let machine = Machine::new();
    let service = machine.start().await;
    assert_eq!(machine.post(&service, &rollout("before", 1.0)).await.0, 201);
    assert!(service.stop().await.success());
    let reserve = machine.folder.path().join("forebay.db.reserve");
    assert!(reserve.exists(), "it is kept while the disk has room");
    machine.faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Any);
    // The disk is full as long as nobody gives room back.
    let condition = ("FAULTS_WHILE", reserve.to_str().expect("temporary paths are text"));
    let environment = [machine.faults.environment().as_slice(), &[condition]].concat();
    let database = database(machine.folder.path());
    let service = Service::try_start(&database, &environment).await.expect("it serves before it ends");
    assert!(machine.faults.struck() > 0 && service.log().contains("the disk is full"), "{}", service.log());
    assert_eq!(machine.get(&service, "/trajectories?rollout_id=before").await.0, 200);
    machine.faults.disarm();
    assert_eq!(machine.post(&service, &rollout("after", 1.0)).await.0, 201);
    assert!(service.stop().await.success());
    assert!(reserve.exists(), "it is kept again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_finds_no_room_in_the_database_leaves_the_rows_in_the_log() {
    let machine = Machine::new();
    let service = machine.start().await;
    assert_eq!(machine.post(&service, &rollout("before", 1.0)).await.0, 201);
    service.kill().await;
    machine.faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Database);
    let service = machine.start().await;
    assert!(machine.faults.struck() > 0, "the start tries to empty the log");
    assert_eq!(machine.get(&service, "/trajectories?rollout_id=before").await.0, 200);
    machine.faults.disarm();
    assert_eq!(machine.post(&service, &rollout("after", 1.0)).await.0, 201);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_segment_file_that_cannot_be_written_refuses_posts_until_it_can() {
    let machine = Machine::new();
    let mut service = machine.start().await;
    for _ in 0..2 {
        machine.faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Segment);
        let (status, problem) = machine.post(&service, &rollout("during", 1.0)).await;
        assert_eq!((status, &problem["type"]), (503, &json!("store-unavailable")));
        let struck = machine.faults.struck();
        eventually("three probes", || async { machine.faults.struck() >= struck + 3 }).await;
        assert_eq!(machine.get(&service, "/readyz").await.0, 503, "the log can be written, and that is not enough");
        machine.faults.disarm();
        eventually("readiness", || async { machine.get(&service, "/readyz").await.0 == 200 }).await;
    }
    assert_eq!(machine.post(&service, &rollout("during", 1.0)).await.0, 201);
    assert!(service.runs());
    machine.faults.arm(Fault::Fail(EIO), Call::Sync, On::Segment, 1);
    let sent = machine.http.post(format!("{}/trajectories", service.url)).json(&rollout("lost", 1.0)).send().await;
    assert!(sent.is_err() || sent.is_ok_and(|answer| answer.status() != 201));
    assert_eq!(service.ended().await.code(), Some(1), "nothing is known about a file after a sync that failed");
    let service = machine.start().await;
    assert_eq!(machine.get(&service, "/trajectories?rollout_id=during").await.0, 200);
    assert_eq!(machine.get(&service, "/trajectories?rollout_id=lost").await.0, 404);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_noticed_in_the_middle_of_a_large_write() {
    let machine = Machine::new();
    let service = machine.start().await;
    // The post is larger than the database's cache, so it is written before the commit, and it does not compress.
    let mut random = StdRng::seed_from_u64(endure::seed());
    let tokens: Vec<i32> = (0..800_000).map(|_| random.random_range(0..i32::MAX)).collect();
    let segments = json!([{"tokens": tokens, "loss_mask": [1]}]);
    let large = with(rollout("large", 1.0), json!({"segments": segments}));
    machine.faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Any);
    assert_eq!(machine.post(&service, &large).await.0, 503);
    assert_eq!(machine.get(&service, "/readyz").await.0, 503);
    machine.faults.disarm();
    eventually("readiness", || async { machine.get(&service, "/readyz").await.0 == 200 }).await;
    assert_eq!(machine.post(&service, &large).await.0, 201);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_that_does_not_fit_on_the_disk_leaves_no_files() {
    let machine = Machine::new();
    let service = machine.start().await;
    assert_eq!(machine.post(&service, &rollout("before", 1.0)).await.0, 201);
    assert!(service.stop().await.success());
    let (database, copy) = (database(machine.folder.path()), machine.folder.path().join("forebay.db.copy"));
    let run = async |command: &str| {
        let mut process = Command::new(env!("CARGO_BIN_EXE_forebay"));
        process.arg(command).arg(&copy).args(["--database", &database]).envs(machine.faults.environment());
        process.output().await.expect("the binary starts")
    };
    let copies = || {
        let entries = machine.folder.path().read_dir().expect("the folder is there").flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.contains("copy")).collect::<Vec<_>>()
    };
    for fault in [Call::Write, Call::Sync] {
        machine.faults.arm_lasting(Fault::Fail(ENOSPC), fault, On::Any);
        let output = run("backup").await;
        assert!(machine.faults.struck() > 0 && !output.status.success(), "{fault:?}: {output:?}");
        machine.faults.disarm();
        assert_eq!(copies(), Vec::<String>::new(), "{fault:?}");
    }
    assert!(run("backup").await.status.success() && copy.exists());
    assert!(run("restore").await.status.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_system_that_becomes_read_only_ends_the_process() {
    let machine = Machine::new();
    let service = machine.start().await;
    assert_eq!(machine.post(&service, &rollout("before", 1.0)).await.0, 201);
    machine.faults.arm_lasting(Fault::Fail(EROFS), Call::Write, On::Any);
    let during = rollout("during", 1.0);
    let sent = machine.http.post(format!("{}/trajectories", service.url)).json(&during).send().await;
    assert!(sent.is_err() || sent.is_ok_and(|answer| answer.status() == 503));
    assert_eq!(service.ended().await.code(), Some(1));
    machine.faults.arm_lasting(Fault::Fail(EROFS), Call::Open, On::Any);
    let status = machine.faults.start(&database(machine.folder.path())).await.err().expect("it cannot serve");
    assert_eq!(status.code(), Some(1));
    machine.faults.disarm();
    let service = machine.start().await;
    assert_eq!(machine.get(&service, "/trajectories?rollout_id=before").await.0, 200);
    assert_eq!(machine.post(&service, &during).await.0, 201);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_sync_of_a_slow_disk_serves_all_waiting_posts() {
    const POSTS: usize = 48;
    let machine = Machine::new();
    let service = machine.start().await;
    // So slow that many posts arrive during one sync, on a busy machine too.
    machine.faults.arm_lasting(Fault::DelayMicros(400_000), Call::Sync, On::Wal);
    let posts = (0..POSTS).map(|index| {
        let (machine, service) = (&machine, &service);
        async move { machine.post(service, &rollout(&format!("r{index}"), 1.0)).await.0 }
    });
    let statuses: Vec<u16> = futures::stream::iter(posts).buffer_unordered(POSTS).collect().await;
    assert_eq!(statuses, vec![201; POSTS]);
    // All posts that arrive during one sync share the next one.
    assert!(machine.faults.struck() < POSTS as i64 / 3, "{} syncs", machine.faults.struck());
    machine.faults.disarm();
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_out_of_descriptors_is_survived() {
    let machine = Machine::new();
    let mut command = Command::new("sh");
    let binary = env!("CARGO_BIN_EXE_forebay");
    let database = database(machine.folder.path());
    command.args(["-c", "ulimit -n 64; exec \"$@\"", "sh", binary, "--listen", "127.0.0.1:0", "--log", "json"]);
    command.args(["--database", &database]);
    let mut service = Service::spawn(command).await.expect("it serves before it ends");
    assert_eq!(machine.post(&service, &rollout("before", 1.0)).await.0, 201);
    let address = service.url.trim_start_matches("http://").to_owned();
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(TcpStream::connect(&address).await.expect("the kernel accepts"));
    }
    eventually("an accept that fails", || async { service.log().contains("accepting a connection failed") }).await;
    // Connected clients are served, so the client keeps its connection.
    assert_eq!(machine.post(&service, &rollout("during", 1.0)).await.0, 201);
    drop(idle);
    let other = crate::support::http();
    let sent = other.post(format!("{}/trajectories", service.url)).json(&rollout("after", 1.0)).send().await;
    assert_eq!(sent.expect("it accepts again").status(), 201);
    assert!(service.runs());
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wall_clock_that_jumps_neither_ends_leases_nor_keeps_them() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.post(&service, &member("a", 0, 1.0)).await;
    let lease = json!({"consumer": "t", "request_id": "one"});
    let call = |path: String, body: Value| {
        let request = machine.http.post(format!("{}{path}", service.url)).json(&body);
        async move {
            let response = request.send().await.expect("the service answers");
            (response.status().as_u16(), response.json::<Value>().await.unwrap_or_default())
        }
    };
    let (status, batch) = call("/batches".into(), lease.clone()).await;
    assert_eq!(status, 201);
    let path = format!("/batches/{}", text(&batch["batch_id"]));
    for offset in [3_600, -3_600] {
        machine.faults.set_wall_clock_off_by_s(offset);
        let (status, again) = call("/batches".into(), lease.clone()).await;
        assert_eq!((status, &again["lease"]), (200, &batch["lease"]), "the lease lives on");
        let (status, extended) = call(format!("{path}/extend"), json!({"lease": batch["lease"], "ttl_s": 60})).await;
        assert_eq!(status, 200);
        let left = extended["expires_in_ms"].as_i64().expect("a number");
        assert!((1..=60_000).contains(&left), "{left} ms are left");
        assert_eq!(call("/batches".into(), json!({"consumer": "other"})).await.0, 204, "nobody else has it");
    }
    assert_eq!(call(format!("{path}/ack"), json!({"lease": batch["lease"], "step": 1})).await.0, 200);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_failed_names_the_requests_that_it_was_for() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Any);
    let post = machine.http.post(format!("{}/trajectories", service.url)).header("x-request-id", "post-1");
    assert_eq!(post.json(&rollout("r", 1.0)).send().await.expect("the service answers").status(), 503);
    machine.faults.disarm();
    let log = service.terminate().await;
    let lines = log.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    // Other commits may belong to sweeps, which no request has asked for.
    let failed: Vec<Value> = lines.filter(|line| line["message"] == "a commit failed").collect();
    assert!(failed.iter().any(|line| line["request.ids"] == "post-1"), "{failed:?}");
}
