//! The async client: one method per call of the API.
//!
//! The rest of its module is what all calls share: [`exchange`] is one attempt, [`retry`] decides whether there is
//! another, [`error`] is what is left when there is none.

mod error;
mod exchange;
mod options;
mod pinned;
mod retry;
#[cfg(test)]
pub(crate) mod stub;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use reqwest::{
    Method, Url,
    header::{AUTHORIZATION, HeaderMap, HeaderValue},
    redirect,
};
use serde::{Serialize, de::DeserializeOwned};

pub use error::{ClientError, TransportError};
pub use options::{ClientOptions, install_tls_provider};
pub use retry::RetryPolicy;

use self::{
    exchange::{Call, NDJSON},
    retry::Repeat,
};
use crate::wire::{
    AckRequest, Admission, AdmissionRequest, BatchDescriptor, BatchPage, BatchRequest, BulkLine, CheckpointRequest,
    CheckpointResponse, CloseRequest, DiscardRequest, ExtendRequest, GroupInfo, GroupPage, KeyCreated, KeyInfo,
    KeyPage, KeyRequest, NackRequest, PolicyList, PolicyRules, PolicyStatus, Receipt, ResetRequest, ResetResponse,
    ResumeRequest, ResumeResponse, Sample, Stats, Trajectory, TrajectoryPage, TrajectoryStory, VersionRequest,
};

/// Time to open a connection: enough for a few lost packets, short enough to reach another replica soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Silence after which a connection counts as broken: twice the longest long poll of the API.
const SILENCE_TIMEOUT: Duration = Duration::from_mins(2);

/// Problem type of a policy that does not exist.
const UNKNOWN_POLICY: &str = "unknown-policy";

/// Problem type of a rollout, group or batch that does not exist.
const NOT_FOUND: &str = "not-found";

type Result<T, E = ClientError> = std::result::Result<T, E>;

/// A client of one Forebay service, for agents and trainers.
///
/// A clone is cheap and shares the connections. Dropping the future of a call hangs up; whether the service has
/// processed it is then not known. Proxies are taken from the environment (`HTTP_PROXY`, `NO_PROXY`).
///
/// A call is repeated as its [`RetryPolicy`] says, and only where that is safe. Any call is repeated when the service
/// certainly did not begin it: no connection, 429, or a 503 that says so. Calls that the service recognises when
/// they are repeated are repeated as well when their outcome is not known: the connection broke, 502, 503, 504.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: Arc<Url>,
    retry: RetryPolicy,
}

impl Client {
    /// A client of the service at `base_url`, e.g. `http://127.0.0.1:8080`, with the default retry policy and without a
    /// key.
    ///
    /// The URL may have a path, below which the API is found. The scheme is `http` or `https`.
    pub fn new(base_url: &str) -> Result<Self> {
        Self::with_options(base_url, &ClientOptions::default())
    }

    /// A client that sends a key, or has certificates of its own.
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
            // Neither reqwest nor what it logs to shows a sensitive header.
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let http = reqwest::Client::builder()
            .user_agent(concat!("forebay-client/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .tls_backend_preconfigured(options.tls(base.scheme() == "https")?)
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(SILENCE_TIMEOUT)
            // A redirect would turn a POST into a GET, and no route answers with one.
            .redirect(redirect::Policy::none())
            .build()
            .map_err(|error| ClientError::Transport(error.into()))?;
        Ok(Self { http, base: Arc::new(base), retry: RetryPolicy::default() })
    }

    /// The same client with another retry policy.
    #[must_use]
    pub fn with_retry(self, retry: RetryPolicy) -> Self {
        Self { retry, ..self }
    }
}

/// For agents: hand in trajectories, look up what became of them.
impl Client {
    /// Reserves room for rollouts that are about to start, from none to as many as asked for.
    ///
    /// A repeat would reserve more room, which then expires unused: only what the service certainly did not begin is
    /// repeated.
    pub async fn admit(&self, policy: &str, rollouts: u32) -> Result<Admission> {
        let request = AdmissionRequest { policy: Some(policy.to_owned()), rollouts };
        self.send(Method::POST, &["admissions"], &request, Repeat::UnlessBegun).await
    }

