//! The async client: one method per call of the API.
//!
//! What all calls share is in the submodules: [`exchange`] makes one attempt, [`retry`] decides whether to make
//! another, and [`error`] describes the failure if no attempt succeeded.

mod error;
mod exchange;
mod export;
mod history;
mod options;
mod pinned;
mod retry;
mod scores;
#[cfg(test)]
pub(crate) mod stub;
#[cfg(test)]
mod tests;
mod why;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use reqwest::{
    Method, Url,
    header::{AUTHORIZATION, HeaderMap, HeaderValue},
    redirect,
};
use serde::{Serialize, de::DeserializeOwned};

use self::{
    exchange::{Call, NDJSON},
    retry::Repeat,
};
use crate::wire::{
    ARROW_STREAM, AbortRequest, AckRequest, Admission, AdmissionRequest, BatchDescriptor, BatchPage, BatchRequest,
    BulkLine, CheckpointRequest, CheckpointResponse, CloseRequest, DiscardRequest, ExtendRequest, FilterNames,
    FinishRequest, GroupInfo, GroupPage, KeyCreated, KeyInfo, KeyPage, KeyRequest, NackRequest, PolicyList,
    PolicyRules, PolicyStatus, Receipt, ResetRequest, ResetResponse, ResumeRequest, ResumeResponse, Sample,
    SessionEnded, SessionFinish, SessionInfo, SessionOpened, SessionPage, SessionRequest, SessionResume, SessionTurns,
    Stats, Trajectory, TrajectoryContent, TrajectoryPage, TrajectoryStory, TryRequest, TryResult, Upload,
    VersionRequest, WhoAmI,
};

pub use error::{ClientError, TransportError};
pub use export::Export;
pub use options::{ClientOptions, SILENCE_TIMEOUT, install_tls_provider};
pub use pinned::is_named_authority;
pub use retry::RetryPolicy;

/// Time allowed for opening a connection: long enough to survive a few lost packets, short enough to try another
/// replica soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Problem type of a policy that does not exist.
const UNKNOWN_POLICY: &str = "unknown-policy";

/// Problem type of a rollout, group or batch that does not exist.
const NOT_FOUND: &str = "not-found";

type Result<T, E = ClientError> = std::result::Result<T, E>;

/// A client of one Forebay service, for agents and trainers.
///
/// A clone is cheap and shares the connections. Dropping the future of a call closes its connection, and the caller
/// then does not know whether the service has processed the request. Proxies are taken from the environment
/// (`HTTP_PROXY`, `NO_PROXY`).
///
/// A call is repeated according to its [`RetryPolicy`], and only where that is safe. Every call is repeated if the
/// service certainly did not begin it: the connection could not be opened, or the answer was 429 or a 503 that says so.
/// If the outcome is unknown (the connection broke, or the answer was 502, 503 or 504), only the calls that the service
/// recognises as repeats are repeated.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: Arc<Url>,
    retry: RetryPolicy,
}

impl Client {
    /// Creates a client of the service at `base_url`, e.g. `http://127.0.0.1:8080`, with the default retry policy and
    /// without a key.
    ///
    /// The URL may have a path; the API's paths are appended to it. The scheme is `http` or `https`.
    pub fn new(base_url: &str) -> Result<Self> {
        Self::with_options(base_url, &ClientOptions::default())
    }

    /// Creates a client with a key, with its own certificates, or with both.
    pub fn with_options(base_url: &str, options: &ClientOptions) -> Result<Self> {
        let bad_url = |why: String| ClientError::BaseUrl { url: base_url.to_owned(), why };
        let base: Url = base_url.parse().map_err(|error| bad_url(format!("{error}")))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(bad_url("the scheme must be http or https".to_owned()));
        }
        if base.query().is_some() || base.fragment().is_some() {
            return Err(bad_url("it must end with the path".to_owned()));
        }
        let mut headers = HeaderMap::new();
        if let Some(key) = &options.key {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.reveal())).map_err(|_| ClientError::Key)?;
            // Neither reqwest nor its logs show the value of a sensitive header.
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let http = reqwest::Client::builder()
            .user_agent(concat!("forebay-client/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .tls_backend_preconfigured(options.tls(base.scheme() == "https")?)
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(options.silence_timeout)
            // No route of the service redirects, and following a redirect would turn a POST into a GET.
            .redirect(redirect::Policy::none())
            .build()
            .map_err(|error| ClientError::Transport(error.into()))?;
        Ok(Self { http, base: Arc::new(base), retry: RetryPolicy::default() })
    }

    /// Returns the same client with another retry policy.
    #[must_use]
    pub fn with_retry(self, retry: RetryPolicy) -> Self {
        Self { retry, ..self }
    }
}

