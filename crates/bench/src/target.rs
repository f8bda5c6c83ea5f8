//! The HTTP client for the service under load.

use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use forebay_client::{Client, ClientOptions, TransportError};
use reqwest::{
    RequestBuilder, Response, StatusCode,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER},
};
use serde_json::Value;

use crate::{protocol::ProtocolName, template::Body};

/// Time without a byte after which a connection counts as broken.
const SILENCE_TIMEOUT: Duration = Duration::from_mins(2);

/// Characters of an unexpected answer that its error quotes: a whole problem document, in most cases.
const EXCERPT_CHARS: usize = 1_000;

/// Number of bytes of an answer that are kept, to see what kind of answer it is.
const BEGINNING_BYTES: usize = 64;

/// The address of the service, and a client for it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) url: String,
    protocol: ProtocolName,
    options: ClientOptions,
    http: reqwest::Client,
}

/// How a post ended.
pub(crate) enum Answer {
    /// The status was 2xx. Contains the body of the answer.
    Accepted(Bytes),
    /// The status was 429 or 503, so the post is repeated later.
    Refused { status: u16, retry_after: Option<Duration> },
    /// The connection ended before the answer, so it is not known whether the body was stored.
    Broken(reqwest::Error),
}

/// An answer that was read completely and not kept.
pub(crate) struct Read {
    pub(crate) bytes: u64,
    /// The first characters of the answer, without white space.
    beginning: String,
}

impl Read {
    pub(crate) fn begins_with(&self, text: &str) -> bool {
        self.beginning.starts_with(text)
    }
}

impl Target {
    pub(crate) fn new(url: &str, protocol: ProtocolName, options: ClientOptions) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        if let Some(key) = &options.key {
            let bearer = format!("Bearer {}", key.reveal());
            let mut value = HeaderValue::from_str(&bearer).ok().context("the key has characters that no key has")?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let http = reqwest::Client::builder()
            .user_agent(concat!("forebay-bench/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .read_timeout(SILENCE_TIMEOUT)
            .tls_backend_preconfigured(options.tls(url.starts_with("https:"))?)
            // No proxy is used, because its speed would be measured instead of the service's.
            .no_proxy();
        let http = http.build().context("no HTTP client can be made")?;
        Ok(Self { url: url.trim_end_matches('/').to_owned(), protocol, options, http })
    }

    /// A client of Forebay's API for the same service.
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::with_options(&self.url, &self.options)?)
    }

    /// Checks that the service can be reached. The error says what to do if it cannot.
    pub(crate) async fn reach(&self, path: &str) -> anyhow::Result<()> {
        let Err(error) = self.http.get(self.at(path)).send().await else { return Ok(()) };
        let error = TransportError::from(error);
        if error.is_connection_refused() {
            bail!("nothing listens at {}: {}", self.url, self.advice());
        }
        if let Some(why) = error.certificate() {
            bail!("{}: {why}", self.url);
        }
        Err(error).with_context(|| format!("{} does not answer", self.url))
    }

    fn advice(&self) -> &'static str {
        match self.protocol {
            ProtocolName::Forebay => "start it with `forebay serve`, or name another service with --url",
            ProtocolName::Slime | ProtocolName::Atropos => "start the server, or name its address with --url",
        }
    }

    /// Posts a body of the load. An error ends the run.
    pub(crate) async fn post(&self, path: &str, body: &Body) -> anyhow::Result<Answer> {
        let request = self.http.post(self.at(path)).header(CONTENT_TYPE, body.media).body(body.bytes.clone());
        let response = match request.send().await {
            Ok(response) => response,
            Err(error) if error.is_builder() => return Err(error).context("the URL cannot be used"),
            Err(error) => return Ok(Answer::Broken(error)),
        };
        let status = response.status();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            return Ok(Answer::Refused { status: status.as_u16(), retry_after: retry_after(&response) });
        }
        if !status.is_success() {
            return Err(unexpected(path, response).await);
        }
        Ok(response.bytes().await.map_or_else(Answer::Broken, Answer::Accepted))
    }

    /// Posts JSON, which the service must accept, and returns the JSON of the answer.
    pub(crate) async fn call(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let response = self.accepted(path, self.http.post(self.at(path)).json(body)).await?;
        response.json().await.with_context(|| format!("the answer to {path} is not JSON"))
    }

    /// Gets a path and reads the answer completely.
    pub(crate) async fn read(&self, path: &str) -> anyhow::Result<Read> {
        self.drain(path, self.http.get(self.at(path))).await
    }

    /// Gets a path with this media type and reads the answer completely.
    pub(crate) async fn read_as(&self, path: &str, media: &str) -> anyhow::Result<Read> {
        self.drain(path, self.http.get(self.at(path)).header(ACCEPT, media)).await
    }

    /// Posts JSON and reads the answer completely.
    pub(crate) async fn read_answer_to(&self, path: &str, body: &Value) -> anyhow::Result<Read> {
        self.drain(path, self.http.post(self.at(path)).json(body)).await
    }

    async fn drain(&self, path: &str, request: RequestBuilder) -> anyhow::Result<Read> {
        let mut response = self.accepted(path, request).await?;
        let (mut bytes, mut beginning) = (0, Vec::new());
        while let Some(chunk) = response.chunk().await.with_context(|| format!("the answer to {path} broke off"))? {
            bytes += chunk.len() as u64;
            let kept = BEGINNING_BYTES.saturating_sub(beginning.len()).min(chunk.len());
            beginning.extend_from_slice(&chunk[..kept]);
        }
        let mut beginning = String::from_utf8_lossy(&beginning).into_owned();
        beginning.retain(|character| !character.is_whitespace());
        Ok(Read { bytes, beginning })
    }

    async fn accepted(&self, path: &str, request: RequestBuilder) -> anyhow::Result<Response> {
        let response = request.send().await.with_context(|| format!("{} does not answer {path}", self.url))?;
        if response.status().is_success() { Ok(response) } else { Err(unexpected(path, response).await) }
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }
}

fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Makes an error that quotes the answer.
async fn unexpected(path: &str, response: Response) -> anyhow::Error {
    let status = response.status();
    let body = response.text().await.unwrap_or_default();
    let excerpt: String = body.chars().take(EXCERPT_CHARS).collect();
    anyhow::anyhow!("{path} was answered {status}: {excerpt}")
}
