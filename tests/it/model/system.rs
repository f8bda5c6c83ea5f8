//! The real side: a [`Buffer`] over a real store, with the same calls and observations as the reference.
//!
//! This is separate so that all translation is here: numbers to names, random ids to their order, microseconds to
//! seconds. HTTP is left out, because it would halve the number of steps and makes no decisions. The background sweeper
//! is left out too, so that a sweep happens exactly when the history says.

mod history;
mod sessions;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use forebay::config::Config;
use forebay_domain::{
    clock::{Clock as _, Timestamp},
    groups::Group,
    ids::{BatchId, ConsumerName, Epoch, LeaseToken, PolicyName, RequestId, RolloutId, SessionId, Step, Version},
    ingest::{Ingested, decide::GroupFill},
    lease::{Batch, BatchFilter},
    lineage::Publish,
    looking::ledger::{GroupFilter, Story, StoryFilter},
    refusal::Refusal,
    score_work::WorkRollout,
    scoring::{Given, NewScore, Scored},
    session::SessionKey,
};
use forebay_service::{
    Buffer,
    error::BufferError,
    lease::{LeaseRequest, Leased},
    looking::doctor,
    scores::work::WorkRequest,
    session::record::CallPermit,
};
use forebay_store as store;
use forebay_telemetry::metrics::Metrics;
use forebay_wire::Sample;
use sqlx::Connection as _;

use super::{
    clock::ModelClock,
    names::{self, Names},
    operation::{EXECUTIONS, POLICIES},
    reference::{IN_FLIGHT_MAX, SEGMENTS_MAX, TOKENS_MAX, multiple},
    view::{
        Answer, BatchView, Call, DISCARD_REASON, GroupView, Holder, InFlightNumber, Ledger, NACK_REASON, PolicyNumber,
        PolicyView, Post, Receipt, Refused, Row, SCORES, Score, ScoreLease, Segment, StoryView, WORK_TTL_S, WorkView,
        millionths,
    },
};
use crate::support::{Backend, empty, fresh_database};

/// A page size above the number of rows of any history.
const ALL: u32 = 10_000;

/// A database on which one history after another runs.
pub(crate) struct Database {
    url: String,
    names: Arc<Names>,
    file: Option<PathBuf>,
    _folder: Option<tempfile::TempDir>,
}

impl Database {
    pub(crate) async fn new(backend: Backend) -> Self {
        let names = Arc::new(Names::new());
        if backend == Backend::Postgres {
            let url = fresh_database().await;
            return Self { url, names, file: None, _folder: None };
        }
        // In memory if there is such a file system, because the disk is not under test.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let folder = folder.expect("a temporary folder can be made");
        let file = folder.path().join("forebay.db");
        Self { url: format!("sqlite:{}", file.display()), names, file: Some(file), _folder: Some(folder) }
    }

    /// Removes the previous history.
    async fn empty(&self) {
        let Some(file) = &self.file else { return empty(&self.url).await };
        for suffix in ["", "-wal", "-shm"] {
            let mut name = file.as_os_str().to_owned();
            name.push(suffix);
            // Before the first history there is nothing to remove.
            let _ = std::fs::remove_file(name);
        }
    }
}

pub(crate) struct System {
    url: String,
    clock: Arc<ModelClock>,
    /// The error of the machine's clock, if a process owns its database.
    machine_off_us: i64,
    started: Timestamp,
    buffer: Buffer,
    names: Arc<Names>,
    /// Ids of batches in the order in which they were cut.
    batches: Vec<BatchId>,
    /// Tokens of leases in the order in which they were granted.
    leases: Vec<LeaseToken>,
    /// Tokens of leases of work in the order in which they were granted.
    work_leases: Vec<LeaseToken>,
    /// Ids of sessions in the order in which they were opened, with their keys.
    sessions: Vec<(SessionId, Vec<SessionKey>)>,
    in_flight: BTreeMap<InFlightNumber, CallPermit>,
    begun: usize,
}

async fn open(url: &str, clock: &Arc<ModelClock>) -> Buffer {
    let config = Config::parse(&format!(
        "[limits]\ntrajectory_segments = {SEGMENTS_MAX}\ntrajectory_tokens = {TOKENS_MAX}\n\
         [sessions]\nmax_in_flight = {IN_FLIGHT_MAX}\n"
    ));
    let config = config.expect("the configuration is valid");
    let metrics = Arc::new(Metrics::new());
    let store = store::open(url, metrics.store()).await.expect("the store opens");
    Buffer::start(store, Arc::clone(clock) as _, metrics, config.buffer, Vec::new()).await.expect("the store works")
}

