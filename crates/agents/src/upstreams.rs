//! The inference engines of the configuration, and whether their answers can be recorded.
//!
//! Every engine is probed at the start and then once a minute, and an adapter only when it is used. A session is opened
//! only if all its engines are ready: an engine whose answers cannot be recorded would otherwise be noticed after hours of
//! rollouts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use forebay_domain::{
    access::globs::PolicyGlobs,
    ids::PolicyName,
    session::{ANY_MODEL, SessionPolicy, SessionSpec},
};
use forebay_gateway::{
    DialectError, Request, Upstream,
    system::LaterSystem,
    upstream::{
        EngineKind, Secret,
        probe::{LogprobScale, Verdict},
    },
};
use forebay_service::{
    engines::{Engines, NoUpstream},
    session::record::CallPermit,
};
use forebay_telemetry::metrics::Metrics;
use forebay_wire as wire;
use tokio::{
    sync::{Mutex, Notify, Semaphore, watch},
    time::Instant,
};

use crate::{
    configured::UpstreamConfig,
    exact::Exact,
    sampling,
    scoring::{Audits, SCORES_AT_ONCE},
};

/// The pause between two probes of an engine that is ready.
const PROBE_EVERY: Duration = Duration::from_mins(1);

/// After so many probes in a row that could not tell, what an earlier probe found about log-probabilities holds no more.
const UNCLEAR_MAX: u32 = 3;

/// The pause between two probes of an engine that is not.
const PROBE_AGAIN: Duration = Duration::from_secs(5);

/// How long each worker of an engine has to answer a probe. An engine that is paused for an update of its weights does not answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long opening a session waits for the first probe of an engine.
const FIRST_PROBE_WAIT: Duration = Duration::from_secs(10);

/// Why an upstream cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("upstream `{name}`: {why}")]
pub struct UpstreamError {
    pub name: String,
    /// The key of the configuration that is wrong.
    pub key: &'static str,
    pub why: String,
}

/// All engines. The first that serves a policy or a model answers its calls.
#[derive(Clone, Debug, Default)]
pub struct Upstreams(Arc<[Arc<Route>]>);

/// An engine, and whether it is ready.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) upstream: Upstream,
    pub(crate) model: String,
    /// What renders its prompts in the mode exact.
    pub(crate) exact: Option<Arc<Exact>>,
    images_as_text: bool,
    later_system: Option<LaterSystem>,
    /// Whether the last probe found that the engine takes only one system message.
    takes_one_system: AtomicBool,
    policies: Option<PolicyGlobs>,
    models: Vec<String>,
    readiness: watch::Sender<Readiness>,
    /// A session or a call wants to know whether it is ready.
    wanted: Notify,
    /// What a probe found about its scores, and when.
    pub(crate) scores: Mutex<Option<(Instant, LogprobScale)>>,
    /// Permits for segments that it scores at once.
    pub(crate) scoring: Semaphore,
    pub(crate) audits: Audits,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Readiness {
    /// Not yet probed.
    Unknown,
    /// Calls can be recorded.
    Ready(LogprobScale),
    /// They cannot.
    NotReady { why: String },
}

impl Readiness {
    fn is_unclear(&self) -> bool {
        matches!(self, Self::Ready(LogprobScale::Unknown { .. }))
    }

    /// Whether this still holds after a probe. A probe samples, and a sample may say nothing: all calls of sessions were
    /// once refused for a minute by one. So what is clear holds until several in a row were unclear.
    fn outlasts(&self, found: &Self, unclear: u32) -> bool {
        let is_clear = matches!(self, Self::Ready(LogprobScale::Scaled | LogprobScale::Raw));
        is_clear && found.is_unclear() && unclear < UNCLEAR_MAX
    }
}

