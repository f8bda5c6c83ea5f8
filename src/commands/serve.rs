//! `forebay serve`: reads the configuration, starts the log, opens the store, binds and serves. It also writes the port
//! file and handles SIGHUP.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};
use clap::Args;
use forebay::{
    config::{AgentsConfig, Config, DEFAULT_DATABASE, check_listen, is_loopback},
    server::{AgentServer, FacadeServer, Server},
    tls::Tls,
};
use forebay_agents::{AgentOptions, Agents, upstreams::Upstreams};
use forebay_api::{agent_urls::AgentUrls, http::guard::Access};
use forebay_domain::clock::AnchoredClock;
use forebay_facades::FacadeConfig;
use forebay_service::{Buffer, keyring::Keyring};
use forebay_store::{
    self as store, ObjectsClaim, PayloadKind, PayloadOptions, error::StoreError, ops::gauges::ReadVersions,
};
use forebay_telemetry::{
    log::{self as telemetry, LogFormat},
    metrics::Metrics,
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};

#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Configuration file (TOML); every key has a default
    #[arg(long, env = "FOREBAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on [default: 127.0.0.1:8080]
    #[arg(long, env = "FOREBAY_LISTEN", value_name = "ADDR")]
    listen: Option<String>,
    /// `sqlite:PATH`, `sqlite::memory:` (a temporary file, deleted at exit) or `postgres://...` [default:
    /// sqlite:data/forebay.db]
    #[arg(long, env = "FOREBAY_DATABASE", hide_env_values = true, value_name = "URL")]
    database: Option<String>,
    /// Where the payloads of rollouts are stored [default: segments for SQLite, database for Postgres]
    #[arg(long, env = "FOREBAY_PAYLOADS", value_name = "KIND")]
    payloads: Option<PayloadKind>,
    /// URL of the object store for payloads of the kind `objects`: s3://, gs://, az:// or file://
    #[arg(long, env = "FOREBAY_OBJECTS_URL", value_name = "URL")]
    objects_url: Option<String>,
    /// Take the objects over from another database, because this one replaces it: after a restore or a move. The other
    /// one must be stopped. Objects for which this database has no row are removed two hours later
    #[arg(long)]
    adopt_objects: bool,
    /// Format of the log [default: text]
    #[arg(long, env = "FOREBAY_LOG", value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// Write the bound address to this file once the service accepts requests; the file is removed when the service
    /// stops. The address of a facade is written to a file with `.slime` appended, or the name of its protocol
    #[arg(long, env = "FOREBAY_PORT_FILE", value_name = "FILE")]
    port_file: Option<PathBuf>,
    /// Allow serving without keys on an address that other machines can reach
    #[arg(long, env = "FOREBAY_INSECURE")]
    insecure: bool,
}

/// `forebay serve`: serves until a signal stops it.
pub(crate) fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let outcome = runtime.block_on(serve_until_stopped(args));
    // Tasks that did not end within the shutdown timeout are abandoned.
    runtime.shutdown_background();
    outcome
}

async fn serve_until_stopped(args: ServeArgs) -> anyhow::Result<()> {
    let mut config = Config::load(args.config.as_deref()).context("the configuration cannot be used")?;
    let keys_options = keys_options(args.config.as_deref(), args.database.as_deref());
    config.listen = args.listen.unwrap_or(config.listen);
    config.database = args.database.map_or(config.database, Into::into);
    config.payloads.kind = args.payloads.or(config.payloads.kind);
    config.payloads.objects_url = args.objects_url.or(config.payloads.objects_url);
    // It lives until the end, so that the spans of the last requests are exported.
    let _telemetry = telemetry::start(args.log.unwrap_or(config.log));

    // Signal handlers are installed before the store opens, so that no signal is missed meanwhile.
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let hangups = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let start = Start {
        adopt_objects: args.adopt_objects,
        insecure: args.insecure,
        keys_options,
        port_file: args.port_file,
        hangups: Some(hangups),
    };
    serve_until(config, start, shutdown).await
}

/// How a service starts, besides its configuration.
#[derive(Default)]
pub(super) struct Start {
    pub(super) adopt_objects: bool,
    pub(super) insecure: bool,
    /// What `forebay keys` must be given to find the same database.
    pub(super) keys_options: String,
    pub(super) port_file: Option<PathBuf>,
    /// The signals at which certificates are read again.
    pub(super) hangups: Option<Signal>,
}