impl System {
    /// An empty buffer.
    pub(crate) async fn start(database: &Database) -> Self {
        database.empty().await;
        let clock = Arc::new(ModelClock::new());
        let buffer = open(&database.url, &clock).await;
        Self {
            url: database.url.clone(),
            machine_off_us: 0,
            started: clock.now(),
            clock,
            buffer,
            names: Arc::clone(&database.names),
            batches: Vec::new(),
            leases: Vec::new(),
            work_leases: Vec::new(),
            sessions: Vec::new(),
            in_flight: BTreeMap::new(),
            begun: 0,
        }
    }

    pub(crate) async fn stop(self) {
        self.buffer.store().close().await;
    }

    pub(crate) async fn apply(&mut self, call: &Call) -> Answer {
        match self.answer(call).await {
            Ok(answer) => answer,
            Err(BufferError::Refused(refusal)) => Answer::Refused(refused(refusal)),
            Err(BufferError::Store(error)) => Answer::Refused(Refused::Other(error.to_string())),
        }
    }

    async fn answer(&mut self, call: &Call) -> Result<Answer, BufferError> {
        match call {
            Call::Post(bundle) => self.post(bundle).await,
            Call::Score(scores) => self.score(scores).await,
            Call::LeaseWork { policy, names, max, request } => self.lease_work(*policy, names, *max, *request).await,
            Call::ExtendWork { policy, leases } => {
                let leases = leases.iter().map(|lease| self.work_leases[*lease].clone()).collect();
                let extended = self.buffer.extend_work(policy_name(*policy), leases, Some(WORK_TTL_S as u64)).await?;
                Ok(Answer::Extended(extended.held))
            }
            Call::RetryWork { policy, name } => {
                let retried = self.buffer.retry_work(policy_name(*policy), SCORES[*name].to_owned()).await?;
                Ok(Answer::Retried(retried))
            }
            Call::Close { policy, group } => {
                let group = self.buffer.close_group(policy_name(*policy), self.names.group(*group)).await?;
                Ok(Answer::Group(self.group_view(&group)))
            }
            Call::Discard { policy, group } => {
                let (policy, group) = (policy_name(*policy), self.names.group(*group));
                let group = self.buffer.discard_group(policy, group, DISCARD_REASON.to_owned()).await?;
                Ok(Answer::Group(self.group_view(&group)))
            }
            Call::Claim { policy, consumer, request, partial, epoch } => {
                let request = LeaseRequest {
                    consumer: consumer_name(*consumer),
                    request_id: request.map(request_id),
                    epoch: epoch.map(Epoch),
                    partial: *partial,
                    ..LeaseRequest::of(policy_name(*policy))
                };
                match self.buffer.lease(request, || true).await? {
                    Some(leased) => self.leased(leased).await,
                    None => Ok(Answer::NoBatch),
                }
            }
            Call::Extend { holder, ttl_s } => {
                let batch = self.buffer.extend(self.holder(*holder), *ttl_s as u64).await?;
                Ok(Answer::Batch(self.batch_view(&batch)))
            }
            Call::Ack { holder, step } => {
                let batch = self.buffer.ack(self.holder(*holder), Step(*step)).await?;
                Ok(Answer::Batch(self.batch_view(&batch)))
            }
            Call::Nack { holder, groups } => {
                let groups = groups.iter().map(|group| self.names.group(*group)).collect();
                let batch = self.buffer.nack(self.holder(*holder), Some(NACK_REASON.to_owned()), groups).await?;
                Ok(Answer::Batch(self.batch_view(&batch)))
            }
            Call::Readmit { batch } => {
                let batch = self.buffer.readmit(self.batch_id(*batch)).await?;
                Ok(Answer::Batch(self.batch_view(&batch)))
            }
            call => self.answer_for_policy(call).await,
        }
    }