/// Calls for agents: post trajectories and look up what happened to them.
impl Client {
    /// Reserves room for rollouts that are about to start. The service may grant any number from zero to the number
    /// requested.
    ///
    /// A repeat would reserve more room, which would expire unused. So the call is repeated only if the service
    /// certainly did not begin it.
    pub async fn admit(&self, policy: &str, rollouts: u32) -> Result<Admission> {
        let request = AdmissionRequest { policy: Some(policy.to_owned()), rollouts, ..AdmissionRequest::default() };
        self.reserve(&request).await
    }

    /// Like [`admit`](Self::admit), with the group and the environment of the rollouts.
    pub async fn reserve(&self, request: &AdmissionRequest) -> Result<Admission> {
        self.send(Method::POST, &["admissions"], request, Repeat::UnlessBegun).await
    }

    /// Posts one trajectory. `Ok` means that it is stored durably.
    ///
    /// Without a `rollout_id`, a repeat would store another rollout. So the call is then repeated only if the service
    /// certainly did not begin it. The two calls below follow the same rule if any of their trajectories has no
    /// `rollout_id`.
    pub async fn post(&self, trajectory: &Trajectory) -> Result<Receipt> {
        let repeat = repeat_of_post(std::slice::from_ref(trajectory));
        self.send(Method::POST, &["trajectories"], trajectory, repeat).await
    }

    /// Posts several trajectories in one commit: either all are stored or none. Returns one receipt for each, in the
    /// same order.
    pub async fn post_bundle(&self, trajectories: &[Trajectory]) -> Result<Vec<Receipt>> {
        let repeat = repeat_of_post(trajectories);
        let receipts: Vec<Receipt> = self.send(Method::POST, &["trajectories"], trajectories, repeat).await?;
        answered_each(receipts, trajectories)
    }

    /// Posts several trajectories independently of each other. Returns one line for each, in the same order.
    ///
    /// Only the request as a whole is repeated; the caller has to repeat a line that was refused with 429 or 503. Line
    /// breaks between the tokens of `messages` and `metadata` are sent as spaces, because each line of the body is one
    /// trajectory.
    pub async fn post_bulk(&self, trajectories: &[Trajectory]) -> Result<Vec<BulkLine>> {
        let url = self.url(&["trajectories"], &[]);
        let call = Call::new(Method::POST, url, repeat_of_post(trajectories)).ndjson(trajectories)?.accept(NDJSON);
        let lines = self.retry.run(call.repeat, || call.rows(&self.http)).await?;
        answered_each(lines, trajectories)
    }

    /// Stores an image, or another medium, once for all rollouts whose messages name it by the `url` of the answer.
    pub async fn upload(&self, bytes: Bytes, media_type: &'static str) -> Result<Upload> {
        let url = self.url(&["media"], &[]);
        let call = Call::new(Method::POST, url, Repeat::Always).bytes(media_type, bytes);
        self.retry.run(call.repeat, || call.value(&self.http)).await
    }

    /// Does what [`upload`](Self::upload) does, for those who know the BLAKE3 digest of the bytes.
    pub async fn put_media(&self, digest: &str, bytes: Bytes, media_type: &'static str) -> Result<Upload> {
        let url = self.url(&["media", digest], &[]);
        let call = Call::new(Method::PUT, url, Repeat::Always).bytes(media_type, bytes);
        self.retry.run(call.repeat, || call.value(&self.http)).await
    }

    /// Returns the bytes of an upload, or `None` if it is not known.
    pub async fn media(&self, digest: &str) -> Result<Option<Bytes>> {
        let url = self.url(&["media", digest], &[]);
        let call = Call::new(Method::GET, url, Repeat::Always).accept("*/*");
        absent_when(NOT_FOUND, self.retry.run(call.repeat, || call.content(&self.http)).await)
    }

    /// Returns the story of a rollout in the current run of its policy, or `None` if the rollout is not known.
    pub async fn story(&self, policy: &str, rollout_id: &str) -> Result<Option<TrajectoryStory>> {
        let query = [("policy", policy), ("rollout_id", rollout_id)];
        absent_when(NOT_FOUND, self.get(&["trajectories"], &query).await)
    }

