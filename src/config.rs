//! Configuration: one TOML file in which every key has a default. The whole file is validated before anything starts.

mod collect;
mod console;
mod facades;
mod limits;
mod quotas;
mod sessions;
#[cfg(test)]
mod tests;
mod text;
mod upstreams;

use std::{
    collections::BTreeSet,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::http::uri::Authority;
use forebay_agents::{AgentOptions, configured::UpstreamConfig, upstreams::Upstreams};
use forebay_api::{http::body::BodyLimits, routes::tokenizers::Tokenizers};
use forebay_domain::{ids::PolicyName, quotas::Quotas, rules::Rules, surrogates::LoneSurrogates};
use forebay_facades::FacadeConfig;
use forebay_service::BufferOptions;
use forebay_store::{
    self as store, OBJECTS_CACHE_BYTES, OBJECTS_GRACE_S, ObjectsClaim, PayloadKind, PayloadOptions, SEGMENT_FILE_BYTES,
};
use forebay_telemetry::log::LogFormat;
use forebay_wire::{PolicyRules, Violation};
use serde::Deserialize;

use self::{
    console::Console,
    limits::{BUDGET_BYTES_MAX, Limits},
    sessions::Sessions,
};
use crate::{
    server::ServerLimits,
    tls::{self, TlsFiles},
};

/// The database if none is configured. Its folder is created if it is missing.
pub const DEFAULT_DATABASE: &str = "sqlite:data/forebay.db";

/// The longest grace of objects: a year.
const OBJECTS_GRACE_S_MAX: u64 = 31_536_000;

/// The least length of a segment file.
const SEGMENT_FILE_BYTES_MIN: u64 = 1 << 20;

/// Rules whose check depends on other rules, which may themselves be invalid.
const RELATED_RULES: [&str; 2] = ["/group/min_size", "/loss_constant"];

/// The validated configuration of the service.
#[derive(Debug)]
pub struct Config {
    /// Address to listen on.
    pub listen: String,
    /// Database URL.
    pub database: DatabaseUrl,
    /// How payloads are stored. Without a kind, the default for the database.
    pub payloads: PayloadOptions,
    /// The format of the log.
    pub log: LogFormat,
    /// Who may use the service.
    pub access: AccessConfig,
    /// The certificates for TLS. Without them, connections are not encrypted.
    pub tls: Option<TlsFiles>,
    /// Limits of connections and of the shutdown.
    pub server: ServerLimits,
    /// Limits of request bodies.
    pub bodies: BodyLimits,
    /// The tokenizers of policies, for the live page.
    pub tokenizers: Tokenizers,
    /// Options of the buffer.
    pub buffer: BufferOptions,
    /// The listener of agents; none if sessions cannot be opened.
    pub agents: Option<AgentsConfig>,
    /// Listeners for the clients of other rollout buffers.
    pub facades: Vec<FacadeConfig>,
    /// Policies that are created at start if they do not exist.
    pub policies: Vec<(PolicyName, Arc<Rules>)>,
}

/// The listener of agents, and the inference engines that answer their calls.
#[derive(Clone, Debug)]
pub struct AgentsConfig {
    /// Address to listen on.
    pub listen: String,
    /// The address that agents are told, if it is another.
    pub public_url: Option<String>,
    /// Limits and times of calls.
    pub options: AgentOptions,
    /// The engines.
    pub upstreams: Vec<UpstreamConfig>,
}

/// A database URL. Its debug output leaves out the password.
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
        f.write_str(&forebay_store::redact(&self.0))
    }
}

/// Who may use the service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccessConfig {
    /// Whether requests need a key even while no key exists.
    pub required: bool,
    /// Host names of the service, which the `Host` header is checked against.
    pub hosts: Vec<String>,
}

/// Settings that were renamed: the pointer of the old name, and the new name.
const RENAMED: [(&str, &str); 1] = [("/limits/look_ms", "waiter_poll_interval_ms")];

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
    /// The file is not TOML.
    #[error("{}", lines(.0))]
    Parse(Vec<toml::de::Error>),
    /// Some values are invalid.
    #[error("{}", lines(.0.iter().map(|violation| format!("{}: {}", violation.pointer, violation.detail))))]
    Invalid(Vec<Violation>),
}