    /// Hands in one trajectory; `Ok` means that it is durable.
    ///
    /// Without a `rollout_id` a repeat would be another rollout: then it is repeated only when the service certainly
    /// did not begin it. The same holds for the two calls below, of all their trajectories.
    pub async fn post(&self, trajectory: &Trajectory) -> Result<Receipt> {
        let repeat = repeat_of_post(std::slice::from_ref(trajectory));
        self.send(Method::POST, &["trajectories"], trajectory, repeat).await
    }

    /// Hands in trajectories all or nothing, in one commit; one receipt each, in order.
    pub async fn post_bundle(&self, trajectories: &[Trajectory]) -> Result<Vec<Receipt>> {
        let repeat = repeat_of_post(trajectories);
        let receipts: Vec<Receipt> = self.send(Method::POST, &["trajectories"], trajectories, repeat).await?;
        answered_each(receipts, trajectories)
    }

    /// Hands in trajectories each on its own; one line each, in order.
    ///
    /// Only the request as a whole is repeated: a line that was refused with 429 or 503 is the caller's to repeat.
    /// Line breaks between the tokens of `messages` and `metadata` are sent as spaces, because a line is a trajectory.
    pub async fn post_bulk(&self, trajectories: &[Trajectory]) -> Result<Vec<BulkLine>> {
        let url = self.url(&["trajectories"], &[]);
        let call = Call::new(Method::POST, url, repeat_of_post(trajectories)).ndjson(trajectories)?.accept(NDJSON);
        let lines = self.retry.run(call.repeat, || call.rows(&self.http)).await?;
        answered_each(lines, trajectories)
    }

    /// A rollout's story in the current run of its policy; `None` when the rollout is not known.
    pub async fn story(&self, policy: &str, rollout_id: &str) -> Result<Option<TrajectoryStory>> {
        let query = [("policy", policy), ("rollout_id", rollout_id)];
        absent_when(NOT_FOUND, self.get(&["trajectories"], &query).await)
    }

    /// A page of stories, in the order of arrival.
    ///
    /// `query` narrows it: `group_id`, `verdict`, `reason`, `state`, `step`, and `after` and `limit` for paging. A narrowed page may
    /// be empty: the last one is that without `next`.
    pub async fn stories(&self, policy: &str, query: &[(&str, &str)]) -> Result<TrajectoryPage> {
        self.get(&["trajectories"], &of_policy(policy, query)).await
    }

    /// A page of groups, in the order in which they were opened.
    ///
    /// `query` narrows it: `group_id`, `state`, and `after` and `limit` for paging. A narrowed page may
    /// be empty: the last one is that without `next`.
    pub async fn groups(&self, policy: &str, query: &[(&str, &str)]) -> Result<GroupPage> {
        self.get(&["groups"], &of_policy(policy, query)).await
    }

    /// Decides an open group now, as if it had timed out. A repeat is refused, as `group-decided`.
    pub async fn close_group(&self, policy: &str, group_id: &str) -> Result<GroupInfo> {
        let request = CloseRequest { policy: Some(policy.to_owned()), group_id: group_id.to_owned() };
        self.send(Method::POST, &["groups", "close"], &request, Repeat::UnlessBegun).await
    }

