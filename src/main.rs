//! Command line, configuration, log, store, bind, serve.

mod bench;
mod care;
mod keys_command;
mod start;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use forebay::{
    access::keyring::Keyring,
    api::Access,
    buffer::Buffer,
    clock::AnchoredClock,
    config::{Config, DEFAULT_DATABASE, LogFormat, check_listen, is_loopback},
    metrics::Metrics,
    server::Server,
    store, telemetry,
    tls::Tls,
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

/// The durable rollout buffer between LLM agents and the trainers that learn from them.
#[derive(Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the API (the default command)
    Serve(ServeArgs),
    /// Create, list and revoke keys
    Keys(keys_command::KeysArgs),
    /// Check a configuration file and exit: 0 when it can be served, 1 with every wrong value named
    CheckConfig {
        /// Configuration file (TOML)
        file: PathBuf,
    },
    /// Copy a SQLite database while it is served: one consistent snapshot
    ///
    /// Prints the path of the copy, which `forebay restore` puts in the place of a database.
    Backup {
        /// Where the copy goes; must not exist
        file: PathBuf,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Put a copy in the place of a SQLite database, which must not be served
    ///
    /// Checks the copy, which stays as it is, and brings its schema up to date. The database that is replaced is kept
    /// beside the new one, with its write-ahead log, as `PATH.replaced-TIME`. Every policy begins a new epoch: trainers
    /// that are alive are refused as superseded until they resume from the step that they have saved. Prints the path of
    /// the database. A restore that was interrupted can be run again.
    Restore {
        /// The copy, as `forebay backup` makes it
        file: PathBuf,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Read a whole database and compare everything with everything: 0 when nothing is wrong, 1 with what is
    ///
    /// Brings the schema up to date first, as serving does. A SQLite database must not be served meanwhile; a copy that
    /// `backup` made can be looked at any time.
    Doctor(DatabaseArgs),
    /// Load a service like agents and trainers do, and tell how fast it is
    ///
    /// Producers post groups of rollouts with realistic lengths, in a closed loop (as fast as they are answered) or an
    /// open one (`--rate`); trainers take batches meanwhile. The service is a running forebay, or one that speaks the
    /// protocol of slime's rollout buffer or of an Atropos server. The result is a table, and with `--json` a document.
    Bench(Box<bench::BenchArgs>),
    /// Print the OpenAPI document and exit
    Openapi,
}

#[derive(Args)]
struct DatabaseArgs {
    /// Configuration file (TOML) that names the database
    #[arg(long, env = "FOREBAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// `sqlite:PATH` or `postgres://...` [default: sqlite:data/forebay.db]
    #[arg(long, env = "FOREBAY_DATABASE", hide_env_values = true, value_name = "URL")]
    database: Option<String>,
}

impl DatabaseArgs {
    /// Flag before environment before file before default.
    fn url(self) -> anyhow::Result<String> {
        let config = Config::load(self.config.as_deref()).context("the configuration cannot be used")?;
        Ok(self.database.unwrap_or_else(|| config.database.reveal().to_owned()))
    }
}

#[derive(Args)]
struct ServeArgs {
    /// Configuration file (TOML); every key has a default
    #[arg(long, env = "FOREBAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on [default: 127.0.0.1:8080]
    #[arg(long, env = "FOREBAY_LISTEN", value_name = "ADDR")]
    listen: Option<String>,
    /// `sqlite:PATH`, `sqlite::memory:` (a temporary file, gone at exit) or `postgres://...` [default: sqlite:data/forebay.db]
    #[arg(long, env = "FOREBAY_DATABASE", hide_env_values = true, value_name = "URL")]
    database: Option<String>,
    /// How the log looks [default: text]
    #[arg(long, env = "FOREBAY_LOG", value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// Write the bound address into a file once the service serves, and remove the file when it stops
    #[arg(long, env = "FOREBAY_PORT_FILE", value_name = "FILE")]
    port_file: Option<PathBuf>,
    /// Serve on an address that other machines can reach, although nobody has to prove who they are
    #[arg(long, env = "FOREBAY_INSECURE")]
    insecure: bool,
}

fn main() -> ExitCode {
    let command_line = CommandLine::parse();
    let outcome = match command_line.command {
        None => serve(command_line.serve),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::Keys(args)) => keys_command::keys(args),
        Some(Command::CheckConfig { file }) => check_config(&file),
        Some(Command::Backup { file, database }) => database.url().and_then(|url| care::backup(&url, &file)),
        Some(Command::Restore { file, database }) => {
            database.url().and_then(|url| wait_for(care::restore(&url, &file)))
        }
        Some(Command::Doctor(database)) => database.url().and_then(|url| wait_for(care::doctor(&url))),
        Some(Command::Bench(args)) => wait_for(bench::bench(*args)),
        Some(Command::Openapi) => print(&forebay::api::openapi()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forebay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command that is not a service.
fn wait_for(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Runtime::new().context("the runtime does not start")?.block_on(command)
}

fn check_config(file: &std::path::Path) -> anyhow::Result<()> {
    let config = Config::check(file).with_context(|| format!("{} cannot be used", file.display()))?;
    print(&format!("{}: {} policies, ok\n", file.display(), config.policies.len()))
}

fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    match std::io::stdout().write_all(text.as_bytes()) {
        // A reader that has seen enough is no failure.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("cannot print"),
    }
}

fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("the runtime does not start")?;
    let outcome = runtime.block_on(serve_until_stopped(args));
    // What did not end in its time is not waited for.
    runtime.shutdown_background();
    outcome
}

async fn serve_until_stopped(args: ServeArgs) -> anyhow::Result<()> {
    let mut config = Config::load(args.config.as_deref()).context("the configuration cannot be used")?;
    config.listen = args.listen.unwrap_or(config.listen);
    config.database = args.database.map_or(config.database, Into::into);
    telemetry::start(args.log.unwrap_or(config.log));

    // Signals are taken from here on, so that none is missed while the store opens.
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let hangups = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };

    let tls = config.tls.map(Tls::load).transpose().context("TLS cannot be used")?.map(Arc::new);
    tokio::spawn(start::reload_at(hangups, tls.clone()));
    let listener = bind(&config.listen).await?;
    let address = listener.local_addr().context("the listener has no address")?;
    let metrics = Arc::new(Metrics::new());
    make_default_folder(config.database.reveal())?;
    let opened = store::open_or_create(config.database.reveal(), metrics.store()).await?;
    let buffer = Buffer::start(
        opened.store,
        Arc::new(AnchoredClock::new()),
        Arc::clone(&metrics),
        config.buffer,
        config.policies,
    )
    .await
    .context("the store cannot be used")?;
    let is_reachable = !is_loopback(&address);
    // What others can reach stays closed when the last key is revoked.
    let required = config.access.required || (is_reachable && !args.insecure);
    let keyring = Arc::new(Keyring::start(buffer.clone(), required).await.context("the keys cannot be read")?);
    check_reach(address, config.access.required || keyring.has_keys(), tls.is_some(), args.insecure)?;
    let policies = start::count_policies(&buffer).await.context("the policies cannot be read")?;
    let access = Access { keyring: Arc::clone(&keyring), hosts: config.access.hosts.into() };
    let server = Server::new(listener, buffer, metrics, config.bodies, config.server, access)?.with_tls(tls.clone());
    let port_file = args.port_file.map(|path| start::PortFile::write(path, address)).transpose()?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    tracing::info!(
        listen = %address,
        docs = %format!("{scheme}://{address}/docs"),
        version = env!("CARGO_PKG_VERSION"),
        database = ?config.database,
        database_created = opened.is_new,
        policies,
        tls = tls.as_ref().map_or("none", |tls| tls.describe()),
        keys = keyring.live_keys(),
        keys_required = keyring.is_required(),
        "serving"
    );
    let outcome = server.run(shutdown).await;
    drop(port_file);
    Ok(outcome?)
}

/// Makes the folder of the default database. Any other path is somebody's choice, and a mistyped one makes nothing.
fn make_default_folder(database: &str) -> anyhow::Result<()> {
    let path = database.strip_prefix("sqlite:").filter(|_| database == DEFAULT_DATABASE);
    match path.and_then(|path| std::path::Path::new(path).parent()) {
        Some(folder) => std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display())),
        None => Ok(()),
    }
}

async fn bind(listen: &str) -> anyhow::Result<TcpListener> {
    check_listen(listen).map_err(anyhow::Error::msg)?;
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host(listen)
        .await
        .with_context(|| format!("the host of `{listen}` is not known"))?
        .collect();
    TcpListener::bind(addresses.as_slice()).await.with_context(|| format!("cannot listen on {listen}"))
}

/// Refuses to be reached by others when nobody has to prove who they are. Nothing was accepted yet.
fn check_reach(address: SocketAddr, has_keys: bool, is_encrypted: bool, insecure: bool) -> anyhow::Result<()> {
    if is_loopback(&address) {
        return Ok(());
    }
    if !has_keys && !insecure {
        bail!(
            "{address} can be reached from other machines, and there are no keys: create one with \
             `forebay keys create --role admin --name NAME`, listen on 127.0.0.1, or add --insecure"
        );
    }
    if !has_keys {
        tracing::warn!(listen = %address, "no keys: whoever reaches the service may do everything");
    } else if !is_encrypted {
        tracing::warn!(listen = %address, "keys and trajectories travel unencrypted: add [tls], or a proxy in front");
    }
    Ok(())
}
