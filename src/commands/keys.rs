//! `forebay keys`: create, list and revoke keys, through a running service or directly in the database.
//!
//! Both ways are needed: only the process that serves a SQLite file can open it, and the first key may be needed before
//! the service runs.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use forebay::config::{Config, DatabaseUrl};
use forebay_client::{
    Client, ClientError, ClientOptions, RetryPolicy,
    wire::{ApiKey, KeyCreated, KeyInfo, KeyRequest},
};
use forebay_domain::{
    access::key::{KeyFilter, KeyId, NewKey, StoredKey},
    clock::{AnchoredClock, Clock as _, Timestamp},
};
use forebay_service::keyring;
use forebay_store::{
    self as store, OpenError, PayloadOptions, Store,
    ops::{
        clock::ReadClock,
        keys::{ListKeys, RevokeKey},
    },
};
use forebay_telemetry::metrics::Metrics;
use forebay_wire::Role;

/// Keys per page when listing.
const PAGE: u32 = 1_000;

/// The arguments of `forebay keys`.
#[derive(Args)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
    #[command(flatten)]
    place: Place,
}

#[derive(Args)]
#[command(next_help_heading = "Location of the keys")]
struct Place {
    /// URL of a running service, e.g. `http://127.0.0.1:8080`; if absent, the database is opened directly
    #[arg(long, global = true, env = "FOREBAY_URL", value_name = "URL")]
    url: Option<String>,
    /// An admin's key for the running service; set the variable rather than the option, which `ps` shows
    #[arg(long, global = true, env = "FOREBAY_KEY", hide_env_values = true, value_name = "KEY")]
    key: Option<ApiKey>,
    /// Certificate (PEM) to trust instead of the system's: the service's own, or that of the authority that signed it
    #[arg(long, global = true, env = "FOREBAY_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate and private key (PEM), for a service that requires client certificates
    #[arg(long, global = true, env = "FOREBAY_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Configuration file that names the database
    #[arg(long, global = true, env = "FOREBAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Database to use instead of the configured one
    #[arg(long, global = true, env = "FOREBAY_DATABASE", hide_env_values = true, value_name = "URL")]
    database: Option<String>,
}

#[derive(Subcommand)]
enum KeysCommand {
    /// Create a key and print it; the secret cannot be shown again
    Create {
        /// Who or what the key is for
        #[arg(long)]
        name: String,
        /// What the key may do
        #[arg(long)]
        role: RoleArg,
        /// Policies that the key may access, separated by commas; `*` stands for any characters
        #[arg(long, value_delimiter = ',', default_value = "*", value_name = "GLOBS")]
        policies: Vec<String>,
        /// How long the key is valid, e.g. 90d, 12h, 30m; if absent, it never expires
        #[arg(long, value_parser = seconds, value_name = "TIME")]
        expires_in: Option<u64>,
    },
    /// List all keys and when each was last used
    List,
    /// Revoke keys: immediately with --url, otherwise the running services notice within a second
    Revoke {
        /// Ids of the keys, as `list` shows them
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Agents: post trajectories
    Produce,
    /// Trainers: lease batches
    Train,
    /// People and monitoring: read everything, change nothing
    Read,
    /// Operators: everything
    Admin,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Produce => Self::Produce,
            RoleArg::Train => Self::Train,
            RoleArg::Read => Self::Read,
            RoleArg::Admin => Self::Admin,
        }
    }
}

/// Parses a number with a unit into seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let unit = |unit| match unit {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3_600),
        'd' => Some(86_400),
        'w' => Some(604_800),
        _ => None,
    };
    let parse = || {
        let last = text.chars().next_back()?;
        let number: u64 = text[..text.len() - last.len_utf8()].parse().ok()?;
        number.checked_mul(unit(last)?)
    };
    parse().ok_or_else(|| "must be a number and s, m, h, d or w, e.g. 90d".to_owned())
}

/// Runs a subcommand of `forebay keys`.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn keys(args: KeysArgs) -> anyhow::Result<()> {
    // `create` also creates a missing database, because the first key may be needed before the service first runs. For
    // the other commands a missing database is an error.
    let creates = matches!(args.command, KeysCommand::Create { .. });
    let keys = args.place.open(creates).await?;
    let outcome = run(args.command, &keys).await;
    keys.close().await;
    outcome
}