    async fn answer_for_policy(&mut self, call: &Call) -> Result<Answer, BufferError> {
        match call {
            Call::Publish { policy, version, step, uri, epoch } => {
                let publish = Publish {
                    policy: policy_name(*policy),
                    version: Version(*version),
                    step: step.map(Step),
                    uri: uri.map(names::uri),
                    epoch: epoch.map(Epoch),
                    force: false,
                    now: self.buffer.now(),
                };
                Ok(Answer::Published { new: self.buffer.publish(publish).await? })
            }
            Call::Checkpoint { policy, step, force, epoch } => {
                let (policy, step) = (policy_name(*policy), Step(*step));
                let settled = self.buffer.checkpoint(policy, step, *force, epoch.map(Epoch)).await?;
                Ok(Answer::Settled { last: settled.last.0, batches: settled.batches })
            }
            Call::Resume { policy, step, force, epoch } => {
                let (policy, step) = (policy_name(*policy), step.map(Step));
                let resumed = self.buffer.resume(policy, step, *force, epoch.map(Epoch)).await?;
                Ok(Answer::Resumed {
                    epoch: resumed.epoch.0,
                    version: resumed.version.0,
                    returned: resumed.returned,
                    quarantined: resumed.quarantined,
                    undeliverable: resumed.undeliverable,
                })
            }
            Call::Reset { policy, epoch } => {
                let done = self.buffer.reset(policy_name(*policy), epoch.map(Epoch)).await?;
                Ok(Answer::Reset { run: done.run.0, epoch: done.epoch.0, discarded: done.groups })
            }
            Call::PutPolicy { policy, rules } => {
                self.buffer.put_policy(policy_name(*policy), names::rules(rules)).await?;
                Ok(Answer::Done)
            }
            Call::Advance { seconds } => {
                self.clock.advance_s(*seconds);
                Ok(Answer::Done)
            }
            Call::Sweep => {
                self.buffer.sweep().await?;
                Ok(Answer::Done)
            }
            Call::Step { hours } => {
                self.step(*hours * 3_600_000_000).await?;
                Ok(Answer::Done)
            }
            Call::Restart => {
                self.restart().await?;
                Ok(Answer::Done)
            }
            call => self.answer_for_session(call).await,
        }
    }

    /// The clock steps, and the replica reads it.
    async fn step(&mut self, step_us: i64) -> Result<(), BufferError> {
        const STEP: &str = "UPDATE service_clock SET offset_us = offset_us + $1";
        if self.url.starts_with("sqlite") {
            // A step forward cannot be distinguished from time that passes between two starts.
            self.machine_off_us = (self.machine_off_us + step_us).min(0);
        } else {
            let mut connection = sqlx::PgConnection::connect(&self.url).await.expect("the server accepts");
            sqlx::query(STEP).bind(step_us).execute(&mut connection).await.expect("the statement is valid");
            connection.close().await.expect("the server is running");
        }
        Ok(self.buffer.check_clock().await?)
    }

    async fn restart(&mut self) -> Result<(), BufferError> {
        // What only the process knows is lost, as when it is killed.
        self.in_flight.clear();
        self.buffer.check_clock().await?;
        self.buffer.stop_clock().await?;
        self.buffer.store().close().await;
        // On Postgres the replica's own clock has no effect.
        let off_us = if self.url.starts_with("sqlite") { self.machine_off_us } else { -30 * 86_400_000_000 };
        self.clock = Arc::new(self.clock.restarted(off_us));
        self.buffer = open(&self.url, &self.clock).await;
        Ok(())
    }

    async fn post(&self, bundle: &[Post]) -> Result<Answer, BufferError> {
        let bundle = bundle.iter().map(|post| self.names.trajectory(post)).collect();
        let stored = self.buffer.ingest(self.buffer.prepare(bundle)?).await?;
        let receipt = |ingested: Ingested| Receipt {
            verdict: ingested.decision.verdict.into(),
            reason: ingested.decision.reason,
            duplicate: ingested.duplicate,
            scoring: ingested.decision.scoring.len(),
            group: self.names.group_name(ingested.group_id.as_str()),
            state: ingested.fill.state.into(),
            arrived: ingested.fill.arrived(),
            size: ingested.fill.size,
        };
        Ok(Answer::Receipts(stored.into_iter().map(receipt).collect()))
    }

