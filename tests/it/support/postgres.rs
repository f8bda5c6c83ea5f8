//! Temporary Postgres clusters, so that tests use a real server without any set-up.
//!
//! This is separate from the other support code because a cluster is a process that must end with the tests, however
//! they end. Statics are never dropped and `kill -9` runs no destructors. So the server belongs to a supervising shell
//! with a pipe to the test process: when the pipe closes, the shell stops the server and removes its folder.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, bail, ensure};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

/// The connection URL of a fresh, empty database in the cluster that this process shares.
///
/// # Panics
///
/// If no server can be found or started, because a test that needs Postgres must not pass without it.
pub(crate) async fn fresh_database() -> String {
    static SHARED: OnceLock<Result<Cluster, String>> = OnceLock::new();

    // Every test has its own runtime, so the cluster belongs to none of them. A failure is stored too, so that later
    // tests fail at once with the same message.
    let start = || SHARED.get_or_init(|| Cluster::start().map_err(|error| format!("{error:#}")));
    let shared = tokio::task::spawn_blocking(start).await.expect("starting a cluster returns its errors");
    match shared {
        Ok(cluster) => cluster.fresh_database().await,
        Err(message) => panic!("no Postgres to test with: {message}"),
    }
}

/// Empties a database that has the schema. Making a new database takes ten times as long.
pub(crate) async fn empty(url: &str) {
    const EMPTY: &str = "\
        DO $$
        DECLARE tables text;
        BEGIN
            SELECT string_agg(quote_ident(tablename), ', ') INTO tables
            FROM pg_tables
            WHERE schemaname = 'public' AND tablename <> '_sqlx_migrations';
            IF tables IS NOT NULL THEN
                EXECUTE 'TRUNCATE ' || tables || ' RESTART IDENTITY CASCADE';
            END IF;
        END $$";
    let mut connection = PgConnection::connect(url).await.expect("the server accepts connections");
    sqlx::raw_sql(EMPTY).execute(&mut connection).await.expect("nobody else uses the database");
    connection.close().await.expect("the server is running");
}

/// Removes a database of [`fresh_database`], also if somebody is connected to it. Each takes 9 MB of the disk.
pub(crate) async fn drop_database(url: &str) {
    let options: PgConnectOptions = url.parse().expect("the URL was made here");
    let name = options.get_database().expect("the URL names a database");
    let drop = AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)"));
    let mut connection = PgConnection::connect_with(&options.clone().database("postgres"))
        .await
        .expect("the server accepts connections");
    sqlx::raw_sql(drop).execute(&mut connection).await.expect("the database is there");
    connection.close().await.expect("the server is running");
}

/// Keeps the server from gathering statistics and vacuuming in a database that has the schema.
pub(crate) async fn without_autovacuum(url: &str) {
    const SWITCH_OFF: &str = "\
        DO $$
        DECLARE name text;
        BEGIN
            FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
                EXECUTE format('ALTER TABLE %I SET (autovacuum_enabled = off)', name);
            END LOOP;
        END $$";
    let mut connection = PgConnection::connect(url).await.expect("the server accepts connections");
    sqlx::raw_sql(SWITCH_OFF).execute(&mut connection).await.expect("the tables are the user's");
    connection.close().await.expect("the server is running");
}

/// What the server runs with, besides its defaults.
///
/// `fsync` and `synchronous_commit` stay on, because the service refuses to start without them. To make the cluster
/// cheap, only what replicas need is turned off.
const SETTINGS: &str = "\
listen_addresses = '127.0.0.1'
include_if_exists = '../port.conf'
max_connections = 400
shared_buffers = 64MB
wal_level = minimal
max_wal_senders = 0
fsync = on
synchronous_commit = on
";

/// Makes the cluster, then runs `pg_ctl` with each line it reads and answers with the exit status.
///
/// The shell makes the folder itself, so that a test process that is killed leaves nothing behind. The signals that end
/// a terminal's jobs, and a broken pipe, must not end the shell before it has cleaned up.
const SUPERVISOR: &str = r#"
trap '' HUP INT TERM PIPE
bin=$1 settings=$2 folder=$PWD
{
    "$bin/initdb" --pgdata="$folder/data" --username=forebay --auth=trust \
        --no-locale --encoding=UTF8 --no-sync &&
        printf "%sunix_socket_directories = '%s'\n" "$settings" "$folder" \
            >>"$folder/data/postgresql.conf"
} >"$folder/log" 2>&1
while read -r arguments; do
    "$bin/pg_ctl" --pgdata="$folder/data" --log="$folder/log" $arguments >>"$folder/log" 2>&1
    echo $?