impl UpstreamConfig {
    /// Reads the files and makes the client.
    fn build(self) -> Result<Route, UpstreamError> {
        let name = self.options.name.clone();
        let failed = |key, why: String| UpstreamError { name: name.clone(), key, why };
        let mut options = self.options;
        if let Some(path) = &self.key_file {
            let text = std::fs::read_to_string(path)
                .map_err(|error| failed("key_file", format!("cannot read {}: {error}", path.display())))?;
            if text.trim().is_empty() {
                return Err(failed("key_file", format!("{} is empty", path.display())));
            }
            options.api_key = Some(Secret::new(text.trim()));
        }
        if let Some(path) = &self.ca_file {
            let text = std::fs::read(path)
                .map_err(|error| failed("ca_file", format!("cannot read {}: {error}", path.display())))?;
            options.tls.ca_pem = Some(text);
        }
        let exact = self.exact.map(|config| Exact::load(&name, &config, options.kind)).transpose();
        let exact = exact.map_err(|why| failed("mode", why))?.map(Arc::new);
        let upstream = Upstream::new(options).map_err(|error| failed("urls", error.to_string()))?;
        let readiness = watch::Sender::new(Readiness::Unknown);
        Ok(Route {
            upstream,
            model: self.model,
            later_system: self.later_system.or_else(|| exact.as_ref().map(|exact| exact.later_system())),
            images_as_text: self.images_as_text,
            takes_one_system: AtomicBool::new(false),
            exact,
            policies: self.policies,
            models: self.models,
            readiness,
            wanted: Notify::new(),
            scores: Mutex::default(),
            scoring: Semaphore::new(SCORES_AT_ONCE),
            audits: Audits::default(),
        })
    }
}

impl Upstreams {
    /// Makes the clients of all engines.
    pub fn load(configs: Vec<UpstreamConfig>) -> Result<Self, UpstreamError> {
        let routes = configs.into_iter().map(|config| config.build().map(Arc::new));
        Ok(Self(routes.collect::<Result<_, _>>()?))
    }

    /// Probes all engines until the future is dropped.
    pub async fn run(self, metrics: Arc<Metrics>) {
        let probing = self.0.iter().map(|route| route.keep_probing(&metrics));
        futures::future::join_all(probing).await;
    }

    /// The engine of a policy's calls.
    pub(crate) fn of_policy(&self, policy: &PolicyName) -> Result<Arc<Route>, NoUpstream> {
        self.find(|route| route.policies.as_ref().is_some_and(|globs| globs.matches(policy.public().as_str())))
            .ok_or_else(|| NoUpstream::Unrouted { what: format!("policy `{policy}`") })
    }

    /// The engine of a model without a policy.
    pub(crate) fn of_model(&self, model: &str) -> Result<Arc<Route>, NoUpstream> {
        self.find(|route| route.models.iter().any(|name| name == model || name == ANY_MODEL))
            .ok_or_else(|| NoUpstream::Unrouted { what: format!("model `{model}`") })
    }

    /// The engine of a call: that of its policy, or of its model if it is not recorded.
    pub(crate) fn of_call(&self, model: &str, policy: Option<&SessionPolicy>) -> Result<Arc<Route>, NoUpstream> {
        policy.map_or_else(|| self.of_model(model), |policy| self.of_policy(&policy.policy))
    }

    /// The request with the messages that the template of its engine's model takes. A request without an engine is refused
    /// later.
    pub(crate) async fn adapted(&self, permit: &CallPermit, request: Request) -> Result<Request, DialectError> {
        let policy = permit.policy(&request.model);
        match policy.map(|policy| self.of_call(&request.model, policy)) {
            Ok(Ok(route)) => route.adapted(request).await,
            _ => Ok(request),
        }
    }

    /// Whether the service renders the prompts of any engine.
    pub(crate) fn render_prompts(&self) -> bool {
        self.0.iter().any(|route| route.exact.is_some())
    }

    /// The engine with a name.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Route>> {
        self.find(|route| route.name() == name)
    }

    fn find(&self, mut serves: impl FnMut(&Route) -> bool) -> Option<Arc<Route>> {
        self.0.iter().find(|route| serves(route)).cloned()
    }
}

