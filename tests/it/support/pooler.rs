//! A temporary `PgBouncer` in front of a test's database, which gives every transaction another connection to the
//! server.
//!
//! A supervising shell owns it, like a cluster, so that it ends with the tests however they end.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use sqlx::postgres::PgConnectOptions;

use super::postgres::Account;

/// Runs the program $1 until the pipe on standard input closes.
const SUPERVISOR: &str = r#"
folder=$PWD
"$1" "$folder/pgbouncer.ini" </dev/null >"$folder/log" 2>&1 &
server=$!
trap '' HUP INT TERM PIPE
while kill -0 "$server" 2>/dev/null && ! [ -S "$folder/.s.PGSQL.6432" ]; do sleep 0.05; done
echo started
read -r _
kill -9 "$server"
cd / && rm -rf "$folder"
"#;

/// A `PgBouncer` with `pool_mode = transaction`. It ends when this is dropped.
pub(crate) struct Pooler {
    folder: PathBuf,
    database: String,
    supervisor: Child,
}

impl Pooler {
    /// Starts one in front of a database of a test's cluster. Blocks until it accepts connections.
    ///
    /// # Panics
    ///
    /// If no `PgBouncer` can be found or started, because a test that needs it must not pass without it.
    pub(crate) fn start(database_url: &str) -> Self {
        Self::try_start(database_url).unwrap_or_else(|error| panic!("no PgBouncer to test with: {error:#}"))
    }

    fn try_start(database_url: &str) -> anyhow::Result<Self> {
        let server: PgConnectOptions = database_url.parse().context("read the URL of the database")?;
        let database = server.get_database().context("the URL names a database")?.to_owned();
        let folder = tempfile::Builder::new().prefix("forebay-pool-").tempdir_in("/tmp").context("make a folder")?;
        // There are fewer connections than transactions, and they are assigned in turn, so no transaction finds what it
        // left on a connection.
        let configuration = format!(
            "[databases]\n* = host={host} port={port} user=forebay\n[pgbouncer]\nlisten_addr =\nlisten_port = 6432\n\
             unix_socket_dir = {folder}\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 5\n\
             server_round_robin = 1\nmax_client_conn = 200\n",
            host = server.get_host(),
            port = server.get_port(),
            folder = folder.path().display()
        );
        fs::write(folder.path().join("pgbouncer.ini"), configuration).context("write the configuration")?;
        // PgBouncer refuses to run as root, as the server does.
        let account = Account::for_server(folder.path())?;
        let program = program(&account, folder.path())?;
        let mut supervisor = account
            .command("/bin/sh")
            .args(["-c", SUPERVISOR, "pgbouncer-supervisor"])
            .arg(program)
            .current_dir(folder.path())
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("start the supervisor")?;
        let mut line = String::new();
        BufReader::new(supervisor.stdout.as_mut().context("stdout is piped")?).read_line(&mut line)?;
        let folder = folder.keep();
        let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
        ensure!(folder.join(".s.PGSQL.6432").exists(), "it does not start:\n{log}");
        Ok(Self { folder, database, supervisor })
    }

    /// The URL of the database through the pooler.
    pub(crate) fn url(&self) -> String {
        format!("postgres://forebay@localhost:6432/{}?host={}", self.database, self.folder.display())
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

/// The program of this machine, or a copy in `folder` if `account` cannot read it.
fn program(account: &Account, folder: &Path) -> anyhow::Result<PathBuf> {
    let program = pgbouncer_bin(&[])?;
    let version = account.command(&program).arg("--version").current_dir(folder).output();
    if version.is_ok_and(|output| output.status.success()) {
        return Ok(program);
    }
    pgbouncer_bin(&["--copy-to".as_ref(), folder])
}

/// Runs `scripts/pgbouncer-bin`, which also reads `FOREBAY_PGBOUNCER`.
fn pgbouncer_bin(arguments: &[&Path]) -> anyhow::Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/pgbouncer-bin");
    let output = Command::new(&script)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {}", script.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let program = String::from_utf8(output.stdout).context("read the path it prints")?;
    Ok(PathBuf::from(program.trim_end()))
}
