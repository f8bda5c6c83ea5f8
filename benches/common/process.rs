//! The service as a process of its own, on a new SQLite file.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// A running service. It is killed when this is dropped.
pub(crate) struct Service {
    pub(crate) process: Child,
    pub(crate) url: String,
    pub(crate) http: reqwest::Client,
}

impl Service {
    pub(crate) async fn start(folder: &Path, name: &str, config_text: &str) -> anyhow::Result<Self> {
        let config = folder.join(format!("{name}.toml"));
        std::fs::write(&config, config_text)?;
        let port = folder.join(format!("{name}.port"));
        // As in scripts/: another program may be measured, such as that of an older commit.
        let program = std::env::var("FOREBAY_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_forebay").to_owned());
        let process = Command::new(program)
            .args(["serve", "--listen", "127.0.0.1:0"])
            .arg("--database")
            .arg(format!("sqlite:{}", folder.join(format!("{name}.db")).display()))
            .arg("--config")
            .arg(&config)
            .arg("--port-file")
            .arg(&port)
            .stderr(Stdio::null())
            .spawn()?;
        let started = Instant::now();
        while !port.exists() {
            anyhow::ensure!(started.elapsed() < Duration::from_mins(1), "the service does not start");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let url = format!("http://{}", std::fs::read_to_string(&port)?.trim());
        Ok(Self { process, url, http: reqwest::Client::new() })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
