//! Configuration: one TOML file, every key with a default, validated whole before anything starts.

mod collect;
mod limits;

use std::{
    collections::BTreeSet,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::http::uri::Authority;
use forebay_client::wire::{PolicyRules, Violation};
use serde::Deserialize;

use self::limits::Limits;
use crate::{
    api::BodyLimits,
    buffer::{BufferOptions, ids::PolicyName, rules::Rules},
    server::ServerLimits,
    store,
    tls::{self, TlsFiles},
};

/// The database when none is named. Its folder is made where it is missing.
pub const DEFAULT_DATABASE: &str = "sqlite:data/forebay.db";

/// Rules that are checked against others, which may be wrong themselves.
const RELATED_RULES: [&str; 2] = ["/group/min_size", "/loss_constant"];

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

/// The file, except its policies.
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
}

impl Default for File {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".to_owned(),
            database: DEFAULT_DATABASE.to_owned().into(),
            log: LogFormat::default(),
            auto_create: false,
            access: AccessConfig::default(),
            tls: None,
            limits: Limits::default(),
            policy_defaults: PolicyRules::default(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TlsTable {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
}

impl Config {
    /// Reads a file, or the defaults when there is none.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Self::parse("") };
        Self::parse(&read_file(path)?)
    }

    /// Parses and checks the text of a file.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let (config, violations) = Self::read(text)?;
        if violations.is_empty() { Ok(config) } else { Err(ConfigError::Invalid(violations)) }
    }

    /// Reads a file and checks also what it names on this machine: the certificates and the database's folder.
    pub fn check(path: &Path) -> Result<Self, ConfigError> {
        let (config, mut violations) = Self::read(&read_file(path)?)?;
        if let Some(files) = &config.tls {
            violations.extend(tls::check(files).into_iter().map(|(key, error)| {
                let detail = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
                    .map(ToString::to_string)
                    .collect::<Vec<_>>();
                Violation { pointer: format!("/tls/{key}"), detail: detail.join(": ") }
            }));
        }
        if !violations.iter().any(|violation| violation.pointer == "/database")
            && config.database.reveal() != DEFAULT_DATABASE
            && let Err(error) = store::check_folder(config.database.reveal())
        {
            violations.push(Violation { pointer: "/database".to_owned(), detail: error.to_string() });
        }
        if violations.is_empty() { Ok(config) } else { Err(ConfigError::Invalid(violations)) }
    }

    /// What a text says, and everything that is wrong with it. A wrong value stands at its default.
    fn read(text: &str) -> Result<(Self, Vec<Violation>), ConfigError> {
        let mut table: toml::Table = toml::from_str(text).map_err(|error| ConfigError::Parse(Box::new(error)))?;
        let policies = table.remove("policy");
        let mut violations = Vec::new();
        let file: File = collect::read("", table, &mut violations);
        if let Err(detail) = check_listen(&file.listen) {
            violations.push(Violation { pointer: "/listen".to_owned(), detail });
        }
        if let Err(error) = store::check_url(file.database.reveal()) {
            violations.push(Violation { pointer: "/database".to_owned(), detail: error.to_string() });
        }
        file.limits.check(&mut violations);
        let access = access(file.access, &mut violations);
        let tls = file.tls.and_then(|table| tls_files(table, &mut violations));
        let policy_defaults = rules("/policy_defaults", file.policy_defaults, &mut violations)
            .unwrap_or_else(|| Arc::new(Rules::parse(PolicyRules::default()).expect("the defaults are valid")));
        let policies = policies_of(policies, &mut violations);
        let config = Self {
            listen: file.listen,
            database: file.database,
            log: file.log,
            access,
            tls,
            server: file.limits.server(),
            bodies: file.limits.bodies(),
            buffer: BufferOptions {
                limits: file.limits.trajectories(),
                waiters_max: file.limits.waiters_max(),
                waiters_per_caller_max: file.limits.waiters_per_caller_max(),
                look_every: file.limits.look_every(),
                auto_create: file.auto_create,
                policy_defaults,
                policies_max: file.limits.policies_max(),
            },
            policies,
        };
        Ok((config, violations))
    }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.display().to_string(), source })
}

/// Whether a text has the form of an address to listen on. Whether the machine has that address only binding tells.
pub fn check_listen(listen: &str) -> Result<(), String> {
    let is_name = |host: &str| {
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'))
    };
    let is_name_with_port =
        || listen.rsplit_once(':').is_some_and(|(host, port)| is_name(host) && port.parse::<u16>().is_ok());
    if listen.parse::<SocketAddr>().is_ok() || is_name_with_port() {
        return Ok(());
    }
    Err(format!("`{listen}` is not an address with a port, such as 127.0.0.1:8080 or [::1]:8080"))
}

