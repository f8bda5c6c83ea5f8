//! Sending a request and reading the answer.
//!
//! There is no timeout of the whole call, because reasoning models are silent for long and then right. A connection
//! that the pool kept through a pause of the engine may be dead. So a call whose connection breaks before the first
//! byte of the answer is sent once more on a fresh connection.

use std::{ops::Deref, time::Duration};

use bytes::{Buf as _, Bytes, BytesMut};
use reqwest::{
    Client, Response, StatusCode, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER},
    redirect,
};

use forebay_bounds::{
    budget::{Budget, Full, Share},
    work,
};

use super::{
    error::UpstreamError,
    kind::EngineKind,
    options::{Secret, UpstreamOptions},
};
use crate::dialect::RETRY_AFTER_S;

/// How long the engine has to confirm that it aborted a call whose agent is gone.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the system asks whether a silent peer still exists.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// How much of an engine's error is read, and how much of it is repeated to the agent.
const ERROR_BYTES_MAX: usize = 64 << 10;
const ERROR_CHARS_MAX: usize = 500;

/// What an answer takes from the budget if it does not announce its length.
const FIRST_BYTES: usize = 16 << 10;

/// What engines write if a prompt does not fit, alone or with the tokens that may be sampled behind it.
const CONTEXT_LENGTH: [&str; 7] = [
    "context length",
    "context_length",
    "maximum model length",
    "longer than the maximum",
    "maximum allowed length",
    "max_completion_tokens is too large",
    "max_model_len",
];

/// The fields that an engine's error names if the bound of sampled tokens is too large.
const BOUNDS: [&str; 2] = ["max_tokens", "max_completion_tokens"];

/// The connections to the workers.
#[derive(Clone, Debug)]
pub(super) struct Transport {
    pooled: Client,
    fresh: Client,
    kind: EngineKind,
    /// Each worker's address without a slash at its end and without `/v1`.
    bases: Vec<String>,
    answer_bytes_max: usize,
    answers: Budget,
    idle_timeout: Duration,
    api_key: Option<Secret>,
}

/// The body of an answer, with its share of the budget.
#[derive(Debug)]
pub(super) struct ReadBody {
    bytes: Vec<u8>,
    _share: Share,
}

impl Deref for ReadBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// One request.
pub(super) struct Post<'a> {
    /// The path, which begins with a slash.
    pub(super) path: &'static str,
    /// The workers to try, at least one.
    pub(super) workers: &'a [usize],
    pub(super) session: &'a str,
    pub(super) rid: &'a str,
    /// About how many bytes the body has.
    pub(super) bytes: usize,
    /// Writes the body with a rid. A request that is sent again gets another rid, because the engine may not have
    /// noticed yet that the first connection broke.
    pub(super) body: &'a (dyn Fn(&str) -> Bytes + Sync),
    pub(super) room: Room,
}

/// What is done where the budget has no room for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// It waits.
    Waits,
    /// The request fails. Whoever holds a part of the budget must not wait for another.
    MayLack,
}

impl Transport {
    pub(super) fn new(options: &UpstreamOptions) -> Result<Self, UpstreamError> {
        let unusable = |why: String| UpstreamError::Options { why: format!("upstream {:?}: {why}", options.name) };
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &options.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {}", key.reveal()));
            let mut value =
                value.map_err(|_| unusable("the key contains characters that no header may have".into()))?;
            // Neither reqwest nor its logs show the value of a sensitive header.
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let encrypted = options.urls.iter().any(|url| url.scheme() == "https");
        let build = |idle_connections: usize| {
            Client::builder()
                .user_agent(concat!("forebay-gateway/", env!("CARGO_PKG_VERSION")))
                .default_headers(headers.clone())
                .tls_backend_preconfigured(options.tls.tls(encrypted).map_err(|error| unusable(error.to_string()))?)
                .connect_timeout(options.connect_timeout)
                .read_timeout(options.idle_timeout)
                .tcp_keepalive(KEEPALIVE)
                .pool_max_idle_per_host(idle_connections)
                // No engine redirects, and following a redirect would turn a POST into a GET.
                .redirect(redirect::Policy::none())
                .build()
                .map_err(|error| unusable(error.to_string()))
        };
        Ok(Self {
            pooled: build(usize::MAX)?,
            fresh: build(0)?,
            kind: options.kind,
            bases: options.urls.iter().map(base).collect(),
            answer_bytes_max: options.answer_bytes_max.min(options.answers.bytes()),
            answers: options.answers.clone(),
            idle_timeout: options.idle_timeout,
            api_key: options.api_key.clone(),
        })
    }

    /// Sends a request to the first worker that can be reached, and returns the body of a successful answer.
    pub(super) async fn post(&self, post: &Post<'_>, reconnects: &mut u32) -> Result<ReadBody, UpstreamError> {
        let (response, mut cancel) = self.open(post, reconnects).await?;
        let body = self.read(response, post.room).await;
        cancel.armed = body.as_ref().is_err_and(leaves_work);
        body
    }