    /// Discards a group that is open, ready or quarantined. A repeat is refused, as `group-decided`.
    pub async fn discard_group(&self, policy: &str, group_id: &str, reason: &str) -> Result<GroupInfo> {
        let request = DiscardRequest {
            policy: Some(policy.to_owned()),
            group_id: group_id.to_owned(),
            reason: reason.to_owned(),
        };
        self.send(Method::POST, &["groups", "discard"], &request, Repeat::UnlessBegun).await
    }
}

/// For trainers: lease batches, ack them, keep the lineage of the weights.
impl Client {
    /// Takes the next batch, or `None` when none became ready in `wait_ms`.
    ///
    /// Without a `request_id` a repeat would take another batch: then it is repeated only when the service certainly
    /// did not begin it.
    pub async fn lease(&self, request: &BatchRequest) -> Result<Option<BatchDescriptor>> {
        let repeat = if request.request_id.is_some() { Repeat::Always } else { Repeat::UnlessBegun };
        let call = Call::new(Method::POST, self.url(&["batches"], &[]), repeat).json(request)?;
        self.optional(&call).await
    }

    /// One batch and its state, without its lease; `None` when it is not known.
    pub async fn batch(&self, batch_id: &str) -> Result<Option<BatchDescriptor>> {
        absent_when(NOT_FOUND, self.get(&["batches", batch_id], &[]).await)
    }

    /// A page of batches, in the order in which they were cut.
    ///
    /// `query` narrows it: `state`, and `after` and `limit` for paging. A narrowed page may
    /// be empty: the last one is that without `next`.
    pub async fn batches(&self, policy: &str, query: &[(&str, &str)]) -> Result<BatchPage> {
        self.get(&["batches"], &of_policy(policy, query)).await
    }

    /// All rows of a batch, in order: all of them, or an error.
    pub async fn samples(&self, batch_id: &str) -> Result<Vec<Sample>> {
        self.rows_of(batch_id, &[]).await
    }

    /// The rows of shard `shard` of `shards`, in order: all of them, or an error.
    ///
    /// Shards are deterministic sets of whole rollouts; together they are the batch. One may be empty.
    pub async fn samples_of_shard(&self, batch_id: &str, shard: u32, shards: u32) -> Result<Vec<Sample>> {
        let query = [("shard", shard.to_string()), ("shards", shards.to_string())];
        self.rows_of(batch_id, &query.each_ref().map(|(name, value)| (*name, value.as_str()))).await
    }

    /// Heartbeat: the lease expires `ttl_s` from now. [`Heartbeat`](crate::Heartbeat) calls it in the background.
    pub async fn extend(&self, batch_id: &str, request: &ExtendRequest) -> Result<BatchDescriptor> {
        self.send(Method::POST, &["batches", batch_id, "extend"], request, Repeat::Always).await
    }

    /// The batch was consumed by an optimizer step: only after `Ok` may the weights move.
    pub async fn ack(&self, batch_id: &str, request: &AckRequest) -> Result<BatchDescriptor> {
        self.send(Method::POST, &["batches", batch_id, "ack"], request, Repeat::Always).await
    }

    /// Gives the batch back; named groups are quarantined. A repeat is refused, as `lease-lost`.
    pub async fn nack(&self, batch_id: &str, request: &NackRequest) -> Result<BatchDescriptor> {
        self.send(Method::POST, &["batches", batch_id, "nack"], request, Repeat::UnlessBegun).await
    }

    /// Brings back a quarantined batch, or the quarantined groups of a split one. A repeat is refused, as
    /// `batch-state`.
    pub async fn readmit(&self, batch_id: &str) -> Result<BatchDescriptor> {
        let url = self.url(&["batches", batch_id, "readmit"], &[]);
        self.one(&Call::new(Method::POST, url, Repeat::UnlessBegun)).await
    }

    /// The trainer has saved a step durably: what was acked at or before it is settled.
    pub async fn checkpoint(&self, policy: &str, request: &CheckpointRequest) -> Result<CheckpointResponse> {
        self.send(Method::POST, &["policies", policy, "checkpoints"], request, Repeat::Always).await
    }