    /// Returns a part of what a rollout consists of, or `None` if the rollout is not known. The other parameters are those of
    /// `GET /trajectories/content`.
    pub async fn content(
        &self,
        policy: &str,
        rollout_id: &str,
        query: &[(&str, &str)],
    ) -> Result<Option<TrajectoryContent>> {
        let query = [&[("policy", policy), ("rollout_id", rollout_id)], query].concat();
        absent_when(NOT_FOUND, self.get(&["trajectories", "content"], &query).await)
    }

    /// Returns a page of stories in the order in which the rollouts arrived, or with `order=newest` the newest first.
    ///
    /// `query` filters the page by `group_id`, `verdict`, `reason`, `state`, `environment` or `step`; `after` and `limit`
    /// select the page. A filtered page may be empty; the last page is the one without `next`.
    pub async fn stories(&self, policy: &str, query: &[(&str, &str)]) -> Result<TrajectoryPage> {
        self.get(&["trajectories"], &of_policy(policy, query)).await
    }

    /// Returns a page of groups in the order in which they were opened, or with `order=newest` the newest first.
    ///
    /// `query` filters the page by `group_id`, `batch_id`, `state`, `reason` or `environment`; `after` and `limit` select the page. A filtered page may be
    /// empty; the last page is the one without `next`.
    pub async fn groups(&self, policy: &str, query: &[(&str, &str)]) -> Result<GroupPage> {
        self.get(&["groups"], &of_policy(policy, query)).await
    }

    /// Decides an open group now, as if it had timed out. A repeat is refused with `group-decided`.
    pub async fn close_group(&self, policy: &str, group_id: &str) -> Result<GroupInfo> {
        let request = CloseRequest { policy: Some(policy.to_owned()), group_id: group_id.to_owned() };
        self.send(Method::POST, &["groups", "close"], &request, Repeat::UnlessBegun).await
    }

    /// Discards a group that is open, ready or quarantined. A repeat is refused with `group-decided`.
    pub async fn discard_group(&self, policy: &str, group_id: &str, reason: &str) -> Result<GroupInfo> {
        let request = DiscardRequest {
            policy: Some(policy.to_owned()),
            group_id: group_id.to_owned(),
            reason: reason.to_owned(),
        };
        self.send(Method::POST, &["groups", "discard"], &request, Repeat::UnlessBegun).await
    }
}

/// Calls for producers whose agents' calls the service records.
impl Client {
    /// Opens a session. Without a `rollout_id`, a repeat would open another session, so the call is then repeated only if
    /// the service certainly did not begin it.
    pub async fn open_session(&self, request: &SessionRequest) -> Result<SessionOpened> {
        let repeat = if request.rollout_id.is_some() { Repeat::Always } else { Repeat::UnlessBegun };
        self.send(Method::POST, &["sessions"], request, repeat).await
    }

    /// Begins another attempt of a session, whose agent died. With an `attempt` in the request, only the attempt that
    /// follows it. If the answer is lost, it is not repeated: a repeat would begin
    /// one attempt more.
    pub async fn resume_session(&self, session_id: &str, request: &SessionResume) -> Result<SessionOpened> {
        self.send(Method::POST, &["sessions", session_id, "resume"], request, Repeat::UnlessBegun).await
    }

    /// Finishes a session: its rollouts are ingested with the reward.
    pub async fn finish_session(&self, session_id: &str, request: &FinishRequest) -> Result<SessionEnded> {
        self.send(Method::POST, &["sessions", session_id, "finish"], request, Repeat::Always).await
    }

    /// Finishes several sessions, all or none.
    pub async fn finish_sessions(&self, requests: &[SessionFinish]) -> Result<Vec<SessionEnded>> {
        self.send(Method::POST, &["sessions", "finish"], requests, Repeat::Always).await
    }

    /// Ends a session without a reward.
    pub async fn abort_session(&self, session_id: &str, request: &AbortRequest) -> Result<SessionEnded> {
        self.send(Method::POST, &["sessions", session_id, "abort"], request, Repeat::Always).await
    }

    /// Returns a session, or `None` if it is not known.
    pub async fn session(&self, session_id: &str) -> Result<Option<SessionInfo>> {
        absent_when(NOT_FOUND, self.get(&["sessions", session_id], &[]).await)
    }

