//! The environments of the clients, and a client as a process.

use std::{
    fs::File,
    io::{Read as _, Seek as _},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};

use crate::catalogue::{Client, Needs, TASK};

/// The longest run of a client. It is far longer than any of them needs.
const PATIENCE: Duration = Duration::from_mins(10);

/// Where a client's program is, and its version.
#[derive(Debug)]
pub(crate) struct Installed {
    /// The interpreter of Python, or the folder of the programs.
    path: PathBuf,
    pub(crate) version: String,
}

/// The root of the repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The folder of the clients' programs.
pub(crate) fn folder() -> PathBuf {
    repository().join("tests/clients")
}

/// Makes the environment of a client. An error says why the client cannot run here.
pub(crate) async fn install(client: &Client) -> anyhow::Result<Installed> {
    let scripts = repository().join("scripts");
    let mut command = match client.needs {
        Needs::Python(name) | Needs::Python312(name) => {
            let mut command = Command::new(scripts.join("python-env"));
            command.arg(name);
            if client.needs == Needs::Python312(name) {
                command.env("FOREBAY_PYTHON", python312().await?);
            }
            command
        }
        Needs::Node => {
            let mut command = Command::new(scripts.join("node-env"));
            command.arg("clients");
            command
        }
    };
    let made = command.stderr(Stdio::inherit()).output().await.context("cannot start the script")?;
    if !made.status.success() {
        bail!("its environment cannot be made");
    }
    let path = PathBuf::from(String::from_utf8(made.stdout)?.trim());
    let version = match client.needs {
        Needs::Node => {
            let package = path.with_file_name(client.package).join("package.json");
            let package: serde_json::Value = serde_json::from_slice(&std::fs::read(package)?)?;
            package["version"].as_str().unwrap_or_default().to_owned()
        }
        Needs::Python(_) | Needs::Python312(_) => {
            let code = format!("import importlib.metadata as m; print(m.version({:?}))", client.package);
            let answer = Command::new(&path).args(["-c", &code]).output().await?;
            String::from_utf8(answer.stdout)?.trim().to_owned()
        }
    };
    Ok(Installed { path, version })
}

/// A Python of version 3.12 or newer.
pub(crate) async fn python312() -> anyhow::Result<String> {
    let named = std::env::var("FOREBAY_PYTHON").ok();
    for python in named.into_iter().chain(["python3", "python3.13", "python3.12"].map(str::to_owned)) {
        let check =
            Command::new(&python).args(["-c", "import sys; sys.exit(sys.version_info < (3, 12))"]).output().await;
        if check.is_ok_and(|check| check.status.success()) {
            return Ok(python);
        }
    }
    bail!("needs Python 3.12 or newer: name it in FOREBAY_PYTHON")
}

/// A client that works. It has a process group of its own, to which the programs belong that it starts.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    output: File,
}

impl Running {
    /// Waits until it has ended well.
    pub(crate) async fn end(&mut self) -> anyhow::Result<()> {
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await.context("it does not end")??;
        if std::env::var_os("FOREBAY_CLIENTS_VERBOSE").is_some() || !status.success() {
            let mut output = Vec::new();
            self.output.rewind()?;
            self.output.read_to_end(&mut output)?;
            eprintln!("{}", String::from_utf8_lossy(&output));
        }
        if !status.success() {
            bail!("it ended with {status}");
        }
        Ok(())
    }

    /// Kills it and what it has started, and waits until it is dead, and for a second at most until all are.
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        let leader = self.child.id().context("it runs")?;
        let killed = Command::new("kill").args(["-KILL", "--", &format!("-{leader}")]).status().await?;
        if !killed.success() {
            bail!("it cannot be killed: {killed}");
        }
        self.child.wait().await?;
        // One that nobody waits for stays a zombie, which does nothing any more.
        let group = ["-0".to_owned(), "--".to_owned(), format!("-{leader}")];
        for _ in 0..100 {
            if !Command::new("kill").args(&group).stderr(Stdio::null()).status().await?.success() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

/// Starts a client in the folder of the task. `home` is its home, so that nobody's settings matter.
pub(crate) fn start(
    client: &Client,
    installed: &Installed,
    base_url: &str,
    key: &str,
    task: &Path,
    home: &Path,
) -> anyhow::Result<Running> {
    let script = folder().join(client.name);
    let mut command = match client.needs {
        Needs::Node => {
            let module = script.with_extension("cjs");
            let mut command = if module.exists() {
                let mut command = Command::new("node");
                command.arg(module).env("NODE_PATH", installed.path.with_file_name(""));
                command
            } else {
                let mut command = Command::new("sh");
                command.arg(script.with_extension("sh"));
                command
            };
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", installed.path.display()));
            command
        }
        Needs::Python(_) | Needs::Python312(_) => {
            let mut command = Command::new(&installed.path);
            command.arg(script.with_extension("py"));
            command
        }
    };
    command.args([base_url, key, "policy-model", TASK]).current_dir(task);
    isolate(&mut command, home);
    let output = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
    let child = command.process_group(0).kill_on_drop(true).spawn()?;
    Ok(Running { child, output })
}

/// Gives a command another home and no credentials of the user, so that it sends nothing to the makers of clients.
pub(crate) fn isolate(command: &mut Command, home: &Path) {
    command.env("HOME", home);
    for name in ["XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"] {
        command.env(name, home.join(name));
    }
    for name in ["OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN"]
    {
        command.env_remove(name);
    }
    for (name, value) in QUIET {
        command.env(name, value);
    }
}

/// What keeps the clients from calling anybody but the session.
const QUIET: [(&str, &str); 8] = [
    ("DISABLE_AUTOUPDATER", "1"),
    ("DISABLE_TELEMETRY", "1"),
    ("DO_NOT_TRACK", "1"),
    ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
    ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
    ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
    ("OPENHANDS_SUPPRESS_BANNER", "1"),
    ("LANGSMITH_TRACING", "false"),
];