async fn run(command: KeysCommand, keys: &Keys) -> anyhow::Result<()> {
    match command {
        KeysCommand::Create { name, role, policies, expires_in } => {
            let request = KeyRequest { name, role: role.into(), policies: Some(policies), expires_in_s: expires_in };
            let KeyCreated { key, info } = keys.create(request).await?;
            eprintln!(
                "key {} ({}, policies {}): store the key printed below, it cannot be shown again",
                info.key_id,
                info.role,
                info.policies.join(",")
            );
            crate::print(&format!("{}\n", key.reveal()))
        }
        KeysCommand::List => crate::print(&table(&keys.list().await?)),
        KeysCommand::Revoke { ids } => {
            for id in ids {
                let info = keys.revoke(&id).await?.with_context(|| format!("there is no key {id}"))?;
                eprintln!("key {} ({}) is revoked", info.key_id, info.name);
            }
            Ok(())
        }
    }
}

/// Where the keys are read and changed.
enum Keys {
    Service(Service),
    Database(Arc<Store>),
}

/// A running service.
struct Service {
    client: Client,
    url: String,
}

impl Service {
    /// Adds advice to an error if the solution is known.
    fn failed(&self, error: ClientError) -> anyhow::Error {
        let url = &self.url;
        match error {
            ClientError::Transport(error) if error.is_connection_refused() => {
                anyhow!("nothing listens at {url}: start it with `forebay serve`, or name another service with --url")
            }
            ClientError::Certificate(why) => anyhow!("{url}: {why} (--ca FILE, or FOREBAY_CA)"),
            error => error.into(),
        }
    }
}

impl Place {
    /// Connects to the service or opens the database. A missing database is created only if `creates` is set.
    async fn open(self, creates: bool) -> anyhow::Result<Keys> {
        if let Some(url) = &self.url {
            let read = |path: &PathBuf| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
            let options = ClientOptions {
                key: self.key,
                ca_pem: self.ca.as_ref().map(read).transpose()?,
                identity_pem: self.identity.as_ref().map(read).transpose()?,
                ..ClientOptions::default()
            };
            // A user waits at the terminal and can repeat the command, so the client does not retry.
            let client = Client::with_options(url, &options)?.with_retry(RetryPolicy::none());
            return Ok(Keys::Service(Service { client, url: url.clone() }));
        }
        let config = Config::load(self.config.as_deref()).context("the configuration cannot be used")?;
        let database = self.database.map_or(config.database, DatabaseUrl::from);
        Ok(Keys::Database(open_database(database.reveal(), creates).await?))
    }
}

impl Keys {
    async fn create(&self, request: KeyRequest) -> anyhow::Result<KeyCreated> {
        match self {
            Self::Service(service) => service.client.create_key(&request).await.map_err(|error| service.failed(error)),
            Self::Database(store) => {
                let (key, secret) = NewKey::mint(request, now(store).await?).map_err(refused)?;
                let stored = keyring::create(store, key).await?;
                Ok(KeyCreated { key: secret, info: stored.on_wire() })
            }
        }
    }

    async fn list(&self) -> anyhow::Result<Vec<KeyInfo>> {
        let mut keys = Vec::new();
        match self {
            Self::Service(service) => {
                let mut after = "0".to_owned();
                loop {
                    let page = service.client.keys(&[("after", &after), ("limit", &PAGE.to_string())]).await;
                    let page = page.map_err(|error| service.failed(error))?;
                    keys.extend(page.keys);
                    match page.next {
                        Some(next) => after = next,
                        None => return Ok(keys),
                    }
                }
            }
            Self::Database(store) => {
                let mut after = 0;
                loop {
                    let page = store.read(ListKeys(KeyFilter { live_only: false, after, limit: PAGE })).await?;
                    let Some(last) = page.last() else { return Ok(keys) };
                    after = last.key_pk.0;
                    keys.extend(page.iter().map(StoredKey::on_wire));
                }
            }
        }
    }

