//! The real binary as a process, for tests that kill it or run several.

use std::process::Stdio;

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
}

impl Service {
    pub(crate) async fn start(database: &str) -> Self {
        forebay_client::install_tls_provider();
        let mut process = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["--listen", "127.0.0.1:0", "--database", database, "--log", "json"])
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary starts");
        let mut log = BufReader::new(process.stderr.take().expect("its log is a pipe")).lines();
        let address = loop {
            let line = log.next_line().await.expect("the log is text").expect("it serves before its log ends");
            let event: Value = serde_json::from_str(&line).unwrap_or_default();
            if event["message"] == "serving" {
                break text(&event["listen"]).to_owned();
            }
        };
        // Somebody has to read the log, or a full pipe would stop the service.
        tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
        Self { process, url: format!("http://{address}") }
    }

    /// SIGKILL: nothing is flushed, nobody is told.
    pub(crate) async fn kill(mut self) {
        self.process.kill().await.expect("the process can be killed");
    }
}