fn lines(parts: impl IntoIterator<Item = impl ToString>) -> String {
    let lines: Vec<String> = parts.into_iter().map(|part| part.to_string().trim_end().to_owned()).collect();
    lines.join("\n")
}

/// The file, except its policies.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    listen: String,
    database: DatabaseUrl,
    payloads: Option<PayloadKind>,
    segment_file_bytes: u64,
    objects: ObjectsTable,
    log: LogFormat,
    auto_create: bool,
    access: AccessConfig,
    tls: Option<TlsTable>,
    limits: Limits,
    console: Console,
    sessions: Sessions,
    text: TextTable,
    policy_defaults: PolicyRules,
}

/// What becomes of texts that cannot be stored as they are sent.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TextTable {
    lone_surrogates: LoneSurrogates,
}

/// The object store of a Postgres database.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ObjectsTable {
    url: Option<String>,
    grace_s: u64,
    cache_bytes: u64,
}

impl Default for ObjectsTable {
    fn default() -> Self {
        Self { url: None, grace_s: OBJECTS_GRACE_S, cache_bytes: OBJECTS_CACHE_BYTES }
    }
}

impl Default for File {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".to_owned(),
            database: DEFAULT_DATABASE.to_owned().into(),
            payloads: None,
            segment_file_bytes: SEGMENT_FILE_BYTES,
            objects: ObjectsTable::default(),
            log: LogFormat::default(),
            auto_create: false,
            access: AccessConfig::default(),
            tls: None,
            limits: Limits::default(),
            console: Console::default(),
            sessions: Sessions::default(),
            text: TextTable::default(),
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
    /// Reads a file. Without a path, it returns the defaults.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Self::parse("") };
        Self::parse(&read_file(path)?)
    }

    /// Parses and checks the text of a file.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let (config, violations) = Self::read(text)?;
        if violations.is_empty() { Ok(config) } else { Err(ConfigError::Invalid(violations)) }
    }

    /// Reads a file, and also checks the certificates, the tokenizers and the database's folder on this machine.
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
        if let Some(agents) = &config.agents
            && let Err(error) = Upstreams::load(agents.upstreams.clone())
        {
            let index = agents.upstreams.iter().position(|upstream| upstream.options.name == error.name);
            let pointer = format!("/upstream/{}/{}", index.unwrap_or_default(), error.key);
            violations.push(Violation { pointer, detail: error.why });
        }
        violations.extend(
            config
                .tokenizers
                .unusable()
                .map(|(pattern, error)| Violation { pointer: console::pointer(pattern), detail: error }),
        );
        if !violations.iter().any(|violation| violation.pointer == "/database")
            && config.database.reveal() != DEFAULT_DATABASE
            && let Err(error) = store::check_folder(config.database.reveal())
        {
            violations.push(Violation { pointer: "/database".to_owned(), detail: error.to_string() });
        }
        if violations.is_empty() { Ok(config) } else { Err(ConfigError::Invalid(violations)) }
    }

    /// Parses a text and lists everything that is wrong with it. An invalid value is replaced by its default.
    fn read(text: &str) -> Result<(Self, Vec<Violation>), ConfigError> {
        let mut violations = Vec::new();
        let mut table = text::parse(text, &mut violations).map_err(ConfigError::Parse)?;
        let policies = table.remove("policy");
        let upstreams = table.remove("upstream");
        let facades = table.remove("facades");
        let quotas = table.remove("quota");
        let file: File = collect::read("", table, &mut violations);
        explain_renamed(&mut violations);
        if let Err(detail) = check_listen(&file.listen) {
            violations.push(Violation { pointer: "/listen".to_owned(), detail });
        }
        if let Err(error) = store::check_url(file.database.reveal()) {
            violations.push(Violation { pointer: "/database".to_owned(), detail: error.to_string() });
        }
        if file.segment_file_bytes < SEGMENT_FILE_BYTES_MIN {
            let detail = format!("must be at least {SEGMENT_FILE_BYTES_MIN}: each file is opened to be read");
            violations.push(Violation { pointer: "/segment_file_bytes".to_owned(), detail });
        }
        if file.objects.grace_s > OBJECTS_GRACE_S_MAX {
            let detail = format!("must be at most {OBJECTS_GRACE_S_MAX}, a year");
            violations.push(Violation { pointer: "/objects/grace_s".to_owned(), detail });
        }
        if file.objects.cache_bytes > BUDGET_BYTES_MAX {
            let detail = format!("must be at most {BUDGET_BYTES_MAX}");
            violations.push(Violation { pointer: "/objects/cache_bytes".to_owned(), detail });
        }
        if let Some(Err(detail)) = file.objects.url.as_deref().map(store::check_objects_url) {
            violations.push(Violation { pointer: "/objects/url".to_owned(), detail });
        }
        file.limits.check(&mut violations);
        file.sessions.check(&mut violations);
        let agents = agents(&file, upstreams, &mut violations);
        let tokenizers = file.console.tokenizers(&mut violations);
        let facades = facades::read(facades, &mut violations);
        let of_teams = quotas::read(quotas, &mut violations);
        let access = access(file.access, &mut violations);
        let tls = file.tls.and_then(|table| tls_files(table, &mut violations));
        let policy_defaults = rules("/policy_defaults", file.policy_defaults, &mut violations)
            .unwrap_or_else(|| Arc::new(Rules::parse(PolicyRules::default()).expect("the defaults are valid")));
        let policies = policies_of(policies, &mut violations);
        check_teachers(agents.as_ref(), &policy_defaults, &policies, &mut violations);
        quotas::check(&of_teams, &policies, &mut violations);
        let config = Self {
            listen: file.listen,
            database: file.database,
            payloads: PayloadOptions {
                kind: file.payloads,
                segment_file_bytes: file.segment_file_bytes,
                objects_url: file.objects.url,
                objects_claim: ObjectsClaim::Own,
                objects_grace_s: file.objects.grace_s,
                objects_cache_bytes: file.objects.cache_bytes,
            },
            log: file.log,
            access,
            tls,
            server: file.limits.server(),
            bodies: file.limits.bodies(),
            tokenizers,
            buffer: BufferOptions {
                limits: file.limits.trajectories(file.text.lone_surrogates),
                waiters_max: file.limits.waiters_max(),
                waiters_per_caller_max: file.limits.waiters_per_caller_max(),
                waiter_poll_interval: file.limits.waiter_poll_interval(),
                auto_create: file.auto_create,
                policy_defaults,
                quotas: Arc::new(Quotas { policies_max: file.limits.policies_max(), of_teams }),
                sessions: file.sessions.limits(),
            },
            agents,
            facades,
            policies,
        };
        Ok((config, violations))
    }
}