    /// Returns a page of sessions in the order in which they were opened, or with `order=newest` the newest first.
    ///
    /// `query` filters the page by `rollout_id` or `state`; `after` and `limit` select the page. A filtered page may be empty; the last
    /// page is the one without `next`.
    pub async fn sessions(&self, policy: &str, query: &[(&str, &str)]) -> Result<SessionPage> {
        self.get(&["sessions"], &of_policy(policy, query)).await
    }

    /// Returns the recorded calls of a session.
    pub async fn session_turns(&self, session_id: &str) -> Result<SessionTurns> {
        self.get(&["sessions", session_id, "turns"], &[]).await
    }
}

/// Calls for trainers: lease and ack batches, and record the lineage of the weights.
impl Client {
    /// Leases the next batch. Returns `None` if no batch became ready within `wait_ms`.
    ///
    /// Without a `request_id`, a repeat would lease another batch. So the call is then repeated only if the service
    /// certainly did not begin it.
    pub async fn lease(&self, request: &BatchRequest) -> Result<Option<BatchDescriptor>> {
        let repeat = if request.request_id.is_some() { Repeat::Always } else { Repeat::UnlessBegun };
        let call = Call::new(Method::POST, self.url(&["batches"], &[]), repeat).json(request)?;
        self.optional(&call).await
    }

    /// Returns one batch and its state, without its lease, or `None` if the batch is not known.
    pub async fn batch(&self, batch_id: &str) -> Result<Option<BatchDescriptor>> {
        absent_when(NOT_FOUND, self.get(&["batches", batch_id], &[]).await)
    }

    /// Returns a page of batches in the order in which they were cut, or with `order=newest` the newest first.
    ///
    /// `query` filters the page by `state`; `after` and `limit` select the page. A filtered page may be empty; the last
    /// page is the one without `next`.
    pub async fn batches(&self, policy: &str, query: &[(&str, &str)]) -> Result<BatchPage> {
        self.get(&["batches"], &of_policy(policy, query)).await
    }

    /// Returns all rows of a batch, in order. If the stream ends early, the result is an error.
    ///
    /// `query` may have `messages=false`, which leaves the messages out.
    pub async fn samples(&self, batch_id: &str, query: &[(&str, &str)]) -> Result<Vec<Sample>> {
        self.rows_of(batch_id, query).await
    }

    /// Returns all rows of shard `shard` of `shards`, in order. If the stream ends early, the result is an error.
    ///
    /// Each shard is a deterministic set of rows, which have about as many tokens as those of any other shard; together
    /// the shards are the batch. A shard may be empty.
    pub async fn samples_of_shard(&self, batch_id: &str, shard: u32, shards: u32) -> Result<Vec<Sample>> {
        let query = [("shard", shard.to_string()), ("shards", shards.to_string())];
        self.rows_of(batch_id, &query.each_ref().map(|(name, value)| (*name, value.as_str()))).await
    }

    /// Extends the lease (a heartbeat): it then expires `ttl_s` from now. [`Heartbeat`](crate::Heartbeat) calls this in
    /// the background.
    pub async fn extend(&self, batch_id: &str, request: &ExtendRequest) -> Result<BatchDescriptor> {
        self.send(Method::POST, &["batches", batch_id, "extend"], request, Repeat::Always).await
    }

    /// Reports that an optimizer step consumed the batch. The trainer may change the weights only after `Ok`.
    pub async fn ack(&self, batch_id: &str, request: &AckRequest) -> Result<BatchDescriptor> {
        self.send(Method::POST, &["batches", batch_id, "ack"], request, Repeat::Always).await
    }

    /// Gives the batch back; the groups that are named are quarantined. A repeat is refused with `lease-lost`.
    pub async fn nack(&self, batch_id: &str, request: &NackRequest) -> Result<BatchDescriptor> {
        self.send(Method::POST, &["batches", batch_id, "nack"], request, Repeat::UnlessBegun).await
    }

    /// Returns a quarantined batch, or the quarantined groups of a split batch, to delivery. A repeat is refused with
    /// `batch-state`.
    pub async fn readmit(&self, batch_id: &str) -> Result<BatchDescriptor> {
        let url = self.url(&["batches", batch_id, "readmit"], &[]);
        self.one(&Call::new(Method::POST, url, Repeat::UnlessBegun)).await
    }