/// Serves until `shutdown` completes.
pub(super) async fn serve_until(
    config: Config,
    mut start: Start,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let tls = config.tls.map(Tls::load).transpose().context("TLS cannot be used")?.map(Arc::new);
    if let Some(hangups) = start.hangups.take() {
        tokio::spawn(reload_at(hangups, tls.clone()));
    }
    let listener = bind(&config.listen).await?;
    let address = listener.local_addr().context("the listener has no address")?;
    let agents = match config.agents {
        Some(agents) => Some(bind_agents(agents, tls.is_some()).await?),
        None => None,
    };
    let facades = bind_facades(config.facades).await?;
    let metrics = Arc::new(Metrics::new());
    make_default_folder(config.database.reveal())?;
    let kind = config.payloads.kind.unwrap_or_else(|| PayloadKind::default_of(config.database.reveal()));
    let objects_claim = if start.adopt_objects { ObjectsClaim::Adopt } else { ObjectsClaim::Own };
    let payloads = PayloadOptions { kind: Some(kind), objects_claim, ..config.payloads };
    let opened = store::open_or_create(config.database.reveal(), payloads, metrics.store()).await?;
    let clock = Arc::new(AnchoredClock::new());
    let buffer = Buffer::start(
        opened.store.clone(),
        Arc::clone(&clock) as _,
        Arc::clone(&metrics),
        config.buffer,
        config.policies,
    )
    .await
    .context("the store cannot be used")?;
    let buffer = match &agents {
        Some(agents) => buffer.with_engines(Arc::new(agents.upstreams.clone())),
        None => buffer,
    };
    let addresses: Vec<SocketAddr> = facades.iter().map(|facade| facade.address).chain([address]).collect();
    let is_reachable = !addresses.iter().all(is_loopback);
    // A service that other machines can reach must not become open when its last key is revoked.
    let required = config.access.required || (is_reachable && !start.insecure);
    let keyring = Keyring::start(opened.store, clock, required).await.context("the keys cannot be read")?;
    let keyring = Arc::new(keyring);
    for address in addresses {
        check_reach(address, config.access.required || keyring.has_keys(), tls.is_some(), &start)?;
    }
    let policies = count_policies(&buffer).await.context("the policies cannot be read")?;
    let access = Access { keyring: Arc::clone(&keyring), hosts: config.access.hosts.into() };
    let agents = agents.map(|agents| agents.serve(buffer.clone(), Arc::clone(&metrics)));
    let agents_address = agents.as_ref().map(|agents| agents.urls.address.to_string());
    let facade_addresses: Vec<(&str, SocketAddr)> =
        facades.iter().map(|facade| (facade.config.protocol.name(), facade.address)).collect();
    let server = Server::new(listener, buffer, metrics, config.bodies, config.server, access)?
        .with_tls(tls.clone())
        .with_agents(agents)
        .with_tokenizers(config.tokenizers.clone())
        .with_facades(facades);
    // The page shows ids if a tokenizer cannot be read. That is no reason not to take rollouts.
    tokio::task::spawn_blocking(move || {
        for (pattern, error) in config.tokenizers.unusable() {
            tracing::warn!(policies = pattern, error, "a tokenizer of [console] cannot be used");
        }
    });
    let port_files = match start.port_file {
        Some(path) => write_port_files(&path, address, &facade_addresses)?,
        None => Vec::new(),
    };
    let facade_addresses: Vec<String> =
        facade_addresses.iter().map(|(name, address)| format!("{name}={address}")).collect();
    let scheme = if tls.is_some() { "https" } else { "http" };
    tracing::info!(
        listen = %address,
        agents = agents_address.as_deref().unwrap_or("none"),
        facades = %if facade_addresses.is_empty() { "none".to_owned() } else { facade_addresses.join(" ") },
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
    drop(port_files);
    Ok(outcome?)
}

/// Creates the folder of the default database. Other folders are not created, because their path may be mistyped.
pub(super) fn make_default_folder(database: &str) -> anyhow::Result<()> {
    let path = database.strip_prefix("sqlite:").filter(|_| database == DEFAULT_DATABASE);
    match path.and_then(|path| Path::new(path).parent()) {
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

/// The listener of agents before the store is open.
struct BoundAgents {
    listener: TcpListener,
    upstreams: Upstreams,
    urls: AgentUrls,
    options: AgentOptions,
}

async fn bind_agents(config: AgentsConfig, is_encrypted: bool) -> anyhow::Result<BoundAgents> {
    let upstreams = Upstreams::load(config.upstreams)?;
    let listener = bind(&config.listen).await.context("the listener of agents cannot be opened")?;
    let address = listener.local_addr().context("the listener of agents has no address")?;
    if !is_encrypted && !is_loopback(&address) {
        tracing::warn!(listen = %address, "calls of agents are sent unencrypted: configure [tls] or a TLS proxy");
    }
    let urls = AgentUrls { public: config.public_url, address, is_encrypted };
    Ok(BoundAgents { listener, upstreams, urls, options: config.options })
}

impl BoundAgents {
    fn serve(self, buffer: Buffer, metrics: Arc<Metrics>) -> AgentServer {
        let agents = Agents::new(buffer, self.upstreams.clone(), metrics, self.options);
        AgentServer { listener: self.listener, agents, upstreams: self.upstreams, urls: self.urls }
    }
}

async fn bind_facades(configs: Vec<FacadeConfig>) -> anyhow::Result<Vec<FacadeServer>> {
    let mut facades = Vec::with_capacity(configs.len());
    for config in configs {
        let name = config.protocol.name();
        let listener =
            bind(&config.listen).await.with_context(|| format!("the listener `facades.{name}` cannot be opened"))?;
        let address = listener.local_addr().context("the listener has no address")?;
        facades.push(FacadeServer { listener, address, config });
    }
    Ok(facades)
}

/// The options of this command that `forebay keys` needs as well. The URL of a server may have a password, which is not
/// printed.
fn keys_options(config: Option<&Path>, database: Option<&str>) -> String {
    let config = config.map(|path| format!(" --config {}", path.display()));
    let database = database.map(|url| match url.split_once(':') {
        Some(("sqlite", _)) => format!(" --database {url}"),
        _ => " --database URL".to_owned(),
    });
    config.into_iter().chain(database).collect()
}

/// Refuses to serve other machines while no keys exist, unless `--insecure` is given. No connection has been accepted
/// yet.
fn check_reach(address: SocketAddr, has_keys: bool, is_encrypted: bool, start: &Start) -> anyhow::Result<()> {
    if is_loopback(&address) {
        return Ok(());
    }
    if !has_keys && !start.insecure {
        bail!(
            "{address} can be reached from other machines, and there are no keys: create one with \
             `forebay keys create --role admin --name NAME{}`, listen on 127.0.0.1, or add --insecure",
            start.keys_options
        );
    }
    if !has_keys {
        tracing::warn!(listen = %address, "no keys exist: every client that can reach the service may do everything");
    } else if !is_encrypted {
        tracing::warn!(listen = %address, "keys and trajectories are sent unencrypted: configure [tls] or a TLS proxy");
    }
    Ok(())
}

/// Writes the file with the address of the API, and one for each facade beside it.
fn write_port_files(path: &Path, address: SocketAddr, facades: &[(&str, SocketAddr)]) -> anyhow::Result<Vec<PortFile>> {
    let mut files = Vec::new();
    // Whoever waits for the file of the API then finds the others.
    for (name, address) in facades {
        let mut path = path.as_os_str().to_owned();
        path.push(format!(".{name}"));
        files.push(PortFile::write(path.into(), *address)?);
    }
    files.push(PortFile::write(path.to_owned(), address)?);
    Ok(files)
}

/// A file that contains the bound address while the service runs.
struct PortFile(PathBuf);

impl PortFile {
    /// Writes the file atomically, so that readers never see a partial address.
    fn write(path: PathBuf, address: SocketAddr) -> anyhow::Result<Self> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = Path::new(&partial);
        std::fs::write(partial, format!("{address}\n"))
            .and_then(|()| std::fs::rename(partial, &path))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for PortFile {
    fn drop(&mut self) {
        // A file left behind would name a service that no longer runs. Errors are ignored, because the file may be gone
        // already.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Reloads the certificates on SIGHUP, which `systemctl reload` and `logrotate` send.
async fn reload_at(mut hangups: Signal, tls: Option<Arc<Tls>>) {
    while hangups.recv().await.is_some() {
        let Some(tls) = tls.clone() else {
            tracing::info!("SIGHUP is ignored: there are no certificates to reload and no log file to reopen");
            continue;
        };
        match tokio::task::spawn_blocking(move || tls.renew()).await {
            Ok(Ok(renewed)) => tracing::info!(renewed, "SIGHUP: the certificates were read again"),
            Ok(Err(error)) => {
                tracing::warn!(error = %error, "SIGHUP: certificate reload failed; the old certificates stay in use");
            }
            Err(error) => tracing::error!(error = %error, "SIGHUP: the certificate reload did not finish"),
        }
    }
}

/// The number of policies in the database. No rules are read for it.
async fn count_policies(buffer: &Buffer) -> Result<usize, StoreError> {
    Ok(buffer.store().read(ReadVersions).await?.len())
}
