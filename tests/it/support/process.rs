//! The real binary as a process, for tests that kill it, starve it or run several.

use std::{
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use super::text;

/// The service as a process of its own.
pub(crate) struct Service {
    process: Child,
    pub(crate) url: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Service {
    pub(crate) async fn start(database: &str) -> Self {
        Self::try_start(database, &[]).await.expect("it serves before it ends")
    }

    /// Starts with an environment; how it ended, if it ended before it served.
    pub(crate) async fn try_start(database: &str, environment: &[(&str, &str)]) -> Result<Self, ExitStatus> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["--listen", "127.0.0.1:0", "--database", database, "--log", "json"]);
        command.envs(environment.iter().copied());
        Self::spawn(command).await
    }

    /// Starts a command that serves in the end.
    pub(crate) async fn spawn(mut command: Command) -> Result<Self, ExitStatus> {
        let mut process = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().expect("the binary starts");
        let mut lines = BufReader::new(process.stderr.take().expect("its log is a pipe")).lines();
        let log = Arc::new(Mutex::new(Vec::new()));
        while let Some(line) = lines.next_line().await.expect("the log is text") {
            let event: Value = serde_json::from_str(&line).unwrap_or_default();
            keep(&log, line);
            if event["message"] != "serving" {
                continue;
            }
            let url = format!("http://{}", text(&event["listen"]));
            let kept = Arc::clone(&log);
            // Somebody has to read the log, or a full pipe would stop the service.
            tokio::spawn(async move {
                while let Ok(Some(line)) = lines.next_line().await {
                    keep(&kept, line);
                }
            });
            return Ok(Self { process, url, log });
        }
        Err(process.wait().await.expect("a process ends"))
    }

    /// SIGKILL: nothing is flushed, nobody is told.
    pub(crate) async fn kill(mut self) {
        self.process.kill().await.expect("the process can be killed");
    }

    /// SIGTERM, and how it ended.
    pub(crate) async fn stop(self) -> ExitStatus {
        self.signal("TERM").await;
        self.ended().await
    }

    /// Sends a signal by its name.
    pub(crate) async fn signal(&self, name: &str) {
        if let Some(id) = self.process.id() {
            // Gone already is as good as told.
            let _ = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).output().await;
        }
    }

    /// How it ended, of its own accord or not.
    pub(crate) async fn ended(mut self) -> ExitStatus {
        self.process.wait().await.expect("a process ends")
    }

    /// Whether it is still there.
    pub(crate) fn runs(&mut self) -> bool {
        self.process.try_wait().expect("its state can be read").is_none()
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("no reader panics").join("\n")
    }
}

fn keep(log: &Mutex<Vec<String>>, line: String) {
    log.lock().expect("no reader panics").push(line);
}