    async fn score(&self, sent: &[Score]) -> Result<Answer, BufferError> {
        let new = |score: &Score| NewScore {
            turn: None,
            policy: policy_name(score.policy),
            rollout_id: RolloutId::parse(self.names.rollout(score.rollout)).expect("the id is valid"),
            name: SCORES[score.name].to_owned(),
            scorer: (score.lease == ScoreLease::None).then(|| SCORER.to_owned()),
            given: score.value.map_or(Given::Failed("no".to_owned()), |value| Given::Value(f64::from(value) / 2.0)),
            lease: match score.lease {
                ScoreLease::None => None,
                ScoreLease::Granted(lease) => Some(self.work_leases[lease].clone()),
                ScoreLease::NeverGranted => Some(LeaseToken::presented("never granted")),
            },
            rationale: None,
            replace: score.replace,
        };
        let receipt = |scored: Scored| Receipt {
            verdict: scored.verdict.into(),
            reason: scored.reason,
            duplicate: scored.duplicate,
            scoring: scored.scoring.len(),
            group: self.names.group_name(&scored.group_id),
            state: scored.fill.state.into(),
            arrived: scored.fill.arrived(),
            size: scored.fill.size,
        };
        let scored = self.buffer.put_scores(sent.iter().map(new).collect()).await?;
        Ok(Answer::Scored(scored.into_iter().map(|scored| (scored.applied, receipt(scored))).collect()))
    }

    async fn lease_work(
        &mut self,
        policy: PolicyNumber,
        names: &[usize],
        max: usize,
        request: Option<usize>,
    ) -> Result<Answer, BufferError> {
        let mut names: Vec<String> = names.iter().map(|name| SCORES[*name].to_owned()).collect();
        names.sort_unstable();
        let request = WorkRequest {
            policy: policy_name(policy),
            names,
            max: max as u32,
            scorer: SCORER.to_owned(),
            request_id: request.map(request_id),
            ttl_s: Some(WORK_TTL_S as u64),
            reads: false,
            wait: Duration::ZERO,
            caller: None,
        };
        let leased = self.buffer.lease_work(request, || true).await?;
        let mut items = Vec::new();
        for item in leased.items {
            let lease = self.work_leases.iter().position(|known| *known == item.lease).unwrap_or_else(|| {
                self.work_leases.push(item.lease.clone());
                self.work_leases.len() - 1
            });
            let rollout =
                |rollout: &WorkRollout| (self.names.rollout_number(&rollout.row.rollout_id), rollout.scoring.len());
            items.push(WorkView {
                lease,
                attempt: item.attempt,
                name: SCORES.iter().position(|name| **name == item.name).expect("only these are leased"),
                group: self.names.group_name(&item.group_id),
                rollouts: item.rollouts.iter().map(rollout).collect(),
            });
        }
        Ok(Answer::Work { held: leased.held, items })
    }

    async fn leased(&mut self, leased: Leased) -> Result<Answer, BufferError> {
        let batch = leased.batch;
        if !self.batches.contains(&batch.batch_id) {
            self.batches.push(batch.batch_id);
        }
        let token = batch.lease.clone().expect("a leased batch has a token");
        let lease = self.leases.iter().position(|known| *known == token).unwrap_or_else(|| {
            self.leases.push(token);
            self.leases.len() - 1
        });
        let mut reader = self.buffer.samples(batch.batch_id, None).await?;
        let mut rows = Vec::new();
        while let Some(page) = reader.next_page().await? {
            rows.extend(page.map(|sample| self.row(&sample)));
        }
        Ok(Answer::Leased { held: leased.held, lease, batch: self.batch_view(&batch), rows })
    }

    fn row(&self, sample: &Sample) -> Row {
        Row {
            group: self.names.group_name(&sample.group_id),
            rollout: self.names.rollout_number(&sample.rollout_id),
            segment: sample.segment as usize,
            verdict: sample.verdict,
            content: Segment {
                kind: sample.kind.clone(),
                tokens: sample.tokens.clone().unwrap_or_default(),
                mask: sample.loss_mask.clone().unwrap_or_default(),
                logprobs: sample.logprobs.as_ref().map(|logprobs| logprobs.iter().copied().map(multiple).collect()),
                versions: sample.versions.clone(),
            },
            reward: sample.reward.map(millionths),
            advantage: millionths(f64::from(sample.advantage.expect("the rollout has one"))),
            loss_weight: millionths(sample.loss_weight),
            policy_version: sample.policy_version.expect("every rollout has a version"),
        }
    }

    fn holder(&self, holder: Holder) -> forebay_service::lease::Holder {
        forebay_service::lease::Holder {
            batch_id: self.batch_id(holder.batch),
            lease: holder.lease.map_or(LeaseToken::presented("forged"), |lease| self.leases[lease].clone()),
            epoch: holder.epoch.map(Epoch),
        }
    }

    fn batch_id(&self, batch: Option<usize>) -> BatchId {
        batch.map_or_else(BatchId::mint, |batch| self.batches[batch])
    }

