//! The real binary as a process, for tests that kill it or run several.

use std::process::Stdio;

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    task::JoinHandle,
};

use super::text;

/// The service as a process of its own.
pub(crate) struct Service {
    process: Child,
    log: JoinHandle<Vec<String>>,
    pub(crate) url: String,
}

impl Service {
    pub(crate) async fn start(database: &str) -> Self {
        Self::start_with(database, &["--log", "json"], &[]).await
    }

    /// With more arguments and environment variables.
    pub(crate) async fn start_with(database: &str, args: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["--listen", "127.0.0.1:0", "--database", database])
            .args(args)
            .envs(environment.iter().copied())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(process.stderr.take().expect("its log is a pipe")).lines();
        let mut seen = Vec::new();
        let address = loop {
            let line = lines.next_line().await.expect("the log is text").expect("it serves before its log ends");
            let address = listen_address(&line);
            seen.push(line);
            if let Some(address) = address {
                break address;
            }
        };
        // Somebody has to read the log, or a full pipe would stop the service.
        let log = tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                seen.push(line);
            }
            seen
        });
        Self { process, log, url: format!("http://{address}") }
    }

    /// The number of the process.
    pub(crate) fn id(&self) -> u32 {
        self.process.id().expect("the process was not waited for")
    }

    /// SIGTERM: it stops gracefully; its whole log.
    pub(crate) async fn terminate(mut self) -> Vec<String> {
        let kill = Command::new("kill").args(["-TERM", &self.id().to_string()]).status().await;
        assert!(kill.expect("kill is a program").success(), "the process runs");
        let status = self.process.wait().await.expect("the process can be waited for");
        assert!(status.success(), "a graceful stop succeeds: {status}");
        self.log.await.expect("the log is read to its end")
    }

    /// SIGKILL: nothing is flushed, nobody is told.
    pub(crate) async fn kill(mut self) {
        self.process.kill().await.expect("the process can be killed");
    }
}

/// The address in the line of either format that says that the service serves.
fn listen_address(line: &str) -> Option<String> {
    if let Ok(event) = serde_json::from_str::<Value>(line) {
        return (event["message"] == "serving").then(|| text(&event["listen"]).to_owned());
    }
    let (_, fields) = line.split_once("serving listen=")?;
    fields.split(' ').next().map(str::to_owned)
}