done
"$bin/pg_ctl" --pgdata="$folder/data" --mode=immediate stop >/dev/null 2>&1
cd / && rm -rf "$folder"
"#;

/// The most ports that are tried before a cluster does not start.
const PORTS_MAX: usize = 5;

/// A server with its data, which listens by TCP, as most servers do that a service uses. Both are removed when this is
/// dropped.
pub(crate) struct Cluster {
    folder: PathBuf,
    port: u16,
    supervisor: Child,
}

impl Cluster {
    /// Makes a cluster and starts its server. Blocks until it accepts connections.
    pub(crate) fn start() -> anyhow::Result<Self> {
        Self::start_with(|_| Vec::new())
    }

    /// The same with environment variables for the server, which may name files in the cluster's folder.
    pub(crate) fn start_with(environment: impl FnOnce(&Path) -> Vec<(String, String)>) -> anyhow::Result<Self> {
        // The path of a Unix socket has at most 107 bytes (103 on macOS), so TMPDIR is ignored. Long runs that do not
        // test the disk may use a folder in memory.
        let parent = std::env::var_os("FOREBAY_POSTGRES_FOLDER").unwrap_or_else(|| "/tmp".into());
        let folder =
            tempfile::Builder::new().prefix("forebay-pg-").tempdir_in(parent).context("make the cluster's folder")?;
        let account = Account::for_server(folder.path())?;
        let binaries = installation(&account, folder.path())?;
        let supervisor = account
            .command("/bin/sh")
            .args(["-c", SUPERVISOR, "postgres-supervisor"])
            .arg(binaries)
            .arg(SETTINGS)
            .envs(environment(folder.path()))
            .current_dir(folder.path())
            // An interrupt from the terminal reaches only the tests. The server holds no file of the tests open,
            // because `cargo test | less` would wait for it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("start the supervisor")?;
        let mut cluster = Self { folder: folder.keep(), port: 0, supervisor };
        for _ in 0..PORTS_MAX {
            cluster.choose_port()?;
            match cluster.pg_ctl("start --wait --timeout=60") {
                // Another process took the port meanwhile.
                Err(error) if format!("{error:#}").contains("Address already in use") => {}
                started => return started.map(|()| cluster),
            }
        }
        bail!("{PORTS_MAX} ports were free and then taken")
    }

