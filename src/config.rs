//! Configuration: one TOML file, every key with a default, validated whole before anything starts.

use std::{
    collections::BTreeSet,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::http::uri::Authority;
use forebay_client::wire::{PolicyRules, Violation};
use serde::Deserialize;

use crate::{
    api::{BodyLimits, ByteBudgets},
    buffer::{BufferOptions, ids::PolicyName, rules::Rules, trajectory::TrajectoryLimits},
    server::ServerLimits,
    tls::TlsFiles,
};

/// What the service is told, checked.
#[derive(Debug)]
pub struct Config {
    /// Address to listen on.
    pub listen: String,
    /// Database URL.
    pub database: DatabaseUrl,
    /// How the log looks.
    pub log: LogFormat,
    /// Who may come in.
    pub access: AccessConfig,
    /// What connections are encrypted with, if they are.
    pub tls: Option<TlsFiles>,
    /// Bounds of connections and of the stop.
    pub server: ServerLimits,
    /// Bounds of bodies.
    pub bodies: BodyLimits,
    /// What the buffer is told.
    pub buffer: BufferOptions,
    /// Policies to create where they do not exist.
    pub policies: Vec<(PolicyName, Arc<Rules>)>,
}

/// A database URL, which may hold a password: printed without it.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct DatabaseUrl(String);

impl DatabaseUrl {
    /// The URL with its password.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for DatabaseUrl {
    fn from(url: String) -> Self {
        Self(url)
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::store::redact(&self.0))
    }
}

/// Who may come in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccessConfig {
    /// A key is needed also while there is none.
    pub required: bool,
    /// Names by which the service is known.
    pub hosts: Vec<String>,
}

/// How the log looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line per event, for people.
    #[default]
    Text,
    /// One JSON object per line, for machines.
    Json,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not the TOML that is expected.
    #[error("{0}")]
    Parse(Box<toml::de::Error>),
    /// Values that cannot work.
    #[error("{}", list(.0))]
    Invalid(Vec<Violation>),
}

fn list(violations: &[Violation]) -> String {
    let lines: Vec<String> =
        violations.iter().map(|violation| format!("{}: {}", violation.pointer, violation.detail)).collect();
    lines.join("\n")
}

/// The file.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    listen: String,
    database: DatabaseUrl,
    log: LogFormat,
    auto_create: bool,
    access: AccessConfig,
    tls: Option<TlsTable>,
    limits: Limits,
    policy_defaults: PolicyRules,
    policy: Vec<toml::Table>,
}

impl Default for File {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".to_owned(),
            database: "sqlite:data/forebay.db".to_owned().into(),
            log: LogFormat::default(),
            auto_create: false,
            access: AccessConfig::default(),
            tls: None,
            limits: Limits::default(),
            policy_defaults: PolicyRules::default(),
            policy: Vec::new(),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsTable {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Limits {
    connections: usize,
    header_timeout_s: u64,
    body_bytes: usize,
    body_timeout_s: u64,
    inflight_bytes: usize,
    control_bytes: usize,
    samples_bytes: usize,
    trajectory_tokens: usize,
    trajectory_segments: usize,
    metadata_bytes: usize,
    policies: u32,
    waiters: usize,
    waiters_per_key: usize,
    look_ms: u64,
    stall_timeout_s: u64,
    shutdown_s: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4_096,
            header_timeout_s: 10,
            body_bytes: 64 << 20,
            body_timeout_s: 120,
            inflight_bytes: 192 << 20,
            control_bytes: 32 << 20,
            samples_bytes: 256 << 20,
            trajectory_tokens: 2_000_000,
            trajectory_segments: 4_096,
            metadata_bytes: 256 << 10,
            policies: 1_024,
            waiters: 1_024,
            waiters_per_key: 512,
            look_ms: 500,
            stall_timeout_s: 60,
            shutdown_s: 30,
        }
    }
}