/// The listener of agents. It needs an inference engine, and engines need it.
fn agents(file: &File, upstreams: Option<toml::Value>, violations: &mut Vec<Violation>) -> Option<AgentsConfig> {
    let is_named = upstreams.as_ref().is_some_and(|value| value.as_array().is_none_or(|tables| !tables.is_empty()));
    let mut upstreams = upstreams::read(upstreams, violations);
    match (&file.sessions.listen, is_named) {
        (None, false) => None,
        (Some(_), false) => {
            let detail = "is required with `sessions.listen`: write at least one [[upstream]]".to_owned();
            violations.push(Violation { pointer: "/upstream".to_owned(), detail });
            None
        }
        (None, true) => {
            let detail = "is required with [[upstream]]: an address for agents, such as 127.0.0.1:8081".to_owned();
            violations.push(Violation { pointer: "/sessions/listen".to_owned(), detail });
            None
        }
        (Some(listen), true) => {
            let bodies = file.limits.bodies();
            file.sessions.check_budget(bodies.body_bytes_max, violations);
            let answers = file.sessions.answers();
            for upstream in &mut upstreams {
                upstream.options.answers = answers.clone();
            }
            Some(AgentsConfig {
                listen: listen.clone(),
                public_url: file.sessions.public_url(),
                options: file.sessions.calls(bodies.body_bytes_max, bodies.read_timeout),
                upstreams,
            })
        }
    }
}