    /// Names a port that is free now. The server cannot be given one by the system.
    fn choose_port(&mut self) -> anyhow::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
        self.port = listener.local_addr()?.port();
        fs::write(self.folder.join("port.conf"), format!("port = {}\n", self.port)).context("write the port")
    }

    /// Lets the server encrypt connections with a certificate and its key. It asks clients for a certificate of `clients`,
    /// if that is given, and refuses those that have none.
    pub(crate) fn encrypt(&mut self, certificate: &str, key: &str, clients: Option<&str>) -> anyhow::Result<()> {
        let data = self.folder.join("data");
        let made_by = fs::metadata(&data)?;
        let mut settings = "ssl = on\n".to_owned();
        let mut files = vec![("server.crt", certificate), ("server.key", key)];
        if let Some(clients) = clients {
            settings += "ssl_ca_file = 'clients.crt'\n";
            files.push(("clients.crt", clients));
            files.push(("pg_hba.conf", "hostssl all all 127.0.0.1/32 trust clientcert=verify-ca\n"));
        }
        files.push(("postgresql.auto.conf", &settings));
        for (name, content) in files {
            let path = data.join(name);
            fs::write(&path, content).with_context(|| format!("write {name}"))?;
            // The server reads no key that others may read.
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            chown(&path, Some(made_by.uid()), Some(made_by.gid()))?;
        }
        self.pg_ctl("restart --wait --timeout=60")
    }

    /// Runs `pg_ctl` on the cluster: `stop --mode=immediate` is a crash, `start --wait` recovers.
    pub(crate) fn pg_ctl(&mut self, arguments: &str) -> anyhow::Result<()> {
        let stdin = self.supervisor.stdin.as_mut().context("stdin is piped")?;
        writeln!(stdin, "{arguments}").context("ask the supervisor")?;
        let stdout = self.supervisor.stdout.as_mut().context("stdout is piped")?;
        let mut status = String::new();
        // At most one answer is outstanding, so the reader cannot consume the next one.
        BufReader::new(stdout).read_line(&mut status).context("hear from the supervisor")?;
        if status.trim() != "0" {
            let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(30)..].join("\n");
            bail!("pg_ctl {arguments} failed; the end of the server's log:\n{tail}");
        }
        Ok(())
    }

    /// The log of the server.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).expect("the log is text that the tests may read")
    }

    /// Creates a database in this cluster and returns its connection URL.
    pub(crate) async fn fresh_database(&self) -> String {
        static COUNTER: AtomicU32 = AtomicU32::new(0);

        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("t_{number}_{}", std::process::id());
        let mut connection = PgConnection::connect(&self.url("postgres"))
            .await
            .expect("the server accepts connections once pg_ctl has returned");
        // Nothing ever connects to template0, so tests can copy it at the same time. Postgres refuses to copy template1
        // while autovacuum or anyone else is connected to it.
        let create = AssertSqlSafe(format!("CREATE DATABASE {name} TEMPLATE template0"));
        sqlx::raw_sql(create).execute(&mut connection).await.expect("the name is new and the user is a superuser");
        // The server process of a dropped connection ends later, and until then counts against the limit.
        connection.close().await.expect("the server is running");
        self.url(&name)
    }

    /// Host and port are explicit, because sqlx would take missing ones from `PGHOST` and similar variables.
    fn url(&self, database: &str) -> String {
        format!("postgres://forebay@127.0.0.1:{}/{database}", self.port)
    }

    /// The URL of a database by the Unix socket in the folder, whose name needs no encoding.
    pub(crate) fn by_socket(&self, url: &str) -> String {
        format!("{url}?host={}", self.folder.display())
    }
}

/// The account that the server runs as.
///
/// Postgres refuses to run as root, and tests in a container often are root.
pub(super) enum Account {
    /// The user that runs the tests.
    Own,
    /// An unprivileged user, when the tests run as root.
    Unprivileged { user: u32, group: u32 },
}

impl Account {
    /// Chooses the account and gives it ownership of `folder`, which the tests' own user has just made.
    pub(super) fn for_server(folder: &Path) -> anyhow::Result<Self> {
        let made_by = fs::metadata(folder).context("look at the cluster's folder")?;
        if made_by.uid() != 0 {
            return Ok(Self::Own);
        }
        let (user, group) = ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| Some((id("-u", name)?, id("-g", name)?)))
            .context("Postgres refuses root, and there is neither a user postgres nor nobody")?;
        chown(folder, Some(user), Some(group)).context("hand over the cluster's folder")?;
        Ok(Self::Unprivileged { user, group })
    }

    /// A command that runs as this account, in an environment that cannot change the behaviour of Postgres.
    pub(super) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("LC_ALL", "C");
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        if let Self::Unprivileged { user, group } = *self {
            command.uid(user).gid(group);
        }
        command
    }
}

/// The numeric id of the user called `name` (`-u`) or of its group (`-g`), if there is one.
fn id(which: &str, name: &str) -> Option<u32> {
    let output = Command::new("id").args([which, name]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// The folder of the server's binaries: those of the machine, or a copy in `folder` if `account` cannot read them, as
/// in a checkout below `/root`.
fn installation(account: &Account, folder: &Path) -> anyhow::Result<PathBuf> {
    let binaries = postgres_bin(&[])?;
    let version = account.command(binaries.join("initdb")).arg("--version").current_dir(folder).output();
    if version.is_ok_and(|output| output.status.success()) {
        return Ok(binaries);
    }
    postgres_bin(&["--copy-to".as_ref(), folder])
}

/// Runs `scripts/postgres-bin`, which also reads `FOREBAY_POSTGRES_BIN`.
fn postgres_bin(arguments: &[&Path]) -> anyhow::Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/postgres-bin");
    let output = Command::new(&script)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {}", script.display()))?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", complaints.trim());
    let folder = String::from_utf8(output.stdout).context("read the path it prints")?;
    Ok(PathBuf::from(folder.trim_end()))
}