    /// The same for a request whose answer is events.
    pub(super) async fn post_events(&self, post: &Post<'_>, reconnects: &mut u32) -> Result<Events<'_>, UpstreamError> {
        let (response, mut cancel) = self.open(post, reconnects).await?;
        if !response.status().is_success() {
            cancel.armed = false;
            return Err(self.refusal(response.status(), response).await);
        }
        let share = self.answers.wait_for(FIRST_BYTES).await;
        Ok(Events { transport: self, response, unread: BytesMut::new(), searched: 0, share, _cancel: cancel })
    }

    /// Sends a request to the first worker that can be reached, and reads the head of its answer.
    async fn open(&self, post: &Post<'_>, reconnects: &mut u32) -> Result<(Response, CancelOnDrop<'_>), UpstreamError> {
        // SGLang aborts all calls whose id begins with the given one, so the id of a repeat begins differently.
        let again = format!("again-{}", post.rid);
        let (mut client, mut rid, mut place) = (&self.pooled, post.rid, 0);
        for attempt in 0.. {
            let error = match self.send(client, post.workers[place], post, rid).await? {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            // A worker that accepts no connection is gone, so the next one gets the call.
            if error.is_connect() && place + 1 < post.workers.len() {
                place += 1;
            } else if attempt > 0 {
                return Err(self.broken(error));
            }
            tracing::debug!(error = %error.without_url(), "the connection to an engine broke before its answer");
            *reconnects += 1;
            (client, rid) = (&self.fresh, &again);
        }
        unreachable!("the loop ends with an answer, or behind the last worker")
    }

    /// Sends a request once. The inner error means that the connection broke before the first byte of the answer.
    async fn send(
        &self,
        client: &Client,
        place: usize,
        post: &Post<'_>,
        rid: &str,
    ) -> Result<Result<(Response, CancelOnDrop<'_>), reqwest::Error>, UpstreamError> {
        let base = &self.bases[place];
        let sent = work::run(post.bytes, || (post.body)(rid)).await;
        let mut cancel = CancelOnDrop { client: &self.fresh, kind: self.kind, base, rid: rid.to_owned(), armed: true };
        let sent = client
            .post(format!("{base}{}", post.path))
            // SGLang's router and vLLM's router choose the worker by these.
            .header("x-smg-routing-key", post.session)
            .header("x-session-id", post.session)
            .body(sent)
            .send();
        match sent.await {
            Ok(response) => Ok(Ok((response, cancel))),
            Err(error) if error.is_timeout() && !error.is_connect() => Err(self.broken(error)),
            Err(error) => {
                cancel.armed = !error.is_connect();
                Ok(Err(error))
            }
        }
    }

    /// Reads what a worker tells about itself. `None` if it tells nothing, or more than so many bytes.
    pub(super) async fn get(&self, worker: usize, path: &'static str, bytes_max: usize) -> Option<Vec<u8>> {
        let sent = self.pooled.get(format!("{}{path}", self.bases[worker])).send().await;
        let mut response = sent.ok().filter(|response| response.status().is_success())?;
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.ok()? {
            body.extend_from_slice(&piece);
            if body.len() > bytes_max {
                return None;
            }
        }
        Some(body)
    }

    async fn read(&self, mut response: Response, room: Room) -> Result<ReadBody, UpstreamError> {
        let status = response.status();
        if !status.is_success() {
            return Err(self.refusal(status, response).await);
        }
        let too_large = || UpstreamError::TooLarge { bytes_max: self.answer_bytes_max };
        let announced = response.content_length().unwrap_or(0);
        if announced > self.answer_bytes_max as u64 {
            return Err(too_large());
        }
        // Engines announce the length of their answers. Another answer waits for room for its beginning, and gets more as
        // it arrives.
        let first = (announced as usize).max(FIRST_BYTES);
        let mut share = match room {
            Room::Waits => self.answers.wait_for(first).await,
            Room::MayLack => self.answers.take(first).map_err(full)?,
        };
        // A system that gives out no more memory than it has refuses some here, which must not end the process.
        let no_memory = |_| busy("the system has no memory for the engine's answer");
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(announced as usize).map_err(no_memory)?;
        while let Some(piece) = response.chunk().await.map_err(|error| self.broken(error))? {
            if bytes.len() + piece.len() > self.answer_bytes_max {
                return Err(too_large());
            }
            share.cover(bytes.len() + piece.len()).map_err(full)?;
            bytes.try_reserve(piece.len()).map_err(no_memory)?;
            bytes.extend_from_slice(&piece);
        }
        Ok(ReadBody { bytes, _share: share })
    }

    async fn refusal(&self, status: StatusCode, mut response: Response) -> UpstreamError {
        let wait = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let mut body = Vec::new();
        // What cannot be read of an error is not needed.
        while body.len() < ERROR_BYTES_MAX
            && let Ok(Some(piece)) = response.chunk().await
        {
            body.extend_from_slice(&piece);
        }
        let (message, field) = words(&body);
        let lower = message.to_lowercase();
        let is_too_long = CONTEXT_LENGTH.iter().any(|phrase| lower.contains(phrase))
            || field.is_some_and(|field| BOUNDS.contains(&field.as_str()));
        match status.as_u16() {
            400 | 413 | 422 if is_too_long => UpstreamError::ContextLength { message },
            // The words usually quote a part of the key.
            401 => {
                tracing::warn!(message, status = 401, "an engine refused the key of its upstream");
                UpstreamError::Refused {
                    status: 401,
                    message: "the key of the upstream is wrong or missing".to_owned(),
                }
            }
            // Whoever opens sessions sees these, because they may say that the endpoint is disabled.
            403 => {
                let key = self.api_key.as_ref().map(Secret::reveal).filter(|key| !key.is_empty());
                let message = key.map_or_else(|| message.clone(), |key| message.replace(key, "(the key)"));
                UpstreamError::Refused { status: 403, message }
            }
            429 | 503 => UpstreamError::Busy { message, retry_after_s: wait.unwrap_or(RETRY_AFTER_S) },
            // Redirects are not followed: `urls` has to name the place behind them.
            status @ 300..500 => UpstreamError::Refused { status, message },
            status => UpstreamError::Failed { status, message },
        }
    }

    fn broken(&self, error: reqwest::Error) -> UpstreamError {
        if error.is_timeout() && !error.is_connect() {
            return UpstreamError::Silent { seconds: self.idle_timeout.as_secs() };
        }
        let error = error.without_url();
        let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
        let why = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
        UpstreamError::Unreachable { why }
    }
}

fn busy(why: &str) -> UpstreamError {
    UpstreamError::Busy { message: why.to_owned(), retry_after_s: RETRY_AFTER_S }
}

fn full(Full: Full) -> UpstreamError {
    busy("too many bytes of engines' answers are in memory")
}

/// Whether the engine may go on with a call that failed like this. One that has answered or refused has nothing to cancel.
fn leaves_work(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Unreachable { .. } | UpstreamError::Silent { .. } | UpstreamError::TooLarge { .. })
}

/// The events of an answer as they arrive.
pub(super) struct Events<'a> {
    transport: &'a Transport,
    response: Response,
    /// What has arrived of the next lines, and how much of it has no end of a line.
    unread: BytesMut,
    searched: usize,
    share: Share,
    _cancel: CancelOnDrop<'a>,
}

