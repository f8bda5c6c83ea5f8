//! A real S3 server, and a proxy before it that is slow, fails, or loses answers.

use std::{
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};

use crate::support::{eventually, http, process::Service};

/// What the proxy does with connections and their answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
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
    /// Requests are accepted and never answered.
    Hang = 6,
    /// Of each object but the owner object, another last byte is stored.
    Alter = 7,
    /// Before the owner object is written, another database adopts the objects.
    Adopt = 8,
}

/// The answer of a store that does not show an object yet.
const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// The answer to a write.
const WRITTEN: &[u8] = b"HTTP/1.1 200 OK\r\netag: \"0\"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// The owner object of a database that no test has.
pub(super) const ADOPTED: &str = r#"{"identity":"7/1","incarnation":5,"fence":3}"#;

/// Who may remove objects from the bucket. The server does not check signatures.
pub(super) const CREDENTIALS: &str =
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";

/// An S3 server with a bucket, and the proxy before it.
pub(super) struct S3 {
    _server: Child,
    /// Address of the server itself.
    direct: String,
    /// Address of the proxy.
    proxied: String,
    mode: Arc<AtomicUsize>,
    struck: Arc<AtomicUsize>,
    pub(super) http: reqwest::Client,
}

impl S3 {
    pub(super) async fn start() -> Self {
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
        let [mode, struck] = [(); 2].map(|()| Arc::new(AtomicUsize::new(Mode::Forward as usize)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let proxied = listener.local_addr().expect("it has an address").to_string();
        let proxy = Proxy { mode: Arc::clone(&mode), struck: Arc::clone(&struck), http: http() };
        tokio::spawn(proxy.run(listener, direct.clone()));
        let s3 = Self { _server: server, direct, proxied, mode, struck, http: http() };
        let bucket = || async { s3.http.put(s3.url("")).send().await.is_ok_and(|answer| answer.status() == 200) };
        eventually("a bucket", bucket).await;
        s3
    }

    pub(super) fn url(&self, key: &str) -> String {
        format!("http://{}/bucket/{key}", self.direct)
    }

    pub(super) fn set(&self, mode: Mode) {
        self.mode.store(mode as usize, Ordering::SeqCst);
    }

    /// How many connections were closed, and how many answers were lost or never given.
    pub(super) fn struck(&self) -> usize {
        self.struck.load(Ordering::SeqCst)
    }

    /// The environment of a service that uses it.
    fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("FOREBAY_OBJECTS_URL", "s3://bucket/payloads".to_owned()),
            ("AWS_ENDPOINT", format!("http://{}", self.proxied)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }

    pub(super) async fn serve(&self, database: &str, config: Option<&Path>) -> Service {
        self.serve_with(database, config, "objects").await
    }

    /// A replica whose new payloads are of a kind.
    pub(super) async fn serve_with(&self, database: &str, config: Option<&Path>, kind: &str) -> Service {
        let environment = self.environment();
        let mut environment: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        environment.push(("FOREBAY_PAYLOADS", kind));
        let config = config.map(|path| path.to_str().expect("the path is text"));
        let arguments: Vec<&str> = config.into_iter().flat_map(|path| ["--config", path]).collect();
        Service::start_with(database, &[&["--log", "json"], arguments.as_slice()].concat(), &environment).await
    }

    pub(super) async fn run(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(arguments).envs(self.environment());
        let output = command.output().await.expect("the binary starts");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }

    /// The keys of all objects with payloads.
    pub(super) async fn keys(&self) -> Vec<String> {
        self.all_keys().await.into_iter().filter(|key| !key.ends_with("/owner")).collect()
    }

    /// The owner object of the only database.
    pub(super) async fn owner(&self) -> String {
        let keys = self.all_keys().await;
        let key = keys.iter().find(|key| key.ends_with("/owner")).expect("there is an owner object");
        let read = self.http.get(self.url(key)).header("authorization", CREDENTIALS).send().await;
        read.expect("the server answers").text().await.expect("an owner object is text")
    }

    async fn all_keys(&self) -> Vec<String> {
        let listed = self.http.get(self.url("?list-type=2")).send().await.expect("the server answers");
        let listed = listed.text().await.expect("a list is text");
        let keys = listed.split("<Key>").skip(1);
        keys.map(|rest| rest.split("</Key>").next().unwrap_or_default().to_owned()).collect()
    }

    pub(super) async fn remove(&self, key: &str) {
        let removal = self.http.delete(self.url(key)).header("authorization", CREDENTIALS).send().await;
        assert_eq!(removal.expect("the server answers").status(), 204);
    }
}

/// What stands between the service and the S3 server.
#[derive(Clone)]
struct Proxy {
    mode: Arc<AtomicUsize>,
    struck: Arc<AtomicUsize>,
    http: reqwest::Client,
}

impl Proxy {
    async fn run(self, listener: TcpListener, to: String) {
        while let Ok((client, _)) = listener.accept().await {
            if self.is(Mode::Refuse) {
                self.struck.fetch_add(1, Ordering::SeqCst);
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
                if self.is(Mode::Hang) && count > 0 {
                    self.struck.fetch_add(1, Ordering::SeqCst);
                    std::future::pending::<()>().await;
                }
                if self.is(Mode::NotVisible) && buffer[..count].starts_with(b"GET ") {
                    return Some(NOT_FOUND);
                }
                if (self.is(Mode::Forget) || self.is(Mode::Alter)) && buffer[..count].starts_with(b"PUT ") {
                    while !is_whole(&buffer[..count]) {
                        count += requests.read(&mut buffer[count..]).await.expect("the client sends its request");
                    }
                    if self.is(Mode::Forget) {
                        return Some(WRITTEN);
                    }
                    if path_of_owner(&buffer[..count]).is_none() {
                        buffer[count - 1] ^= 1;
                    }
                }
                if self.is(Mode::Adopt)
                    && let Some(owner) = path_of_owner(&buffer[..count])
                {
                    self.mode.store(Mode::Forward as usize, Ordering::SeqCst);
                    let adopt = self.http.put(format!("http://{to}{owner}")).header("authorization", CREDENTIALS);
                    let adopted = adopt.body(ADOPTED).send().await.expect("the server answers");
                    assert_eq!(adopted.status(), 200);
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
                    self.struck.fetch_add(1, Ordering::SeqCst);
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

/// The path of the owner object, if a request writes it.
fn path_of_owner(request: &[u8]) -> Option<String> {
    let head = String::from_utf8_lossy(request);
    let path = head.strip_prefix("PUT ")?.split(' ').next()?;
    path.ends_with("/owner").then(|| path.to_owned())
}