    fn batch_number(&self, batch: BatchId) -> usize {
        self.batches.iter().position(|known| *known == batch).expect("no batch is cut but by a claim")
    }

    /// Seconds since the start; the clock moves by whole seconds.
    fn seconds(&self, time: Timestamp) -> i64 {
        time.micros_since(self.started) / 1_000_000
    }

    /// The whole ledger, after checking that its totals are consistent.
    pub(crate) async fn ledger(&self) -> Result<Ledger, BufferError> {
        let diagnosis = doctor::examine_rows(self.buffer.store()).await?;
        assert!(diagnosis.is_healthy(), "{:#?}", diagnosis.findings().collect::<Vec<_>>());
        let mut ledger = Ledger::new();
        for policy in 0..POLICIES {
            ledger.push(self.policy_view(policy).await?);
        }
        Ok(ledger)
    }

    async fn policy_view(&self, number: PolicyNumber) -> Result<PolicyView, BufferError> {
        let name = policy_name(number);
        let overview = self.buffer.policy(&name).await?;
        self.check_history(number, &overview.tallies).await?;
        let mut executions = Vec::with_capacity(EXECUTIONS);
        for number in 0..EXECUTIONS {
            let execution_id = Some(names::execution_id(number));
            let filter = StoryFilter { execution_id, limit: ALL, ..StoryFilter::default() };
            let found = self.buffer.stories(filter, |policy| *policy == name).await?.entries;
            executions.push(found.iter().map(|one| (one.run.0, self.names.rollout_number(&one.rollout_id))).collect());
        }
        let stories = StoryFilter { policy: Some(name.clone()), limit: ALL, ..StoryFilter::default() };
        let groups = GroupFilter { policy: name.clone(), limit: ALL, ..GroupFilter::default() };
        let batches = BatchFilter { policy: name, limit: ALL, ..BatchFilter::default() };
        let shown = |name: &str| {
            ["received", "rollout.", "group.", "batch.", "dropped.", "session.", "reserved"]
                .iter()
                .any(|p| name.starts_with(p))
        };
        let tallies = overview.tallies.counts.into_iter().map(|(tally, count)| (tally.name(), count));
        let tallies = tallies.filter(|(name, count)| shown(name) && *count != 0);
        let policy = overview.policy;
        let groups = self.buffer.groups(groups).await?.entries;
        let groups = groups.iter().map(|group| self.group_view(group)).map(|view| ((view.run, view.name), view));
        Ok(PolicyView {
            run: policy.run.0,
            epoch: policy.epoch.0,
            version: policy.version.0,
            version_step: policy.version_step.map(|step| step.0),
            version_uri: policy.version_uri.as_deref().map(names::uri_number),
            checkpoint_step: policy.checkpoint_step.map(|step| step.0),
            tallies: tallies.collect(),
            stories: self
                .buffer
                .stories(stories, |_| true)
                .await?
                .entries
                .iter()
                .map(|story| self.story_view(story))
                .collect(),
            executions,
            groups: groups.collect(),
            batches: self.buffer.batches(batches).await?.entries.iter().map(|batch| self.batch_view(batch)).collect(),
            sessions: self.session_views(number).await?,
        })
    }

    fn story_view(&self, story: &Story) -> StoryView {
        StoryView {
            run: story.run.0,
            rollout: self.names.rollout_number(&story.rollout_id),
            execution: names::execution_number(&story.execution_id),
            group: self.names.group_name(&story.group_id),
            verdict: story.verdict.into(),
            reason: story.reason.clone(),
            state: story.state.into(),
            group_reason: story.group_reason.clone(),
            batches: story.batches.iter().map(|batch| self.batch_number(*batch)).collect(),
            step: story.step.map(|step| step.0),
            advantage: story.advantage.map(millionths),
            policy_version: story.policy_version.0,
            version_assumed: story.version_assumed,
            segments: story.segments as usize,
            tokens: story.tokens,
            received_at: self.seconds(story.received_at),
            decided_at: story.decided_at.map(|at| self.seconds(at)),
            batched_at: story.batched_at.map(|at| self.seconds(at)),
            acked_at: story.acked_at.map(|at| self.seconds(at)),
            purged_at: story.purged_at.map(|at| self.seconds(at)),
        }
    }

