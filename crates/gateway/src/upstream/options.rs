//! The configuration of an upstream.

use std::{collections::BTreeMap, time::Duration};

use forebay_bounds::budget::Budget;
use forebay_client::ClientOptions;
use reqwest::Url;

use super::{error::UpstreamError, kind::EngineKind};

/// The largest answer has a million tokens, for each of which an engine writes about 200 bytes.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// The parsers of an SGLang server, by the names with which it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsers {
    /// The value of `--tool-call-parser`.
    pub tool_call: Option<String>,
    /// The value of `--reasoning-parser`.
    pub reasoning: Option<String>,
}

/// What becomes of special tokens in the texts of agents, in the mode `exact`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialTokensInText {
    /// They are control tokens, as engines take them.
    #[default]
    Allow,
    /// They are text.
    Escape,
    /// The call is refused, unless they are in messages of the assistant, where they are text: a model may have written
    /// them.
    Refuse,
}

/// A credential of an engine. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a credential.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// Options of an upstream. [`UpstreamOptions::new`] fills in everything but the first three.
#[derive(Clone, Debug)]
pub struct UpstreamOptions {
    /// The name in logs and errors.
    pub name: String,
    /// What speaks there.
    pub kind: EngineKind,
    /// The workers, with or without `/v1` at the end. A router often removes token ids from answers.
    pub urls: Vec<Url>,
    /// Sent as a bearer token. The agent's own key is never sent.
    pub api_key: Option<Secret>,
    /// Which certificates are trusted, and the client's own.
    pub tls: ClientOptions,
    /// Version labels that are not decimal numbers, with the versions that they stand for.
    pub version_labels: BTreeMap<String, i64>,
    /// The size of the vocabulary, if it is known. Ids of an answer must be below it.
    pub vocabulary: Option<u32>,
    /// The size of the context, for the mode `exact`. It bounds the answers of calls without another bound.
    pub context_tokens: Option<u32>,
    /// What parses an answer that SGLang aborted and then continued, or that `/generate` gave. If absent, an aborted
    /// call is repeated from its beginning, and `/generate` is not used. vLLM parses all answers by itself.
    pub parsers: Option<Parsers>,
    /// Fields of agents that are passed on besides those that are known of this kind of engine, by their names in requests
    /// and messages. [`check_pass`](super::check_pass) knows which cannot be.
    pub pass: Vec<String>,
    /// How long a connection may take to open.
    pub connect_timeout: Duration,
    /// How long a connection may be silent. An engine sends nothing before an answer is complete, so this is also the
    /// longest time that one answer may take.
    pub idle_timeout: Duration,
    /// The largest answer that is read.
    pub answer_bytes_max: usize,
    /// The bytes of the answers that are being read and parsed. Several upstreams can share it.
    pub answers: Budget,
    /// How often a call is repeated that the engine aborts.
    pub aborts_max: u32,
    /// How long to wait before such a repeat, because a paused engine may abort every call at once.
    pub repeat_delay: Duration,
}

impl UpstreamOptions {
    /// Options with the defaults: connections open within 10 s, answers within an hour and 256 MiB, and 30 repeats of
    /// an aborted call, one per second.
    ///
    /// All answers of the upstream together have the budget of one that is as large as possible.
    pub fn new<I, S>(name: impl Into<String>, kind: EngineKind, urls: I) -> Result<Self, UpstreamError>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<str>,
    {
        let name = name.into();
        let bad = |why: String| UpstreamError::Options { why: format!("upstream {name:?}: {why}") };
        let mut parsed = Vec::new();
        for text in urls {
            let text = text.as_ref();
            let url: Url = text.parse().map_err(|error| bad(format!("{text:?} is not a URL: {error}")))?;
            if !matches!(url.scheme(), "http" | "https") {
                return Err(bad(format!("the scheme of {text:?} must be http or https")));
            }
            if !url.username().is_empty() || url.password().is_some() {
                return Err(bad("a URL must not contain a password, because URLs are printed in logs".to_owned()));
            }
            if url.query().is_some() || url.fragment().is_some() {
                return Err(bad(format!("{text:?} must end with its path")));
            }
            parsed.push(url);
        }
        if parsed.is_empty() {
            return Err(bad("needs at least one URL".to_owned()));
        }
        Ok(Self {
            name,
            kind,
            urls: parsed,
            api_key: None,
            tls: ClientOptions::default(),
            version_labels: BTreeMap::new(),
            vocabulary: None,
            context_tokens: None,
            parsers: None,
            pass: Vec::new(),
            connect_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_hours(1),
            answer_bytes_max: ANSWER_BYTES_MAX,
            answers: Budget::new(ANSWER_BYTES_MAX),
            aborts_max: 30,
            repeat_delay: Duration::from_secs(1),
        })
    }
}
