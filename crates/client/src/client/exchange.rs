//! One attempt: sends a request and returns the answer or a [`Failure`].

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{ACCEPT, CONTENT_TYPE, DATE, HeaderMap, RETRY_AFTER, TRANSFER_ENCODING},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    error::ClientError,
    retry::{Effect, Failure, Repeat},
};
use crate::wire::{PROBLEM_JSON, Problem};

const JSON: &str = "application/json";
pub(super) const NDJSON: &str = "application/x-ndjson";

/// Number of characters of an unexpected body that the error quotes: enough to see which server sent it.
const EXCERPT_CHARS: usize = 256;

/// Problem types of those 503 answers that are decided before anything is stored. After any other 503, such as
/// `store-unavailable`, the outcome is unknown.
const NOT_BEGUN: [&str; 3] = ["overloaded", "too-many-waiters", "stopping"];

/// A request that can be sent any number of times.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) repeat: Repeat,
    method: Method,
    url: Url,
    accept: &'static str,
    body: Option<(&'static str, Bytes)>,
}

impl Call {
    pub(super) fn new(method: Method, url: Url, repeat: Repeat) -> Self {
        Self { repeat, method, url, accept: JSON, body: None }
    }

    pub(super) fn accept(self, accept: &'static str) -> Self {
        Self { accept, ..self }
    }

    pub(super) fn json(self, body: &(impl Serialize + ?Sized)) -> Result<Self, ClientError> {
        let text = serde_json::to_vec(body).map_err(ClientError::Encode)?;
        Ok(Self { body: Some((JSON, text.into())), ..self })
    }

    pub(super) fn bytes(self, media: &'static str, bytes: Bytes) -> Self {
        Self { body: Some((media, bytes)), ..self }
    }

    /// Returns the bytes that answer the call.
    pub(super) async fn content(&self, http: &reqwest::Client) -> Result<Bytes, Failure> {
        Ok(self.stream(http).await?.bytes().await?)
    }

    pub(super) fn ndjson(self, items: &[impl Serialize]) -> Result<Self, ClientError> {
        let mut text = Vec::new();
        for item in items {
            let start = text.len();
            serde_json::to_writer(&mut text, item).map_err(ClientError::Encode)?;
            // JSON escapes line breaks inside strings, so any line break that is left stands between the tokens of a
            // raw value.
            for byte in &mut text[start..] {
                if matches!(byte, b'\n' | b'\r') {
                    *byte = b' ';
                }
            }
            text.push(b'\n');
        }
        Ok(Self { body: Some((NDJSON, text.into())), ..self })
    }

    /// Returns the JSON value that answers the call.
    pub(super) async fn value<T: DeserializeOwned>(&self, http: &reqwest::Client) -> Result<T, Failure> {
        let response = self.send(http).await?;
        parse(&response.bytes().await?)
    }

    /// Returns the JSON value that answers the call, or `None` if the status is 204.
    pub(super) async fn optional_value<T: DeserializeOwned>(
        &self,
        http: &reqwest::Client,
    ) -> Result<Option<T>, Failure> {
        let response = self.send(http).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        parse(&response.bytes().await?).map(Some)
    }

    /// Returns all JSON values that answer the call, one per line. If the stream ends early, the result is an error.
    pub(super) async fn rows<T: DeserializeOwned>(&self, http: &reqwest::Client) -> Result<Vec<T>, Failure> {
        let mut response = self.stream(http).await?;
        let mut lines = Lines::new();
        while let Some(chunk) = response.chunk().await? {
            lines.push(&chunk)?;
        }
        lines.finish()
    }

    /// Returns the head of an answer whose body is still to be read. The end of the body is recognisable.
    pub(super) async fn stream(&self, http: &reqwest::Client) -> Result<Response, Failure> {
        let response = self.send(http).await?;
        // If the end of the body is marked only by the end of the connection, a broken connection looks like a complete
        // body.
        if response.content_length().is_none() && !response.headers().contains_key(TRANSFER_ENCODING) {
            return Err(Failure::new(ClientError::Undelimited, Effect::Final));
        }
        Ok(response)
    }

    async fn send(&self, http: &reqwest::Client) -> Result<Response, Failure> {
        let mut request = http.request(self.method.clone(), self.url.clone()).header(ACCEPT, self.accept);
        if let Some((media, bytes)) = &self.body {
            request = request.header(CONTENT_TYPE, *media).body(bytes.clone());
        }
        let response = request.send().await?;
        if response.status().is_success() { Ok(response) } else { Err(failure(response).await) }
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(bytes).map_err(|source| {
        let line = source.line();
        Failure::new(ClientError::Malformed { line, source }, Effect::Final)
    })
}

/// Reads the error from an answer that is not a success.
async fn failure(response: Response) -> Failure {
    let status = response.status();
    let headers = response.headers().clone();
    // If the body does not arrive, the status alone describes the failure.
    let body = response.bytes().await.unwrap_or_default();
    let problem = is_problem(&headers).then(|| serde_json::from_slice::<Problem>(&body).ok()).flatten();
    let effect = effect(status, problem.as_ref());
    let retry_after = retry_after(status, &headers);
    let error = match problem {
        Some(problem) => ClientError::Refused(Box::new(problem)),
        None => ClientError::Unexpected {
            status: status.as_u16(),
            body: String::from_utf8_lossy(&body).chars().take(EXCERPT_CHARS).collect(),
        },
    };
    Failure { error, effect, retry_after }
}

fn effect(status: StatusCode, problem: Option<&Problem>) -> Effect {
    match status {
        // With 408 the body did not arrive in time, and nothing was done with its beginning.
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Effect::NotBegun,
        StatusCode::SERVICE_UNAVAILABLE => match problem {
            Some(problem) if NOT_BEGUN.contains(&problem.kind.as_str()) => Effect::NotBegun,
            _ => Effect::Unknown,
        },
        StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => Effect::Unknown,
        _ => Effect::Final,
    }
}

fn is_problem(headers: &HeaderMap) -> bool {
    let media = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    media.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(PROBLEM_JSON)
}

/// Returns the time to wait that the service asks for, if its status may ask for one.
fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    if !matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        return None;
    }
    let asked = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = asked.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = httpdate::parse_http_date(asked).ok()?;
    // The date in `Retry-After` was set by the service's clock, so it is compared with the answer's `Date` header if
    // there is one.
    let date = headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
    Some(until.duration_since(date.unwrap_or_else(SystemTime::now)).unwrap_or_default())
}

/// Parses one value per line while the bytes arrive.
struct Lines<T> {
    values: Vec<T>,
    partial: Vec<u8>,
}

impl<T: DeserializeOwned> Lines<T> {
    fn new() -> Self {
        Self { values: Vec::new(), partial: Vec::new() }
    }

    fn push(&mut self, mut chunk: &[u8]) -> Result<(), Failure> {
        while let Some(end) = chunk.iter().position(|&byte| byte == b'\n') {
            self.partial.extend_from_slice(&chunk[..end]);
            let value = serde_json::from_slice(&self.partial).map_err(|source| {
                let line = self.values.len() + 1;
                Failure::new(ClientError::Malformed { line, source }, Effect::Final)
            })?;
            self.values.push(value);
            self.partial.clear();
            chunk = &chunk[end + 1..];
        }
        self.partial.extend_from_slice(chunk);
        Ok(())
    }

    fn finish(self) -> Result<Vec<T>, Failure> {
        if self.partial.is_empty() {
            return Ok(self.values);
        }
        Err(Failure::new(ClientError::Truncated { lines: self.values.len() }, Effect::Unknown))
    }
}