    async fn revoke(&self, id: &str) -> anyhow::Result<Option<KeyInfo>> {
        match self {
            Self::Service(service) => service.client.revoke_key(id).await.map_err(|error| service.failed(error)),
            Self::Database(store) => {
                let Some(key_id) = KeyId::parse(id) else { return Ok(None) };
                let revoked = store.write(RevokeKey { key_id, now: now(store).await? }).await?;
                Ok(revoked.as_ref().map(StoredKey::on_wire))
            }
        }
    }

    async fn close(&self) {
        if let Self::Database(store) = self {
            store.close().await;
        }
    }
}

async fn open_database(url: &str, creates: bool) -> anyhow::Result<Arc<Store>> {
    let metrics = Metrics::new().store();
    let opened = if creates {
        super::serve::make_default_folder(url)?;
        store::open_or_create(url, PayloadOptions::default(), metrics).await.map(|opened| {
            if opened.is_new {
                eprintln!("created database {}", store::redact(url));
            }
            opened.store
        })
    } else {
        store::open_existing(url, metrics).await
    };
    match opened {
        Err(error @ OpenError::Locked(_)) => {
            bail!("{error}; send the command to that process with --url http://... and an admin's key in FOREBAY_KEY")
        }
        opened => Ok(opened?),
    }
}

async fn now(store: &Store) -> anyhow::Result<Timestamp> {
    let reading = store.read(ReadClock).await?;
    Ok(reading
        .time()
        .unwrap_or_else(|| AnchoredClock::new().now())
        .max(reading.latest.unwrap_or(Timestamp::from_micros(0))))
}

fn refused(refusal: forebay_domain::refusal::Refusal) -> anyhow::Error {
    use forebay_domain::refusal::Refusal;
    let Refusal::Invalid(violations) = refusal else { return refusal.into() };
    let lines: Vec<String> =
        violations.iter().map(|violation| format!("{}: {}", violation.pointer, violation.detail)).collect();
    anyhow::anyhow!("the key cannot be created: {}", lines.join("; "))
}

/// Formats keys as a table. Each column is as wide as its widest entry.
fn table(keys: &[KeyInfo]) -> String {
    // Times are cut to seconds, because people do not need the fraction.
    let seconds = |time: Option<&str>, never: &str| time.map_or(never, |time| &time[..time.len().min(19)]).to_owned();
    let head = ["ID", "NAME", "ROLE", "POLICIES", "CREATED", "LAST USED", "EXPIRES", "REVOKED"].map(str::to_owned);
    let row = |key: &KeyInfo| {
        [
            key.key_id.clone(),
            key.name.clone(),
            key.role.to_string(),
            key.policies.join(","),
            seconds(Some(&key.created_at), ""),
            seconds(key.last_used_at.as_deref(), "never"),
            seconds(key.expires_at.as_deref(), "never"),
            seconds(key.revoked_at.as_deref(), "no"),
        ]
    };
    let rows: Vec<[String; 8]> = std::iter::once(head).chain(keys.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 8] = std::array::from_fn(width);
    let line = |row: &[String; 8]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!((seconds("90d"), seconds("12h"), seconds("30m")), (Ok(7_776_000), Ok(43_200), Ok(1_800)));
        for wrong in ["", "d", "90", "-1d", "1.5h", "9999999999999999999d", "1é"] {
            assert!(seconds(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn columns_are_as_wide_as_their_entries() {
        let key = KeyInfo {
            key_id: "0123456789ab".to_owned(),
            name: "agents of cell 7".to_owned(),
            role: Role::Produce,
            policies: vec!["math.*".to_owned(), "default".to_owned()],
            created_at: "2026-01-01T00:00:00.000000Z".to_owned(),
            last_used_at: None,
            expires_at: None,
            revoked_at: None,
        };
        let lines: Vec<String> = table(&[key]).lines().map(str::to_owned).collect();
        assert_eq!(lines[0].find("ROLE"), lines[1].find("produce"));
        assert!(lines[1].ends_with("2026-01-01T00:00:00  never      never    no"), "{}", lines[1]);
    }
}