    /// The trainer (re)starts from its checkpoint of a step. The answer's epoch is the one to go on with.
    ///
    /// Each attempt begins an epoch, so that with an `epoch` in the request a repeat would be superseded by its
    /// predecessor: then it is repeated only when the service certainly did not begin it.
    pub async fn resume(&self, policy: &str, request: &ResumeRequest) -> Result<ResumeResponse> {
        let repeat = if request.epoch.is_none() { Repeat::Always } else { Repeat::UnlessBegun };
        self.send(Method::POST, &["policies", policy, "resume"], request, repeat).await
    }

    /// Starts the policy afresh under the same name. A repeat would discard what came in since.
    pub async fn reset(&self, policy: &str, request: &ResetRequest) -> Result<ResetResponse> {
        self.send(Method::POST, &["policies", policy, "reset"], request, Repeat::UnlessBegun).await
    }

    /// Publishes a weight version.
    pub async fn publish(&self, policy: &str, request: &VersionRequest) -> Result<PolicyStatus> {
        self.send(Method::PUT, &["policies", policy, "version"], request, Repeat::Always).await
    }
}

/// For everybody: policies and totals.
impl Client {
    /// A page of policies, in the order of their names. `query` is for paging: `after` and `limit`.
    pub async fn policies(&self, query: &[(&str, &str)]) -> Result<PolicyList> {
        self.get(&["policies"], query).await
    }

    /// A policy: rules, version, what its buffer holds; `None` when it is not known.
    pub async fn policy(&self, policy: &str) -> Result<Option<PolicyStatus>> {
        absent_when(UNKNOWN_POLICY, self.get(&["policies", policy], &[]).await)
    }

    /// The policy once its version is above `version` or a resume has lowered it; `None` when that did not happen in
    /// `wait_ms`, at most 60,000.
    pub async fn wait_version_above(&self, policy: &str, version: i64, wait_ms: u64) -> Result<Option<PolicyStatus>> {
        let (version, wait_ms) = (version.to_string(), wait_ms.to_string());
        let query = [("wait_version_above", version.as_str()), ("wait_ms", wait_ms.as_str())];
        let url = self.url(&["policies", policy], &query);
        self.optional(&Call::new(Method::GET, url, Repeat::Always)).await
    }

    /// Writes a policy's rules, creating it when it is new; [`PolicyRules`] says which hold from when on. They replace all
    /// rules that the policy had.
    pub async fn put_policy(&self, policy: &str, rules: &PolicyRules) -> Result<PolicyStatus> {
        self.send(Method::PUT, &["policies", policy], rules, Repeat::Always).await
    }

    /// Changes some of a policy's rules by a JSON merge patch (RFC 7396): what it names changes, `null` resets a setting to
    /// its default, and the rest stays.
    pub async fn patch_policy(&self, policy: &str, patch: &serde_json::Value) -> Result<PolicyStatus> {
        self.send(Method::PATCH, &["policies", policy], patch, Repeat::Always).await
    }

    /// Totals of every policy, and whether they add up.
    pub async fn stats(&self) -> Result<Stats> {
        self.get(&["stats"], &[]).await
    }
}

/// For operators: who may call what.
impl Client {
    /// Creates a key. The answer is the only one that ever holds its secret; a repeat would be another key.
    pub async fn create_key(&self, request: &KeyRequest) -> Result<KeyCreated> {
        self.send(Method::POST, &["keys"], request, Repeat::UnlessBegun).await
    }

    /// A page of keys, in the order in which they were created. `query` is for paging: `after` and `limit`.
    pub async fn keys(&self, query: &[(&str, &str)]) -> Result<KeyPage> {
        self.get(&["keys"], query).await
    }

    /// Revokes a key; `None` when it is not known.
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

/// The service recognises trajectories by their `rollout_id` alone.
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

fn answered_each<T>(answers: Vec<T>, trajectories: &[Trajectory]) -> Result<Vec<T>> {
    if answers.len() == trajectories.len() {
        Ok(answers)
    } else {
        Err(ClientError::Incomplete { answers: answers.len(), expected: trajectories.len() })
    }
}
