//! Payloads of Postgres in an object store: a real S3 server, and a proxy before it that is slow, fails, or loses answers.

mod owner;

use std::{
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};

use forebay::{
    clock::Timestamp,
    metrics::Metrics,
    store::{self, PayloadKind, PayloadOptions},
};

use crate::support::{eventually, fresh_database, group, http, process::Service, text, with};

/// What the proxy does with connections and their answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Forward = 0,
    /// Each answer is late.
    Slow = 1,
    /// Connections are closed at once.
    Refuse = 2,
    /// Requests are made, and their answers are lost.
    LoseAnswers = 3,
    /// Objects can be written, and are not found when they are read, as in a store that is eventually consistent.
    NotVisible = 4,
    /// Writes are answered, and nothing is stored.
    Forget = 5,
}

/// The answer of a store that does not show an object yet.
const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// The answer to a write.
const WRITTEN: &[u8] = b"HTTP/1.1 200 OK\r\netag: \"0\"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// The owner of objects. The server does not check signatures.
const OWNER: &str =
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";

/// An S3 server with a bucket, and the proxy before it.
struct S3 {
    _server: Child,
    /// Address of the server itself.
    direct: String,
    /// Address of the proxy.
    proxied: String,
    mode: Arc<AtomicUsize>,
    lost: Arc<AtomicUsize>,
    /// Connections that were closed at once.
    refused: Arc<AtomicUsize>,
    http: reqwest::Client,
}