    /// Reports that the trainer has saved a step durably. Batches acked at or before this step become settled.
    pub async fn checkpoint(&self, policy: &str, request: &CheckpointRequest) -> Result<CheckpointResponse> {
        self.send(Method::POST, &["policies", policy, "checkpoints"], request, Repeat::Always).await
    }

    /// Reports that the trainer starts or restarts from its checkpoint of a step. The trainer uses the epoch in the
    /// answer from then on.
    ///
    /// Each attempt begins a new epoch, so if the request has an `epoch`, a repeat would be superseded by the attempt
    /// before it. Such a call is repeated only if the service certainly did not begin it.
    pub async fn resume(&self, policy: &str, request: &ResumeRequest) -> Result<ResumeResponse> {
        let repeat = if request.epoch.is_none() { Repeat::Always } else { Repeat::UnlessBegun };
        self.send(Method::POST, &["policies", policy, "resume"], request, repeat).await
    }

    /// Starts a new run of the policy under the same name. A repeat would discard everything that arrived in between.
    pub async fn reset(&self, policy: &str, request: &ResetRequest) -> Result<ResetResponse> {
        self.send(Method::POST, &["policies", policy, "reset"], request, Repeat::UnlessBegun).await
    }

    /// Publishes a weight version.
    pub async fn publish(&self, policy: &str, request: &VersionRequest) -> Result<PolicyStatus> {
        self.send(Method::PUT, &["policies", policy, "version"], request, Repeat::Always).await
    }
}

/// Calls for all roles: policies and totals.
impl Client {
    /// Returns a page of policies in the order of their names. In `query`, `after` and `limit` select the page.
    pub async fn policies(&self, query: &[(&str, &str)]) -> Result<PolicyList> {
        self.get(&["policies"], query).await
    }

    /// Returns a policy: its rules, its version and the contents of its buffer. Returns `None` if the policy is not
    /// known.
    pub async fn policy(&self, policy: &str) -> Result<Option<PolicyStatus>> {
        absent_when(UNKNOWN_POLICY, self.get(&["policies", policy], &[]).await)
    }

    /// Returns the tokenizer file of a policy, or `None` if none is configured.
    pub async fn tokenizer(&self, policy: &str) -> Result<Option<Box<serde_json::value::RawValue>>> {
        absent_when(NOT_FOUND, self.get(&["policies", policy, "tokenizer"], &[]).await)
    }

    /// Waits until the policy's version is above `version` or a resume has lowered it, and returns the policy. Returns
    /// `None` if neither happened within `wait_ms`, which is at most 60,000.
    pub async fn wait_version_above(&self, policy: &str, version: i64, wait_ms: u64) -> Result<Option<PolicyStatus>> {
        let (version, wait_ms) = (version.to_string(), wait_ms.to_string());
        let query = [("wait_version_above", version.as_str()), ("wait_ms", wait_ms.as_str())];
        let url = self.url(&["policies", policy], &query);
        self.optional(&Call::new(Method::GET, url, Repeat::Always)).await
    }

    /// Writes a policy's rules, and creates the policy if it does not exist. The new rules replace all rules that the
    /// policy had; [`PolicyRules`] says when each of them takes effect.
    pub async fn put_policy(&self, policy: &str, rules: &PolicyRules) -> Result<PolicyStatus> {
        self.send(Method::PUT, &["policies", policy], rules, Repeat::Always).await
    }

    /// Changes some of a policy's rules by a JSON merge patch (RFC 7396). Settings in the patch change, `null` resets a
    /// setting to its default, and all other settings stay as they are.
    pub async fn patch_policy(&self, policy: &str, patch: &serde_json::Value) -> Result<PolicyStatus> {
        self.send(Method::PATCH, &["policies", policy], patch, Repeat::Always).await
    }

    /// Begins an export of a policy's rollouts as lines. The parameters are those of `GET /exports`.
    pub async fn export(&self, policy: &str, query: &[(&str, &str)]) -> Result<Export> {
        self.export_as(policy, query, NDJSON).await
    }

    /// Begins an export as an Arrow stream, which takes much less time for both sides.
    pub async fn export_arrow(&self, policy: &str, query: &[(&str, &str)]) -> Result<Export> {
        self.export_as(policy, query, ARROW_STREAM).await
    }