    fn group_view(&self, group: &Group) -> GroupView {
        let GroupFill { state, size, kept, masked, dropped, scoring } = group.fill;
        GroupView {
            run: group.run.0,
            name: self.names.group_name(&group.group_id),
            state: state.into(),
            reason: group.reason.clone(),
            size,
            min_size: group.min_size,
            kept,
            masked,
            dropped,
            scoring,
            late: group.late,
            batch: group.batch_id.map(|batch| self.batch_number(batch)),
            opened_at: self.seconds(group.opened_at),
            deadline_at: group.deadline_at.map(|at| self.seconds(at)),
            decided_at: group.decided_at.map(|at| self.seconds(at)),
        }
    }

    fn batch_view(&self, batch: &Batch) -> BatchView {
        BatchView {
            batch: self.batch_number(batch.batch_id),
            policy: (0..POLICIES).find(|number| policy_name(*number) == batch.policy).expect("policies are numbered"),
            state: batch.state.into(),
            reason: batch.reason.clone(),
            consumer: usize::from(!batch.consumer.is_empty()),
            epoch: batch.epoch.0,
            expires_at: batch.expires_at.map(|at| self.seconds(at)),
            attempt: batch.attempt,
            step: batch.step.map(|step| step.0),
            groups: batch.groups as usize,
            rollouts: batch.rollouts as usize,
            samples: batch.samples as usize,
            tokens: batch.tokens,
            version_current: batch.version_current.0,
            trained_versions: batch.trained_versions.map(|versions| (versions.oldest.0, versions.newest.0)),
            created_at: self.seconds(batch.created_at),
        }
    }
}

/// The scorer of all scores.
const SCORER: &str = "scorer";

fn policy_name(policy: PolicyNumber) -> PolicyName {
    PolicyName::parse(&format!("policy-{policy}")).expect("the name is valid")
}

fn consumer_name(consumer: usize) -> Option<ConsumerName> {
    (consumer > 0).then(|| ConsumerName::parse("trainer").expect("the name is valid"))
}

fn request_id(request: usize) -> RequestId {
    RequestId::parse(&format!("step-{request}")).expect("the id is valid")
}

fn refused(refusal: Refusal) -> Refused {
    match refusal {
        Refusal::Invalid(violations) => {
            let pointers: Vec<String> = violations.into_iter().map(|violation| violation.pointer).collect();
            Refused::Invalid(pointers.join(" "))
        }
        Refusal::Unknown(_) | Refusal::UnknownInPolicy { .. } | Refusal::UnknownWork { .. } => Refused::Unknown,
        Refusal::RolloutConflict { index, verdict, .. } => Refused::RolloutConflict { index, verdict: verdict.into() },
        Refusal::GroupSizeConflict { index, size, .. } => Refused::GroupSizeConflict { index, size },
        Refusal::ScoreConflict { .. } => Refused::ScoreConflict,
        Refusal::LeaseLost(_) => Refused::LeaseLost,
        Refusal::AlreadyAcked(step) => Refused::AlreadyAcked(step.0),
        Refusal::StepSettled { checkpoint, .. } => Refused::StepSettled { checkpoint: checkpoint.0 },
        Refusal::BacklogFull(_) => Refused::BacklogFull,
        Refusal::StepUnknown { last, .. } => Refused::StepUnknown { last: last.map(|step| step.0) },
        Refusal::Superseded { .. } => Refused::Superseded,
        Refusal::LineageGap(_) => Refused::LineageGap,
        Refusal::VersionConflict(current) => Refused::VersionConflict(current.0),
        Refusal::GroupDecided(state) => Refused::GroupDecided(state.into()),
        Refusal::BatchState(_) => Refused::BatchState,
        Refusal::SessionEnded(state) => Refused::SessionEnded(state.into()),
        Refusal::EndConflict(state) => Refused::EndConflict(state.into()),
        Refusal::SessionConflict(_) => Refused::SessionConflict,
        Refusal::AttemptSuperseded { .. } => Refused::AttemptOver,
        Refusal::NoAttemptsLeft(_) => Refused::NoAttemptsLeft,
        Refusal::SessionReset(policy) => Refused::SessionReset(policy.to_string()),
        Refusal::SessionFull(what) => Refused::SessionFull(what),
        Refusal::SessionBusy(_) => Refused::SessionBusy,
        Refusal::UnknownSessionKey => Refused::UnknownSessionKey,
        Refusal::UnknownModel(_) => Refused::UnknownModel,
        Refusal::NoTurns => Refused::NoTurns,
        Refusal::NoRoom(..) => Refused::NoRoom,
        other => Refused::Other(other.to_string()),
    }
}