/// Checks that the rules of the file name teachers of the file. Rules of the database are checked when sessions are opened.
fn check_teachers(
    agents: Option<&AgentsConfig>,
    defaults: &Rules,
    policies: &[(PolicyName, Arc<Rules>)],
    violations: &mut Vec<Violation>,
) {
    let has = |teacher: &str| {
        let mut upstreams = agents.iter().flat_map(|agents| &agents.upstreams);
        upstreams.any(|upstream| upstream.options.name == teacher)
    };
    if let Some(teacher) = defaults.sessions.teacher.as_deref().filter(|teacher| !has(teacher)) {
        let detail = format!("no [[upstream]] has the name `{teacher}`");
        violations.push(Violation { pointer: "/policy_defaults/sessions/teacher".to_owned(), detail });
    }
    for (name, rules) in policies {
        if let Some(teacher) = rules.sessions.teacher.as_deref().filter(|teacher| !has(teacher)) {
            let detail = format!("policy `{name}` has the teacher `{teacher}`, but no [[upstream]] has this name");
            violations.push(Violation { pointer: "/policy".to_owned(), detail });
        }
    }
}

/// Replaces the error of a renamed setting with its new name.
fn explain_renamed(violations: &mut [Violation]) {
    for violation in violations {
        if let Some((_, new)) = RENAMED.iter().find(|(old, _)| *old == violation.pointer) {
            violation.detail = format!("this setting was renamed: write `{new}`");
        }
    }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.display().to_string(), source })
}

/// Checks the form of an address to listen on. Only binding shows whether the machine has that address.
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
        .map(|(key, _)| Violation {
            pointer: format!("/tls/{key}"),
            detail: "is required and must be a path".to_owned(),
        })
        .collect();
    violations.extend(missing);
    Some(TlsFiles { certificate: table.certificate?, key: table.key?, client_ca: table.client_ca })
}

/// Whether an address can only be reached from this machine.
#[must_use]
pub fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Validates the host names and converts them to lower case, because requests are compared with them in lower case.
fn access(mut access: AccessConfig, violations: &mut Vec<Violation>) -> AccessConfig {
    for (index, host) in access.hosts.iter_mut().enumerate() {
        host.make_ascii_lowercase();
        let authority = host.parse::<Authority>().ok();
        if !authority.is_some_and(|authority| authority.host() == host && !host.starts_with('[')) {
            let pointer = format!("/access/hosts/{index}");
            violations.push(Violation {
                pointer,
                detail: format!("`{host}` is not a host name; write it without a scheme or a port"),
            });
        }
    }
    access
}

/// The policies of the array `[[policy]]`.
fn policies_of(sent: Option<toml::Value>, violations: &mut Vec<Violation>) -> Vec<(PolicyName, Arc<Rules>)> {
    let mut names = BTreeSet::new();
    let tables = collect::tables("policy", sent, violations);
    tables.into_iter().filter_map(|(at, table)| policy(&at, table, &mut names, violations)).collect()
}

fn policy(
    at: &str,
    mut table: toml::Table,
    names: &mut BTreeSet<PolicyName>,
    violations: &mut Vec<Violation>,
) -> Option<(PolicyName, Arc<Rules>)> {
    let name = match table.remove("name") {
        Some(toml::Value::String(name)) => match PolicyName::parse(&name) {
            Ok(name) if names.insert(name.clone()) => Ok(name),
            Ok(name) => Err(format!("the policy `{name}` appears twice")),
            Err(error) => Err(error.to_string()),
        },
        _ => Err("is required and must be text".to_owned()),
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
            // If any value could not be read, rules that depend on other rules are not reported, because the error may
            // only be a consequence.
            let is_judged = |found: &Violation| is_complete || !RELATED_RULES.contains(&found.pointer.as_str());
            let found = found.into_iter().filter(is_judged);
            violations.extend(found.map(|v| Violation { pointer: format!("{at}{}", v.pointer), detail: v.detail }));
            None
        }
    }
}