impl Events<'_> {
    /// The data of the next event, or `None` behind the last. `kept` is how many bytes the caller keeps of those before.
    pub(super) async fn next(&mut self, kept: usize) -> Result<Option<BytesMut>, UpstreamError> {
        loop {
            while let Some(end) = self.unread[self.searched..].iter().position(|byte| *byte == b'\n') {
                let mut line = self.unread.split_to(self.searched + end + 1);
                self.searched = 0;
                if line.starts_with(b"data:") {
                    line.advance(b"data:".len());
                    return Ok(Some(line));
                }
            }
            self.searched = self.unread.len();
            let broken = |error| self.transport.broken(error);
            let Some(piece) = self.response.chunk().await.map_err(broken)? else { return Ok(None) };
            let bytes = kept + self.unread.len() + piece.len();
            if bytes > self.transport.answer_bytes_max {
                return Err(UpstreamError::TooLarge { bytes_max: self.transport.answer_bytes_max });
            }
            self.share.cover(bytes).map_err(full)?;
            self.unread.extend_from_slice(&piece);
        }
    }

    /// An error that came as an event.
    pub(super) fn failure(data: &[u8]) -> UpstreamError {
        let (message, _) = words(data);
        UpstreamError::Failed { status: 500, message }
    }
}

/// A worker's address as the beginning of a path.
fn base(url: &Url) -> String {
    let text = url.as_str().trim_end_matches('/');
    text.strip_suffix("/v1").unwrap_or(text).to_owned()
}

/// The words of an engine's error, and the field that it names.
fn words(body: &[u8]) -> (String, Option<String>) {
    let (text, field) = match serde_json::from_slice::<serde_json::Value>(body) {
        Ok(value) => {
            let find =
                |places: &[&str]| places.iter().find_map(|place| Some(value.pointer(place)?.as_str()?.to_owned()));
            let found = find(&["/error/message", "/message", "/detail", "/error"]);
            (found.unwrap_or_else(|| value.to_string()), find(&["/error/param", "/param"]))
        }
        Err(_) => (String::from_utf8_lossy(body).trim().to_owned(), None),
    };
    (text.chars().take(ERROR_CHARS_MAX).collect(), field)
}

/// Tells SGLang to abort a call that was given up. Closing the connection is enough for other engines, and usually for
/// SGLang as well, but a router in between may keep its own connection open.
struct CancelOnDrop<'a> {
    client: &'a Client,
    kind: EngineKind,
    base: &'a str,
    rid: String,
    armed: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if !self.armed || self.kind != EngineKind::Sglang {
            return;
        }
        // Outside of a runtime the process is ending.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let body = serde_json::json!({"rid": self.rid}).to_string();
        let request = self.client.post(format!("{}/abort_request", self.base)).timeout(ABORT_TIMEOUT).body(body);
        runtime.spawn(async move {
            if let Err(error) = request.send().await {
                tracing::debug!(error = %error.without_url(), "an engine did not confirm that it aborted a call");
            }
        });
    }
}