impl S3 {
    async fn start() -> Self {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
        let environment = Command::new(repository.join("scripts/python-env")).arg("moto").output().await;
        let environment = environment.expect("scripts/python-env can be run");
        assert!(
            environment.status.success(),
            "the Python environment of the S3 server is missing; `./scripts/python-env moto` makes it, and said: {}",
            String::from_utf8_lossy(&environment.stderr)
        );
        let python = String::from_utf8_lossy(&environment.stdout).trim().to_owned();
        let port = {
            let free = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
            free.local_addr().expect("it has an address").port()
        };
        let mut command = Command::new(python);
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let server = command.spawn().expect("the server starts");
        let direct = format!("127.0.0.1:{port}");
        let [mode, lost, refused] = [(); 3].map(|()| Arc::new(AtomicUsize::new(Mode::Forward as usize)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let proxied = listener.local_addr().expect("it has an address").to_string();
        let proxy = Proxy { mode: Arc::clone(&mode), lost: Arc::clone(&lost), refused: Arc::clone(&refused) };
        tokio::spawn(proxy.run(listener, direct.clone()));
        let s3 = Self { _server: server, direct, proxied, mode, lost, refused, http: http() };
        let bucket = || async { s3.http.put(s3.url("")).send().await.is_ok_and(|answer| answer.status() == 200) };
        eventually("a bucket", bucket).await;
        s3
    }

    fn url(&self, key: &str) -> String {
        format!("http://{}/bucket/{key}", self.direct)
    }

    fn set(&self, mode: Mode) {
        self.mode.store(mode as usize, Ordering::SeqCst);
    }

    /// The environment of a service that uses it.
    fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("FOREBAY_PAYLOADS", "objects".to_owned()),
            ("FOREBAY_OBJECTS_URL", "s3://bucket/payloads".to_owned()),
            ("AWS_ENDPOINT", format!("http://{}", self.proxied)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }

    async fn serve(&self, database: &str, config: Option<&Path>) -> Service {
        let environment = self.environment();
        let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let config = config.map(|path| path.to_str().expect("the path is text"));
        let arguments: Vec<&str> = config.into_iter().flat_map(|path| ["--config", path]).collect();
        Service::start_with(database, &[&["--log", "json"], arguments.as_slice()].concat(), &environment).await
    }

    async fn run(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(arguments).envs(self.environment()).env_remove("FOREBAY_PAYLOADS");
        let output = command.output().await.expect("the binary starts");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }

    /// The keys of all objects with payloads.
    async fn keys(&self) -> Vec<String> {
        let listed = self.http.get(self.url("?list-type=2")).send().await.expect("the server answers");
        let listed = listed.text().await.expect("a list is text");
        let keys = listed.split("<Key>").skip(1);
        let keys = keys.map(|rest| rest.split("</Key>").next().unwrap_or_default().to_owned());
        keys.filter(|key| !key.ends_with("/owner")).collect()
    }
}

/// What stands between the service and the S3 server.
#[derive(Clone)]
struct Proxy {
    mode: Arc<AtomicUsize>,
    lost: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
}

impl Proxy {
    async fn run(self, listener: TcpListener, to: String) {
        while let Ok((client, _)) = listener.accept().await {
            if self.is(Mode::Refuse) {
                self.refused.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            let (proxy, to) = (self.clone(), to.clone());
            tokio::spawn(async move { proxy.forward(client, &to).await });
        }
    }

    fn is(&self, mode: Mode) -> bool {
        self.mode.load(Ordering::SeqCst) == mode as usize
    }

    async fn forward(&self, mut client: TcpStream, to: &str) {
        let Ok(mut server) = TcpStream::connect(to).await else { return };
        let (mut requests, mut answers_to) = client.split();
        let (mut answers, mut requests_to) = server.split();
        // The answer to a request that is answered here.
        let forward = async {
            let mut buffer = vec![0; 64 << 10];
            loop {
                let mut count = requests.read(&mut buffer).await.unwrap_or(0);
                if self.is(Mode::NotVisible) && buffer[..count].starts_with(b"GET ") {
                    return Some(NOT_FOUND);
                }
                if self.is(Mode::Forget) && buffer[..count].starts_with(b"PUT ") {
                    while !is_whole(&buffer[..count]) {
                        count += requests.read(&mut buffer[count..]).await.expect("the client sends its request");
                    }
                    return Some(WRITTEN);
                }
                if count == 0 || requests_to.write_all(&buffer[..count]).await.is_err() {
                    return None;
                }
            }
        };
        let backward = async {
            let mut buffer = vec![0; 64 << 10];
            loop {
                let count = answers.read(&mut buffer).await.unwrap_or(0);
                if self.is(Mode::LoseAnswers) || self.is(Mode::Refuse) {
                    self.lost.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                if self.is(Mode::Slow) {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                if count == 0 || answers_to.write_all(&buffer[..count]).await.is_err() {
                    return;
                }
            }
        };
        let answer = tokio::select! { answer = forward => answer, () = backward => None };
        if let Some(answer) = answer {
            let _ = client.write_all(answer).await;
        }
    }
}

/// Whether all bytes of a request have arrived.
fn is_whole(request: &[u8]) -> bool {
    let head = String::from_utf8_lossy(request).to_ascii_lowercase();
    let Some(end) = head.find("\r\n\r\n") else { return false };
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok());
    request.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap_or(end) + 4 + length.unwrap_or(0) <= request.len()
}

async fn post(http: &reqwest::Client, service: &Service, number: usize) -> u16 {
    let mut bundle = group(&format!("g{number}"), &[1.0, 0.0]);
    for (place, rollout) in bundle.as_array_mut().expect("a bundle").iter_mut().enumerate() {
        rollout["segments"] = json!([{"tokens": tokens(2 * number + place), "loss_mask": vec![1; 399]}]);
    }
    let sent = http.post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
    sent.expect("the service answers").status().as_u16()
}

async fn is_ready(http: &reqwest::Client, service: &Service) -> bool {
    let ready = http.get(format!("{}/readyz?full=1", service.url)).send().await;
    ready.is_ok_and(|answer| answer.status() == 200)
}

fn tokens(index: usize) -> Vec<usize> {
    (0..400).map(|token| token * 7_919 % (1_000 + index)).collect()
}

async fn rules(http: &reqwest::Client, service: &Service, more: Value) {
    let rules = with(json!({"group": {"size": 2}}), more);
    let put = http.put(format!("{}/policies/default", service.url)).json(&rules).send().await;
    assert!(put.expect("the service answers").status().is_success());
}

/// The statuses of reading all batches that are ready, and their rows.
async fn delivered(http: &reqwest::Client, service: &Service) -> (Vec<u16>, Vec<Value>) {
    let (mut statuses, mut rows) = (Vec::new(), Vec::new());
    loop {
        let lease = http.post(format!("{}/batches", service.url)).json(&json!({})).send().await;
        let lease = lease.expect("the service answers");
        if lease.status() == 204 {
            return (statuses, rows);
        }
        let batch: Value = lease.json().await.expect("a descriptor");
        let read = http.get(format!("{}{}", service.url, text(&batch["samples_url"]))).send().await;
        let read = read.expect("the service answers");
        statuses.push(read.status().as_u16());
        let lines = read.text().await.unwrap_or_default();
        if statuses.last() == Some(&200) {
            rows.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("a row")));
        }
    }
}

async fn number(database: &str, sql: &'static str) -> i64 {
    let mut connection = PgConnection::connect(database).await.expect("the server accepts");
    sqlx::query_scalar(sql).fetch_one(&mut connection).await.expect("it is valid")
}

const INSIDE: &str = "SELECT COUNT(*) FROM payload WHERE file IS NULL";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_are_objects_that_every_replica_reads_and_a_kill_loses_none() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    s3.set(Mode::Slow);
    for number in 0..5 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    service.kill().await;
    s3.set(Mode::Forward);
    let (first, second) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    assert_eq!(post(&s3.http, &first, 5).await, 201);
    let (statuses, rows) = delivered(&s3.http, &second).await;
    assert_eq!(statuses, [200; 6]);
    for (index, row) in rows.iter().enumerate() {
        assert_eq!(row["tokens"], json!(tokens(index)), "{index}");
    }
    assert_eq!((rows.len(), number(&database, INSIDE).await), (12, 0));
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy && table.contains("0 in the database, 12 in 6"), "{table}");
    first.kill().await;
    second.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_refuses_posts_and_an_answer_that_is_lost_stores_once() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[objects]\ncache_bytes = 0").expect("it can be written");
    let service = s3.serve(&database, Some(&config)).await;
    rules(&s3.http, &service, json!({})).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    let objects = s3.keys().await.len();