    async fn export_as(&self, policy: &str, query: &[(&str, &str)], accept: &'static str) -> Result<Export> {
        let url = self.url(&["exports"], &of_policy(policy, query));
        let call = Call::new(Method::GET, url, Repeat::Always).accept(accept);
        self.retry.run(call.repeat, || call.stream(&self.http)).await.map(Export::new)
    }

    /// Returns the names that filters know.
    pub async fn filter_variables(&self) -> Result<FilterNames> {
        self.get(&["filters", "variables"], &[]).await
    }

    /// Tries filters on the groups of a policy that were decided last. Nothing is changed.
    pub async fn try_filters(&self, policy: &str, request: &TryRequest) -> Result<TryResult> {
        self.send(Method::POST, &["policies", policy, "filters", "try"], request, Repeat::Always).await
    }

    /// Returns what the key of this client may do.
    pub async fn whoami(&self) -> Result<WhoAmI> {
        self.get(&["whoami"], &[]).await
    }

    /// Returns the totals of every policy, and whether they add up.
    pub async fn stats(&self) -> Result<Stats> {
        self.get(&["stats"], &[]).await
    }
}

/// Calls for operators: manage keys.
impl Client {
    /// Creates a key. Only this answer contains the secret. A repeat would create another key.
    pub async fn create_key(&self, request: &KeyRequest) -> Result<KeyCreated> {
        self.send(Method::POST, &["keys"], request, Repeat::UnlessBegun).await
    }

    /// Returns a page of keys in the order in which they were created. In `query`, `after` and `limit` select the page.
    pub async fn keys(&self, query: &[(&str, &str)]) -> Result<KeyPage> {
        self.get(&["keys"], query).await
    }

    /// Revokes a key. Returns `None` if the key is not known.
    pub async fn revoke_key(&self, key_id: &str) -> Result<Option<KeyInfo>> {
        let call = Call::new(Method::DELETE, self.url(&["keys", key_id], &[]), Repeat::Always);
        absent_when(NOT_FOUND, self.one(&call).await)
    }
}

impl Client {
    async fn get<T: DeserializeOwned>(&self, path: &[&str], query: &[(&str, &str)]) -> Result<T> {
        self.one(&Call::new(Method::GET, self.url(path, query), Repeat::Always)).await
    }

    async fn send<B, T>(&self, method: Method, path: &[&str], body: &B, repeat: Repeat) -> Result<T>
    where
        B: Serialize + ?Sized,
        T: DeserializeOwned,
    {
        self.one(&Call::new(method, self.url(path, &[]), repeat).json(body)?).await
    }

    async fn rows_of(&self, batch_id: &str, query: &[(&str, &str)]) -> Result<Vec<Sample>> {
        let url = self.url(&["batches", batch_id, "samples"], query);
        let call = Call::new(Method::GET, url, Repeat::Always).accept(NDJSON);
        self.retry.run(call.repeat, || call.rows(&self.http)).await
    }

    async fn one<T: DeserializeOwned>(&self, call: &Call) -> Result<T> {
        self.retry.run(call.repeat, || call.value(&self.http)).await
    }

    async fn optional<T: DeserializeOwned>(&self, call: &Call) -> Result<Option<T>> {
        self.retry.run(call.repeat, || call.optional_value(&self.http)).await
    }

    fn url(&self, path: &[&str], query: &[(&str, &str)]) -> Url {
        let mut url = Url::clone(&self.base);
        url.path_segments_mut().expect("an http URL has a path").pop_if_empty().extend(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        url
    }
}

/// The service recognises a repeated trajectory only by its `rollout_id`.
fn repeat_of_post(trajectories: &[Trajectory]) -> Repeat {
    let recognised = trajectories.iter().all(|trajectory| trajectory.rollout_id.is_some());
    if recognised { Repeat::Always } else { Repeat::UnlessBegun }
}

fn of_policy<'q>(policy: &'q str, query: &[(&'q str, &'q str)]) -> Vec<(&'q str, &'q str)> {
    std::iter::once(("policy", policy)).chain(query.iter().copied()).collect()
}

fn absent_when<T>(kind: &str, answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Err(error) if error.kind() == Some(kind) => Ok(None),
        answer => answer.map(Some),
    }
}

fn answered_each<T, S>(answers: Vec<T>, sent: &[S]) -> Result<Vec<T>> {
    if answers.len() == sent.len() {
        Ok(answers)
    } else {
        Err(ClientError::Incomplete { answers: answers.len(), expected: sent.len() })
    }
}