#[async_trait]
impl Engines for Upstreams {
    async fn check(&self, spec: &SessionSpec) -> Result<(), (String, NoUpstream)> {
        let until = Instant::now() + FIRST_PROBE_WAIT;
        for (model, policy) in &spec.models {
            let failed = |error| (model.clone(), error);
            match policy.as_deref().map(PolicyName::parse) {
                Some(Ok(policy)) => {
                    let route = self.of_policy(&policy).map_err(failed)?;
                    route.check(spec.sampling, until).await.map_err(failed)?;
                }
                // Names that the agent makes up are looked for when it calls.
                None if model == ANY_MODEL => {}
                None => drop(self.of_model(model).map_err(failed)?),
                Some(Err(_)) => {}
            }
        }
        Ok(())
    }
}

impl Route {
    pub(crate) fn name(&self) -> &str {
        &self.upstream.options().name
    }

    /// Whether calls with this sampling can be recorded.
    async fn check(&self, sampling: wire::Sampling, until: Instant) -> Result<(), NoUpstream> {
        let unknown = || Readiness::NotReady { why: "it has not answered its first probe yet".to_owned() };
        let why = match self.probed(until).await.unwrap_or_else(unknown) {
            Readiness::Ready(scale) => return self.check_found(&scale, sampling),
            Readiness::NotReady { why } => why,
            Readiness::Unknown => String::new(),
        };
        Err(NoUpstream::NotReady { name: self.name().to_owned(), why })
    }

    /// What the last probe found. It waits for the first one; `None` if that is not there in time.
    async fn probed(&self, until: Instant) -> Option<Readiness> {
        self.wanted.notify_one();
        let mut readiness = self.readiness.subscribe();
        let probed = readiness.wait_for(|readiness| *readiness != Readiness::Unknown);
        Some(tokio::time::timeout_at(until, probed).await.ok()?.ok()?.clone())
    }

    /// Waits for the first probe, which finds out where ids are sent. A session may be older than this process.
    pub(crate) async fn await_probe(&self) {
        self.probed(Instant::now() + FIRST_PROBE_WAIT).await;
    }

    /// The request with the messages that the model's template takes. It is recorded like this, because this is what the
    /// model reads.
    async fn adapted(&self, request: Request) -> Result<Request, DialectError> {
        let request = if self.images_as_text { request } else { request.without_images()? };
        let later = if let Some(later) = self.later_system {
            later
        } else {
            self.await_probe().await;
            let takes_one = self.takes_one_system.load(Ordering::Relaxed);
            if takes_one { LaterSystem::User } else { LaterSystem::Keep }
        };
        Ok(later.applied(request))
    }

    /// Refuses a call whose log-probabilities would not be those of the policy. An engine may have been restarted with
    /// other flags since its session was opened.
    pub(crate) fn check_scale(&self, sampling: wire::Sampling) -> Result<(), DialectError> {
        self.wanted.notify_one();
        let Readiness::Ready(scale) = &*self.readiness.borrow() else { return Ok(()) };
        self.check_found(scale, sampling).map_err(|error| DialectError::Untrusted { why: error.to_string() })
    }

    fn check_found(&self, scale: &LogprobScale, sampling: wire::Sampling) -> Result<(), NoUpstream> {
        match scale.verdict(self.kind(), &sampling::told(sampling)) {
            Verdict::Ready => Ok(()),
            verdict => Err(NoUpstream::NotReady { name: self.name().to_owned(), why: describe(verdict) }),
        }
    }

    fn kind(&self) -> EngineKind {
        self.upstream.options().kind
    }

    async fn keep_probing(&self, metrics: &Metrics) {
        let mut unclear = 0;
        loop {
            // Adapters may be many, and a probe is in the batches of the others: vLLM 0.32 on a CPU computed requests to
            // the model wrongly if one to an adapter was in their batch. So one that nobody uses is not probed.
            if self.policies.is_some() && self.upstream.serves_adapter(&self.model).await {
                self.wanted.notified().await;
            }
            self.probe(&mut unclear).await;
            let is_ready = matches!(*self.readiness.borrow(), Readiness::Ready(_));
            metrics.upstream_ready(self.name(), is_ready);
            tokio::time::sleep(if is_ready { PROBE_EVERY } else { PROBE_AGAIN }).await;
        }
    }