impl Config {
    /// Reads a file, or the defaults when there is none.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Self::parse("") };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.display().to_string(), source })?;
        Self::parse(&text)
    }

    /// Parses and checks the text of a file.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| ConfigError::Parse(Box::new(error)))?;
        let mut violations = Vec::new();
        check_limits(&file.limits, &mut violations);
        let access = access(file.access, &mut violations);
        let defaults = rules("/policy_defaults", file.policy_defaults.clone(), &mut violations);
        let policies = policies(file.policy, &mut violations);
        let (Some(policy_defaults), true) = (defaults, violations.is_empty()) else {
            return Err(ConfigError::Invalid(violations));
        };
        let limits = file.limits;
        Ok(Self {
            listen: file.listen,
            database: file.database,
            log: file.log,
            access,
            tls: file.tls.map(|table| TlsFiles {
                certificate: table.certificate,
                key: table.key,
                client_ca: table.client_ca,
            }),
            server: ServerLimits {
                connections_max: limits.connections,
                header_timeout: Duration::from_secs(limits.header_timeout_s),
                stall_timeout: Duration::from_secs(limits.stall_timeout_s),
                shutdown_timeout: Duration::from_secs(limits.shutdown_s),
            },
            bodies: BodyLimits {
                body_bytes_max: limits.body_bytes,
                budgets: ByteBudgets {
                    posts: limits.inflight_bytes,
                    control: limits.control_bytes,
                    samples: limits.samples_bytes,
                },
                read_timeout: Duration::from_secs(limits.body_timeout_s),
            },
            buffer: BufferOptions {
                limits: TrajectoryLimits {
                    tokens_max: limits.trajectory_tokens,
                    segments_max: limits.trajectory_segments,
                    metadata_bytes_max: limits.metadata_bytes,
                },
                waiters_max: limits.waiters,
                waiters_per_caller_max: limits.waiters_per_key,
                look_every: Duration::from_millis(limits.look_ms),
                auto_create: file.auto_create,
                policy_defaults,
                policies_max: limits.policies,
            },
            policies,
        })
    }
}

/// Whether an address can only be reached from this machine.
#[must_use]
pub fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Host names in lower case, as requests are compared with them.
fn access(mut access: AccessConfig, violations: &mut Vec<Violation>) -> AccessConfig {
    for (index, host) in access.hosts.iter_mut().enumerate() {
        host.make_ascii_lowercase();
        let authority = host.parse::<Authority>().ok();
        if !authority.is_some_and(|authority| authority.host() == host && !host.starts_with('[')) {
            let pointer = format!("/access/hosts/{index}");
            violations
                .push(Violation { pointer, detail: format!("`{host}` is not the name of a host, without a port") });
        }
    }
    access
}

/// The most that `body_bytes` may be. A rollout is one value in the database, which has less than 10^9 bytes in SQLite,
/// and a text of it is one value of an Arrow column, which has less than 2^31; unpacked it is half as long again.
const BODY_BYTES_BOUND: usize = 512 << 20;

fn check_limits(limits: &Limits, violations: &mut Vec<Violation>) {
    if limits.body_bytes > BODY_BYTES_BOUND {
        let detail = format!("must be at most {BODY_BYTES_BOUND}, is {}", limits.body_bytes);
        violations.push(Violation { pointer: "/limits/body_bytes".to_owned(), detail });
    }
    let mut at_least = |name: &str, value: usize, min: usize| {
        if value < min {
            let (pointer, detail) = (format!("/limits/{name}"), format!("must be at least {min}, is {value}"));
            violations.push(Violation { pointer, detail });
        }
    };
    at_least("header_timeout_s", limits.header_timeout_s as usize, 1);
    at_least("body_bytes", limits.body_bytes, 1_024);
    at_least("stall_timeout_s", limits.stall_timeout_s as usize, 1);
    at_least("body_timeout_s", limits.body_timeout_s as usize, 1);
    // A compressed body is held twice: as sent, and expanded.
    at_least("inflight_bytes", limits.inflight_bytes, limits.body_bytes.saturating_mul(2));
    // The longest control body and the longest page of a list, a few of each at once.
    at_least("control_bytes", limits.control_bytes, 4 << 20);
    // The rows of one rollout are read at once: stored, unpacked, as rows and as an answer.
    at_least("samples_bytes", limits.samples_bytes, limits.body_bytes.saturating_mul(4));
    at_least("trajectory_tokens", limits.trajectory_tokens, 1);
    at_least("trajectory_segments", limits.trajectory_segments, 1);
    at_least("policies", limits.policies as usize, 1);
    at_least("waiters", limits.waiters, 1);
    at_least("look_ms", limits.look_ms as usize, 1);
    at_least("waiters_per_key", limits.waiters_per_key, 1);
    // Who waits for a batch or a version holds a connection: acks and heartbeats need some that are free.
    at_least("connections", limits.connections, limits.waiters.saturating_mul(3));
}

