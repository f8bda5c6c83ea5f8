//! The real binary as a process, for tests that kill it, limit its resources, read its log or run several.

use std::{
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    task::JoinHandle,
};

use super::text;

/// The time that a process may take to end: twice the time that it gives its requests and its store.
const PATIENCE: Duration = Duration::from_mins(2);

/// The service as a process of its own.
pub(crate) struct Service {
    process: Child,
    pub(crate) url: String,
    log: Arc<Mutex<Vec<String>>>,
    /// Ends with the log.
    reader: JoinHandle<()>,
}

impl Service {
    pub(crate) async fn start(database: &str) -> Self {
        Self::try_start(database, &[]).await.expect("it serves before it ends")
    }

    /// Starts it with more arguments and environment variables.
    pub(crate) async fn start_with(database: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["--listen", "127.0.0.1:0", "--database", database]).args(arguments);
        command.envs(environment.iter().copied());
        Self::spawn(command).await.expect("it serves before it ends")
    }

    /// Starts it with an environment. Returns its exit status if it ended before it served.
    pub(crate) async fn try_start(database: &str, environment: &[(&str, &str)]) -> Result<Self, ExitStatus> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["--listen", "127.0.0.1:0", "--database", database, "--log", "json"]);
        command.envs(environment.iter().copied());
        Self::spawn(command).await
    }

    /// The value of a metric, whose name has its labels.
    pub(crate) async fn metric(&self, http: &reqwest::Client, name: &str) -> f64 {
        let metrics = http.get(format!("{}/metrics", self.url)).send().await.expect("the service answers");
        let metrics = metrics.text().await.expect("metrics are text");
        let line = metrics.lines().find(|line| line.split(' ').next() == Some(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// Starts a command that eventually serves.
    pub(crate) async fn spawn(mut command: Command) -> Result<Self, ExitStatus> {
        let mut process = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().expect("the binary starts");
        let mut lines = BufReader::new(process.stderr.take().expect("its log is a pipe")).lines();
        let log = Arc::new(Mutex::new(Vec::new()));
        while let Some(line) = lines.next_line().await.expect("the log is text") {
            let address = listen_address(&line);
            keep(&log, line);
            let Some(address) = address else { continue };
            let kept = Arc::clone(&log);
            // The log is read continuously, because a full pipe would block the service.
            let reader = tokio::spawn(async move {
                while let Ok(Some(line)) = lines.next_line().await {
                    keep(&kept, line);
                }
            });
            return Ok(Self { process, url: format!("http://{address}"), log, reader });
        }
        Err(process.wait().await.expect("a process ends"))
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.process.id().expect("the process was not waited for")
    }

    /// The peak memory of the process in bytes, from Linux.
    pub(crate) fn peak_bytes(&self) -> u64 {
        peak_bytes_of(self.id()).expect("the process runs")
    }

    /// Sends SIGKILL, so that nothing is flushed.
    pub(crate) async fn kill(mut self) {
        self.process.kill().await.expect("the process can be killed");
    }

    /// Sends SIGTERM and returns the exit status.
    pub(crate) async fn stop(self) -> ExitStatus {
        self.signal("TERM").await;
        self.ended().await
    }

    /// Stops it gracefully with SIGTERM and returns its whole log.
    pub(crate) async fn terminate(mut self) -> Vec<String> {
        self.signal("TERM").await;
        let status = self.process.wait().await.expect("a process ends");
        assert!(status.success(), "a graceful stop succeeds: {status}");
        self.reader.await.expect("the log is read to its end");
        std::mem::take(&mut *self.log.lock().expect("no reader panics"))
    }

    /// Sends a signal by its name.
    pub(crate) async fn signal(&self, name: &str) {
        if let Some(id) = self.process.id() {
            // A process that has already ended needs no signal.
            let _ = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).output().await;
        }
    }

    /// Waits for the process to end and returns its exit status.
    pub(crate) async fn ended(mut self) -> ExitStatus {
        let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        let status = ended.unwrap_or_else(|_| panic!("it does not end; its log:\n{}", self.log()));
        status.expect("its status can be read")
    }

    /// Whether the process is still running.
    pub(crate) fn runs(&mut self) -> bool {
        self.process.try_wait().expect("its state can be read").is_none()
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("no reader panics").join("\n")
    }
}

fn keep(log: &Mutex<Vec<String>>, line: String) {
    log.lock().expect("no reader panics").push(line);
}

/// The address in the line, of either log format, that says that the service serves.
fn listen_address(line: &str) -> Option<String> {
    if let Ok(event) = serde_json::from_str::<Value>(line) {
        return (event["message"] == "serving").then(|| text(&event["listen"]).to_owned());
    }
    let (_, fields) = line.split_once("serving listen=")?;
    fields.split(' ').next().map(str::to_owned)
}

/// The peak memory of a process in bytes, from Linux; none if it has ended.
pub(crate) fn peak_bytes_of(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).map(|kib| kib << 10)
}