    s3.set(Mode::Refuse);
    assert_eq!(post(&s3.http, &service, 1).await, 503);
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 2, "nothing is stored without its payload");
    let readiness = async |query: &str| {
        let answer = s3.http.get(format!("{}/readyz{query}", service.url)).send().await;
        answer.expect("the service answers").status().as_u16()
    };
    let refused = s3.refused.load(Ordering::SeqCst);
    eventually("a probe", || async { s3.refused.load(Ordering::SeqCst) > refused }).await;
    assert_eq!(readiness("?full=1").await, 503, "the database can be written, and that is not enough");
    assert_eq!(readiness("").await, 200, "a balancer that took all replicas away would take leases and acks away too");
    let (statuses, rows) = delivered(&s3.http, &service).await;
    assert_eq!((statuses, rows.len()), (vec![503], 0), "leases go on, and samples can be read later");
    s3.set(Mode::Forward);
    eventually("readiness", || async { readiness("?full=1").await == 200 }).await;
    assert_eq!(post(&s3.http, &service, 1).await, 201);

    s3.set(Mode::LoseAnswers);
    let posting = {
        let (http, url) = (s3.http.clone(), service.url.clone());
        tokio::spawn(async move {
            let sent = http.post(format!("{url}/trajectories")).json(&group("lost", &[1.0, 0.0])).send().await;
            sent.expect("the service answers").status().as_u16()
        })
    };
    eventually("a lost answer", || async { s3.lost.load(Ordering::SeqCst) > 0 }).await;
    s3.set(Mode::Forward);
    assert_eq!(posting.await.expect("a client only posts"), 201, "the request is made again");
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 6);
    assert_eq!(s3.keys().await.len(), objects + 2, "the object has the same name each time");
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy, "{table}");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_another_replica_does_not_see_yet_is_not_lost() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let (first, second) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    rules(&s3.http, &first, json!({})).await;
    s3.set(Mode::NotVisible);
    assert_eq!(post(&s3.http, &first, 0).await, 201);
    let lease = s3.http.post(format!("{}/batches", second.url)).json(&json!({})).send().await;
    let batch: Value = lease.expect("the service answers").json().await.expect("a descriptor");
    let samples = format!("{}{}", second.url, text(&batch["samples_url"]));
    let read = || async { s3.http.get(&samples).send().await.expect("the service answers") };
    assert_eq!(read().await.status().as_u16(), 503, "the same call may succeed later");
    s3.set(Mode::Forward);
    let answer = read().await;
    assert_eq!(answer.status().as_u16(), 200, "the lease is still valid, and nothing is quarantined");
    assert_eq!(answer.text().await.expect("rows").lines().count(), 2);
    first.kill().await;
    second.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_whose_write_was_answered_and_that_is_not_stored_is_noticed_before_the_commit() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    s3.set(Mode::Forget);
    assert_eq!(post(&s3.http, &service, 0).await, 503);
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 0, "no row names what is not there");
    s3.set(Mode::Forward);
    eventually("readiness", || is_ready(&s3.http, &service)).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    assert_eq!(delivered(&s3.http, &service).await.0, [200]);
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_names_every_rollout_whose_object_is_missing_also_if_it_was_just_written() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    for number in 0..3 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    assert!(service.stop().await.success());
    for key in s3.keys().await.iter().take(2) {
        let removal = s3.http.delete(s3.url(key)).header("authorization", OWNER).send().await;
        assert_eq!(removal.expect("the server answers").status(), 204);
    }
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains("6 rollouts"), "{table}");
    assert_eq!(table.matches("- rollout ").count(), 4, "{table}");
    assert_eq!(table.matches("is missing").count(), 2, "{table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_or_read_lately_is_read_from_memory() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let (writes, reads) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    rules(&s3.http, &writes, json!({})).await;
    assert_eq!(post(&s3.http, &writes, 0).await, 201);
    let lease = s3.http.post(format!("{}/batches", writes.url)).json(&json!({})).send().await;
    let batch: Value = lease.expect("the service answers").json().await.expect("a descriptor");
    let samples = async |service: &Service| {
        let read = s3.http.get(format!("{}{}", service.url, text(&batch["samples_url"]))).send().await;
        let lines = read.expect("the service answers").text().await.unwrap_or_default();
        let row = |line: &str| serde_json::from_str::<Value>(line).expect("a row")["tokens"].clone();
        lines.lines().map(row).collect::<Vec<_>>()
    };
    let stored = [0, 1].map(|index| json!(tokens(index)));
    let found = async |service: &Service, from: &str| {
        service.metric(&s3.http, &format!("forebay_object_payloads_read_total{{from=\"{from}\"}}")).await as u64
    };
    s3.set(Mode::Refuse);
    assert_eq!(samples(&writes).await, stored);
    assert_eq!(found(&writes, "cache").await, 2);

    s3.set(Mode::Forward);
    assert_eq!(samples(&reads).await, stored);
    assert_eq!(found(&reads, "store").await, 2);
    s3.set(Mode::Refuse);
    assert_eq!(samples(&reads).await, stored);
    assert_eq!(found(&reads, "cache").await, 2);
    assert_eq!(found(&reads, "store").await, 2);
    writes.kill().await;
    reads.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_whose_payloads_are_purged_are_removed() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[objects]\ngrace_s = 0").expect("it can be written");
    let service = s3.serve(&database, Some(&config)).await;
    rules(&s3.http, &service, json!({})).await;
    for number in 0..2 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    assert_eq!(s3.keys().await.len(), 2);
    let discard = json!({"group_id": "g0", "reason": "test"});
    let discarded = s3.http.post(format!("{}/groups/discard", service.url)).json(&discard).send().await;
    assert_eq!(discarded.expect("the service answers").status(), 200);
    eventually("one object", || async { s3.keys().await.len() == 1 }).await;
    let forgotten = || async { number(&database, "SELECT COUNT(*) FROM segment_file").await == 1 };
    eventually("one row", forgotten).await;
    let (statuses, rows) = delivered(&s3.http, &service).await;
    assert_eq!((statuses, rows.len()), (vec![200], 2), "the other group is whole");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_without_a_row_is_removed_when_no_transaction_can_be_open_any_more() {
    const HOUR: i64 = 3_600_000_000;
    let database = fresh_database().await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let options = PayloadOptions {
        kind: Some(PayloadKind::Objects),
        objects_url: Some(format!("file://{}", folder.path().display())),
        ..PayloadOptions::default()
    };
    let metrics = Metrics::new();
    let opened = store::open_or_create(&database, options, metrics.store()).await.expect("it opens");
    let store_id = number(&database, "SELECT store_id FROM payload_store").await;
    let objects = folder.path().join(format!("{store_id:08x}"));
    std::fs::create_dir_all(&objects).expect("a folder can be made");
    let second =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("it is after 1970").as_secs();
    // The clock of the replica that has numbered the first one is two days slow.
    let [left, committed] = [second - 172_800, second].map(|second| second << 28);
    for number in [left, committed] {
        std::fs::write(objects.join(format!("{number:016x}")), "object").expect("it can be written");
    }
    let has = |number: u64| objects.join(format!("{number:016x}")).exists();
    let look = async |at: i64| {
        opened.store.look_after_payloads(Timestamp::from_micros(at)).await.expect("the folder can be read");
    };
    look(HOUR).await;
    look(2 * HOUR - 1_000_000).await;
    assert!(has(left) && has(committed), "their transactions may be open");
    let mut connection = PgConnection::connect(&database).await.expect("the server accepts");
    let commit = sqlx::query("INSERT INTO segment_file VALUES ($1, 1, 64, 1, 64, NULL)").bind(committed as i64);
    commit.execute(&mut connection).await.expect("the row is new");
    look(2 * HOUR).await;
    assert!(!has(left) && has(committed));
    look(4 * HOUR).await;
    assert!(has(committed), "it has a row");
    opened.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_move_into_objects_and_back_and_an_object_that_was_replaced_is_damage() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = Service::start(&database).await;
    rules(&s3.http, &service, json!({})).await;
    for number in 0..4 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    assert!(service.stop().await.success());
    assert_eq!(number(&database, INSIDE).await, 8);
    let service = s3.serve(&database, None).await;
    eventually("all payloads are objects", || async { number(&database, INSIDE).await == 0 }).await;
    assert!(service.stop().await.success());

    let (moved, said) = s3.run(&["move-payloads", "database", "--database", &database]).await;
    assert!(moved && said.contains("8 in the database, 0 outside of it"), "{said}");
    let (moved, said) = s3.run(&["move-payloads", "objects", "--database", &database]).await;
    assert!(moved && said.contains("0 in the database, 8 outside of it"), "{said}");
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy, "{table}");

    let newest = number(&database, "SELECT MAX(file) FROM payload").await;
    let keys = s3.keys().await;
    let key = keys.iter().find(|key| key.ends_with(&format!("{newest:016x}"))).expect("it is there");
    let removal = s3.http.delete(s3.url(key)).header("authorization", OWNER).send().await;
    assert_eq!(removal.expect("the server answers").status(), 204);
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains(&format!("{newest:016x}")), "{table}");
    let replaced = s3.http.put(s3.url(key)).body("short").send().await;
    assert_eq!(replaced.expect("the server answers").status(), 200);
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains("another one"), "{table}");
    let service = s3.serve(&database, None).await;
    let (statuses, _) = delivered(&s3.http, &service).await;
    assert!(statuses.contains(&500), "{statuses:?}");
    assert!(number(&database, "SELECT COUNT(*) FROM rollout_group WHERE state = 'quarantined'").await > 0);
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_a_database_cannot_have_is_refused() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let refusal = async |database: &str, arguments: &[&str]| {
        let arguments = [&["--listen", "127.0.0.1:0", "--database", database], arguments].concat();
        let (succeeds, said) = s3.run(&arguments).await;
        assert!(!succeeds, "{said}");
        said
    };
    let said = refusal(&database, &["--payloads", "segments"]).await;
    assert!(said.contains("for SQLite"), "{said}");
    let said = refusal("sqlite::memory:", &["--payloads", "objects"]).await;
    assert!(said.contains("for Postgres"), "{said}");
    let said = refusal(&database, &["--payloads", "objects", "--objects-url", "ftp://host/folder"]).await;
    assert!(said.contains("must be s3://BUCKET/PATH"), "{said}");
    let said = refusal(&database, &["--payloads", "objects", "--objects-url", "s3://missing/folder"]).await;
    assert!(said.contains("the object store cannot be used"), "{said}");

    let service = s3.serve(&database, None).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    assert!(service.stop().await.success());
    let said = refusal(&database, &["--payloads", "objects", "--objects-url", "s3://bucket/other"]).await;
    assert!(said.contains("move them into the database first"), "{said}");
}