fn policies(tables: Vec<toml::Table>, violations: &mut Vec<Violation>) -> Vec<(PolicyName, Arc<Rules>)> {
    let mut policies = Vec::new();
    let mut names = BTreeSet::new();
    for (index, mut table) in tables.into_iter().enumerate() {
        let at = format!("/policy/{index}");
        let mut refuse = |field: &str, detail: String| {
            violations.push(Violation { pointer: format!("{at}{field}"), detail });
        };
        let Some(toml::Value::String(name)) = table.remove("name") else {
            refuse("/name", "is needed, a text".to_owned());
            continue;
        };
        let name = match PolicyName::parse(&name) {
            Ok(name) if names.insert(name.clone()) => name,
            Ok(_) => {
                refuse("/name", format!("`{name}` is there twice"));
                continue;
            }
            Err(error) => {
                refuse("/name", error.to_string());
                continue;
            }
        };
        match table.try_into::<PolicyRules>() {
            Err(error) => refuse("", error.to_string().trim_end().to_owned()),
            Ok(wire) => {
                if let Some(rules) = rules(&at, wire, violations) {
                    policies.push((name, rules));
                }
            }
        }
    }
    policies
}

fn rules(at: &str, wire: PolicyRules, violations: &mut Vec<Violation>) -> Option<Arc<Rules>> {
    match Rules::parse(wire) {
        Ok(rules) => Some(Arc::new(rules)),
        Err(found) => {
            violations.extend(
                found.into_iter().map(|v| Violation { pointer: format!("{at}{}", v.pointer), detail: v.detail }),
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_needs_to_be_said() {
        let config = Config::parse("").expect("the defaults are valid");
        assert_eq!((config.listen.as_str(), config.database.reveal()), ("127.0.0.1:8080", "sqlite:data/forebay.db"));
    }

    #[test]
    fn every_wrong_value_is_named() {
        let text =
            "[limits]\nconnections = 100\n[[policy]]\nname = 'a b'\n[[policy]]\nname = 'x'\nlease = { ttl_s = 0 }";
        let error = Config::parse(text).expect_err("three values are wrong").to_string();
        for pointer in ["/limits/connections", "/policy/0/name", "/policy/1/lease/ttl_s"] {
            assert!(error.contains(pointer), "{pointer} is not in {error}");
        }
    }

    #[test]
    fn a_body_is_at_most_what_the_database_and_arrow_can_hold_and_budgets_fit_bodies() {
        let wrong = |limits: &str| Config::parse(&format!("[limits]\n{limits}")).expect_err("it is wrong").to_string();
        let huge = wrong("body_bytes = 536870913\ninflight_bytes = 2000000000\nsamples_bytes = 4000000000");
        assert_eq!(huge, "/limits/body_bytes: must be at most 536870912, is 536870913");
        let narrow = wrong("samples_bytes = 268435455\ncontrol_bytes = 1");
        assert!(narrow.contains("/limits/samples_bytes") && narrow.contains("/limits/control_bytes"), "{narrow}");
    }

    #[test]
    fn hosts_are_names_without_ports() {
        let config = Config::parse("[access]\nhosts = ['Forebay.Example', '10.0.0.7']").expect("they are names");
        assert_eq!(config.access.hosts, ["forebay.example", "10.0.0.7"]);
        for host in ["a:80", "http://a", "a/b", "", "[::1]"] {
            let error = Config::parse(&format!("[access]\nhosts = ['{host}']")).expect_err("it is no name").to_string();
            assert!(error.contains("/access/hosts/0"), "{error}");
        }
    }

    #[test]
    fn the_databases_password_stays_out_of_what_is_printed() {
        let config = Config::parse("database = 'postgres://me:hunter2@db/forebay'").expect("it is a URL");
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(config.database.reveal().contains("hunter2"));
    }

    #[test]
    fn unknown_keys_are_refused() {
        let error = Config::parse("lissten = 'x'").expect_err("the key is misspelt").to_string();
        assert!(error.contains("lissten"), "{error}");
        let error = Config::parse("[[policy]]\nname = 'x'\ngrup = {}").expect_err("the key is misspelt").to_string();
        assert!(error.contains("grup"), "{error}");
    }
}
