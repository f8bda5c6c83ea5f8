//! Command line, configuration, log, store, bind, serve.

mod care;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use forebay::{
    buffer::Buffer,
    clock::AnchoredClock,
    config::{Config, LogFormat, is_loopback},
    metrics::Metrics,
    server::Server,
    store, telemetry,
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
    /// Check a configuration file and exit: 0 when it can be served, 1 with every wrong value named
    CheckConfig {
        /// Configuration file (TOML)
        file: PathBuf,
    },
    /// Copy a SQLite database while it is served: one consistent snapshot
    ///
    /// Prints the path of the copy. To restore, stop the service and put the copy in the database's place.
    Backup {
        /// Where the copy goes; must not exist
        file: PathBuf,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Read a whole database and compare everything with everything: 0 when nothing is wrong, 1 with what is
    ///
    /// Brings the schema up to date first, as serving does. A SQLite database must not be served meanwhile; a copy that
    /// `backup` made can be looked at any time.
    Doctor(DatabaseArgs),
    /// Print the OpenAPI document and exit
    Openapi,
}

#[derive(Args)]
struct DatabaseArgs {
    /// Configuration file (TOML) that names the database
    #[arg(long, env = "FOREBAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// `sqlite:PATH` or `postgres://...` [default: sqlite:data/forebay.db]
    #[arg(long, env = "FOREBAY_DATABASE", value_name = "URL")]
    database: Option<String>,
}

impl DatabaseArgs {
    /// Flag before environment before file before default.
    fn url(self) -> anyhow::Result<String> {
        let config = Config::load(self.config.as_deref()).context("the configuration cannot be used")?;
        Ok(self.database.unwrap_or(config.database))
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
    #[arg(long, env = "FOREBAY_DATABASE", value_name = "URL")]
    database: Option<String>,
    /// How the log looks [default: text]
    #[arg(long, env = "FOREBAY_LOG", value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// Serve on an address that other machines can reach, although nobody has to prove who they are
    #[arg(long, env = "FOREBAY_INSECURE")]
    insecure: bool,
}

fn main() -> ExitCode {
    let command_line = CommandLine::parse();
    let outcome = match command_line.command {
        None => serve(command_line.serve),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::CheckConfig { file }) => check_config(&file),
        Some(Command::Backup { file, database }) => database.url().and_then(|url| wait_for(care::backup(&url, &file))),
        Some(Command::Doctor(database)) => database.url().and_then(|url| wait_for(care::doctor(&url))),
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
    let config = Config::load(Some(file)).with_context(|| format!("{} cannot be used", file.display()))?;
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

#[tokio::main]
async fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let mut config = Config::load(args.config.as_deref()).context("the configuration cannot be used")?;
    config.listen = args.listen.unwrap_or(config.listen);
    config.database = args.database.unwrap_or(config.database);
    telemetry::start(args.log.unwrap_or(config.log));

    // Both signals are taken from here on, so that none is missed while the store opens.
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };

    let listener = bind(&config.listen, args.insecure).await?;
    let address = listener.local_addr().context("the listener has no address")?;
    let metrics = Arc::new(Metrics::new());
    let store = store::open(&config.database, metrics.store()).await?;
    let buffer =
        Buffer::start(store, Arc::new(AnchoredClock::new()), Arc::clone(&metrics), config.buffer, config.policies)
            .await
            .context("the store cannot be used")?;
    tracing::info!(listen = %address, docs = %format!("http://{address}/docs"), "serving");
    Server::new(listener, buffer, metrics, config.bodies, config.server).run(shutdown).await?;
    Ok(())
}

async fn bind(listen: &str, insecure: bool) -> anyhow::Result<TcpListener> {
    let addresses: Vec<SocketAddr> =
        tokio::net::lookup_host(listen).await.with_context(|| format!("`{listen}` is not an address"))?.collect();
    if let Some(reachable) = addresses.iter().find(|address| !is_loopback(address))
        && !insecure
    {
        bail!(
            "{reachable} can be reached from other machines, and there are no keys yet: \
             listen on 127.0.0.1, or add --insecure"
        );
    }
    TcpListener::bind(addresses.as_slice()).await.with_context(|| format!("cannot listen on {listen}"))
}