fn tls_files(table: TlsTable, violations: &mut Vec<Violation>) -> Option<TlsFiles> {
    let is_named = |key: &str| violations.iter().any(|violation| violation.pointer == format!("/tls/{key}"));
    let missing: Vec<Violation> = [("certificate", &table.certificate), ("key", &table.key)]
        .into_iter()
        .filter(|(key, path)| path.is_none() && !is_named(key))
        .map(|(key, _)| Violation { pointer: format!("/tls/{key}"), detail: "is needed, a path".to_owned() })
        .collect();
    violations.extend(missing);
    Some(TlsFiles { certificate: table.certificate?, key: table.key?, client_ca: table.client_ca })
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

/// The policies of the array `[[policy]]`.
fn policies_of(sent: Option<toml::Value>, violations: &mut Vec<Violation>) -> Vec<(PolicyName, Arc<Rules>)> {
    let tables = match sent {
        None => return Vec::new(),
        Some(toml::Value::Array(tables)) => tables,
        Some(_) => {
            let detail = "must be an array of tables: write [[policy]]".to_owned();
            violations.push(Violation { pointer: "/policy".to_owned(), detail });
            return Vec::new();
        }
    };
    let mut names = BTreeSet::new();
    let policy = |(index, value)| policy(&format!("/policy/{index}"), value, &mut names, violations);
    tables.into_iter().enumerate().filter_map(policy).collect()
}

fn policy(
    at: &str,
    value: toml::Value,
    names: &mut BTreeSet<PolicyName>,
    violations: &mut Vec<Violation>,
) -> Option<(PolicyName, Arc<Rules>)> {
    let toml::Value::Table(mut table) = value else {
        violations.push(Violation { pointer: at.to_owned(), detail: "must be a table".to_owned() });
        return None;
    };
    let name = match table.remove("name") {
        Some(toml::Value::String(name)) => match PolicyName::parse(&name) {
            Ok(name) if names.insert(name.clone()) => Ok(name),
            Ok(name) => Err(format!("`{name}` is there twice")),
            Err(error) => Err(error.to_string()),
        },
        _ => Err("is needed, a text".to_owned()),
    };
    let name = name.map_err(|detail| violations.push(Violation { pointer: format!("{at}/name"), detail })).ok();
    let wire = collect::read(at, table, violations);
    let rules = rules(at, wire, violations);
    name.zip(rules)
}

fn rules(at: &str, wire: PolicyRules, violations: &mut Vec<Violation>) -> Option<Arc<Rules>> {
    let is_complete = !violations.iter().any(|violation| violation.pointer.starts_with(&format!("{at}/")));
    match Rules::parse(wire) {
        Ok(rules) => Some(Arc::new(rules)),
        Err(found) => {
            // Beside a value that could not be read, what is related to it cannot be judged.
            let is_judged = |found: &Violation| is_complete || !RELATED_RULES.contains(&found.pointer.as_str());
            let found = found.into_iter().filter(is_judged);
            violations.extend(found.map(|v| Violation { pointer: format!("{at}{}", v.pointer), detail: v.detail }));
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
    fn every_value_of_a_wrong_type_is_named_with_those_that_are_out_of_range() {
        let text = "listen = 'foo'\ndatabase = 'mysql://x'\nlog = 'xml'\nauto_create = 1\nlissten = 'x'\n[tls]\nkey = 1\n\
             [limits]\nwaiters = '9'\nconnections = 20\nlook_ms = 0\nheader_timeout_s = 9223372036854775807\n\
             [policy_defaults]\nrequire = ['tokenz', 'tokens', 'logs']\ngroup = { size = 'x', min_size = 3, timeout_s = 0 }\n\
             [[policy]]\nname = 7\ngrup = {}\nadvantage = 'best'\n\
             [[policy]]\nname = 'a b'\nbatch = 3\n\
             [[policy.filter]]\nname = 'x'\nscope = 'all'\nwhen = 'true'\naction = 'keep'\n\
             [[policy.filter]]\nname = 'y'\nscope = 'group'\nwhen = 1\naction = 'drop'";
        let Err(ConfigError::Invalid(found)) = Config::parse(text) else { panic!("they are all wrong") };
        let found: BTreeSet<&str> = found.iter().map(|violation| violation.pointer.as_str()).collect();
        let wrong = [
            "/listen",
            "/database",
            "/log",
            "/auto_create",
            "/lissten",
            "/tls/key",
            "/tls/certificate",
            "/limits/waiters",
            "/limits/look_ms",
            "/limits/header_timeout_s",
            "/policy_defaults/require/0",
            "/policy_defaults/require/2",
            "/policy_defaults/group/size",
            "/policy_defaults/group/timeout_s",
            "/policy/0/name",
            "/policy/0/grup",
            "/policy/0/advantage",
            "/policy/1/name",
            "/policy/1/batch",
            "/policy/1/filter/0/scope",
            "/policy/1/filter/0/action",
            "/policy/1/filter/1/when",
        ];
        assert_eq!(found, BTreeSet::from(wrong));
    }

    #[test]
    fn times_and_sizes_have_a_largest_value() {
        let of = |name: &str, value: &str| Config::parse(&format!("[limits]\n{name} = {value}"));
        for name in [
            "connections",
            "header_timeout_s",
            "body_bytes",
            "body_timeout_s",
            "inflight_bytes",
            "trajectory_tokens",
            "trajectory_segments",
            "metadata_bytes",
            "control_bytes",
            "samples_bytes",
            "policies",
            "waiters",
            "waiters_per_key",
            "look_ms",
            "stall_timeout_s",
            "shutdown_s",
        ] {
            let error = of(name, "9223372036854775807").expect_err("it is too large").to_string();
            assert!(error.contains(&format!("/limits/{name}: must be at most")), "{error}");
            // More than an integer of TOML holds.
            let error = of(name, "18446744073709551615").expect_err("it is too large").to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn addresses_have_a_port() {
        for listen in ["127.0.0.1:0", "[::1]:8080", "localhost:8080", "my-host.example:80", "0.0.0.0:65535"] {
            assert_eq!(check_listen(listen), Ok(()));
        }
        for listen in ["foo", "127.0.0.1", ":8080", "::1:8080", "http://a:80", "a:65536", "a:", "a b:80", ""] {
            assert!(check_listen(listen).is_err(), "{listen}");
        }
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