    /// Probes once, and notes and logs a change. `unclear` counts probes in a row that could not tell what
    /// log-probabilities are.
    async fn probe(&self, unclear: &mut u32) {
        let before = self.readiness.borrow().clone();
        let workers = self.upstream.options().urls.len() as u32;
        let examining = tokio::time::timeout(PROBE_TIMEOUT * workers, self.examine());
        let found = examining.await.unwrap_or_else(|_| {
            let why = format!("it did not answer within {} s", PROBE_TIMEOUT.as_secs());
            Examined::Silent { why }
        });
        let found = match (found, &before) {
            (Examined::Known(found), _) => found,
            // A paused engine answers later. What was found before still holds for its answers.
            (Examined::Silent { .. }, Readiness::Ready(_)) => return,
            (Examined::Silent { why }, _) => Readiness::NotReady { why },
        };
        *unclear = if found.is_unclear() { *unclear + 1 } else { 0 };
        if before.outlasts(&found, *unclear) {
            return;
        }
        if found == before {
            return;
        }
        if let Readiness::NotReady { why } = &found {
            tracing::warn!(upstream.name = self.name(), why, "an inference engine is not ready: no session can use it");
        } else {
            tracing::info!(upstream.name = self.name(), "an inference engine is ready");
        }
        self.readiness.send_replace(found);
    }

    /// Notes which system messages the engine takes.
    fn found(&self, later: LaterSystem) {
        let takes_one = later == LaterSystem::User;
        if self.takes_one_system.swap(takes_one, Ordering::Relaxed) != takes_one {
            tracing::info!(
                upstream.name = self.name(),
                takes_one,
                "the engine takes other system messages than before"
            );
        }
    }

    async fn examine(&self) -> Examined {
        if self.policies.is_none() {
            // Nothing that it answers is recorded.
            return Examined::Known(Readiness::Ready(LogprobScale::Scaled));
        }
        let verdict = match &self.exact {
            None => self.upstream.probe(&self.model).await,
            Some(exact) => {
                let (request, ids) = exact.probe();
                let text = |ids: &[i32]| exact.text(ids);
                self.upstream.probe_exact(&self.model, request, exact.ids(ids, &text)).await
            }
        };
        match verdict {
            Verdict::Ready => {}
            Verdict::Busy { why } => return Examined::Silent { why },
            verdict => return Examined::Known(Readiness::NotReady { why: describe(verdict) }),
        }
        if let Some(exact) = &self.exact {
            match exact.compare(&self.upstream, &self.model).await {
                Ok(None) => {}
                Ok(Some(why)) => return Examined::Known(Readiness::NotReady { why }),
                Err(error) => return Examined::Silent { why: error.to_string() },
            }
        }
        if self.later_system.is_none() {
            match self.upstream.probe_later_system(&self.model).await {
                Ok(later) => self.found(later),
                Err(error) => return Examined::Silent { why: error.to_string() },
            }
        }
        match self.upstream.probe_temperature(&self.model).await {
            Ok(scale) => Examined::Known(Readiness::Ready(scale)),
            Err(error) => Examined::Silent { why: error.to_string() },
        }
    }
}

/// What a probe found.
enum Examined {
    Known(Readiness),
    /// The engine did not answer, which says nothing about its answers.
    Silent {
        why: String,
    },
}

fn describe(verdict: Verdict) -> String {
    match verdict {
        Verdict::Ready => String::new(),
        Verdict::Refused { problem, remedy } => format!("{problem}; {remedy}"),
        Verdict::Unreachable { why } | Verdict::Busy { why } => why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_unclear_probe_does_not_replace_a_clear_one() {
        let unclear = Readiness::Ready(LogprobScale::Unknown { why: "it rained".to_owned() });
        for scale in [LogprobScale::Scaled, LogprobScale::Raw] {
            let clear = Readiness::Ready(scale);
            assert!(clear.outlasts(&unclear, 1) && clear.outlasts(&unclear, UNCLEAR_MAX - 1));
            assert!(!clear.outlasts(&unclear, UNCLEAR_MAX), "the engine may be another one by now");
            assert!(!unclear.outlasts(&clear, 0) && !unclear.outlasts(&unclear, 1));
        }
        assert!(!Readiness::Ready(LogprobScale::Scaled).outlasts(&Readiness::Ready(LogprobScale::Raw), 0));
    }
}
