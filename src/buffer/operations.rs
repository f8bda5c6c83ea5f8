//! Everything that the service can do with a buffer, in the order of the stages. Each operation calls the function of
//! the same name in the file of its stage, in a span of the same name.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use forebay_domain::{
    admission::{Admitted, RoomRequest},
    facades::{FacadeState, ReadyGroup},
    groups::Group,
    ids::{
        BatchId, CallPk, CallerId, Epoch, ExecutionId, GroupId, PolicyName, RolloutId, Run, SessionId, Step, Version,
    },
    ingest::{BundleOutcome, Ingested, NewRollout},
    lease::{Batch, BatchFilter},
    lineage::{Checkpointed, Publish, ResetDone, Resumed},
    looking::{
        dry_run::TryFilters,
        history::{Series, SeriesRequest},
        journal::JournalEntry,
        ledger::{GroupFilter, LatestGroup, Story, StoryFilter},
        steps::{StepBuckets, StepCursor, StepPage},
    },
    pages::{Cursor, Order, Page},
    policies::RulesWritten,
    refusal::Refusal,
    rules::Rules,
    session::{RecordedCall, Session, SessionFilter, notes::SessionNotes},
    shard::{Division, Shard},
    tally::Tallies,
    trajectory::Memory,
};
use forebay_store::{
    error::StoreError,
    ops::{
        executions::FindLatestGroup,
        facades::{FindFacadeState, ListReadyGroups, WriteFacadeState},
        session::FindSession,
    },
};
use forebay_wire as wire;
use serde_json::Value;
use tracing::instrument;

use super::{
    Buffer,
    content::{self, ContentReader},
    coordination::service_time,
    dry_run::{self, DryRun},
    export::{self, ExportFilter, ExportReader},
    ingest,
    insight::{self, Glance, Insight},
    journal,
    lease::{self, Holder, LeaseRequest, Leased},
    ledger,
    life::{self, Askable, LifeStory},
    lineage,
    policies::{self, PolicyOverview},
    reading::{self, Reader},
    replicas,
    samples::{self, SampleReader, ShardTotals},
    series,
    session::{
        self, Abort, CallPermit, CallText, Ended, Finish, NewCall, OpenSession, Opened, RecordedTexts, Replayed,
        TextPage, Turn,
    },
    stages::admission,
    step_log, sweep, unused_rules,
};
use crate::buffer::error::BufferError;

impl Buffer {
    /// Reserves room for rollouts that are about to start. The reservation lasts as long as their group may take.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn admit(&self, request: RoomRequest) -> Result<Admitted, BufferError> {
        admission::admit(self, request).await
    }

    /// Validates and packs trajectories that were posted together. The pointers of violations start with the index in
    /// the bundle.
    ///
    /// This takes milliseconds for long trajectories, so async workers must not call it.
    pub fn prepare(&self, bundle: Vec<wire::Trajectory>) -> Result<Vec<NewRollout>, Refusal> {
        self.prepare_within(bundle, &mut |_| true)
    }

    /// Like [`prepare`](Self::prepare), but asks for memory before segments are assembled that are larger than the turns
    /// that were posted.
    pub fn prepare_within(
        &self,
        bundle: Vec<wire::Trajectory>,
        memory: &mut Memory<'_>,
    ) -> Result<Vec<NewRollout>, Refusal> {
        ingest::prepare(self, bundle, &ExecutionId::mint(), memory)
    }

    /// Stores a bundle, all or nothing. When it returns, every group that the bundle completes is decided.
    #[instrument(level = "debug", skip_all)]
    pub async fn ingest(&self, bundle: Vec<NewRollout>) -> Result<Vec<Ingested>, BufferError> {
        ingest::ingest(self, bundle).await
    }

    /// Stores bundles that do not depend on each other, in order, with as few commits as possible.
    #[instrument(level = "debug", skip_all)]
    pub async fn ingest_all(&self, bundles: Vec<Vec<NewRollout>>) -> Result<Vec<BundleOutcome>, BufferError> {
        ingest::ingest_all(self, bundles.into_iter().map(Into::into).collect()).await
    }

    /// Opens a session and reserves room for its rollouts. Repeated with the same rollout and content, it only creates
    /// another key.
    #[instrument(level = "debug", skip_all)]
    pub async fn open_session(&self, open: OpenSession) -> Result<Opened, BufferError> {
        session::open(self, open).await
    }

    /// Permission for a call of the session that has this key; `id` is the session that the caller names. If the session
    /// has as many calls in flight as it may have, it waits for `wait` until one ends.
    #[instrument(level = "debug", skip_all)]
    pub async fn session_for_call(
        &self,
        id: Option<SessionId>,
        key: &str,
        wait: Duration,
    ) -> Result<CallPermit, BufferError> {
        session::permit(self, id, key, wait).await
    }

    /// Refuses a call if its session has as much as it may have. A call that repeats another is not refused.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn check_room(&self, permit: &CallPermit) -> Result<(), BufferError> {
        session::check_room(self, permit).await
    }

    /// The refusal of a call whose prompt alone has more tokens than its session has left.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn without_tokens(&self, permit: &CallPermit) -> Result<Refusal, BufferError> {
        session::without_tokens(self, permit).await
    }

    /// Notes that the agent of a session is at work although no call is recorded, so that the session does not expire.
    /// Refused if the session has ended, also at another replica.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn keep_session(&self, permit: &CallPermit) -> Result<(), BufferError> {
        session::keep(self, permit).await
    }

    /// Remembers what happened to a call, for the receipts of the session.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn note_session(&self, permit: &CallPermit, notes: SessionNotes) -> Result<(), BufferError> {
        session::note(self, permit, notes).await
    }

    /// The recorded answer to a request that its client says it repeats; none if no answer was recorded.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn replay(
        &self,
        permit: &CallPermit,
        dialect: &str,
        body_digest: [u8; 32],
        retry_count: u32,
    ) -> Result<Option<Replayed>, BufferError> {
        session::replay(self, permit, dialect, body_digest, retry_count).await
    }

    /// Records a call. It is durable when this returns.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn record_call(&self, permit: &CallPermit, call: NewCall) -> Result<RecordedCall, BufferError> {
        session::record(self, permit, call).await
    }

    /// The recorded calls of the session with their requests and answers.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn recorded_texts(&self, permit: &CallPermit) -> Result<RecordedTexts, BufferError> {
        Ok(session::texts(self, permit).await?)
    }

    /// The texts of one recorded call; none if there is no call with this number.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn recorded_text(
        &self,
        permit: &CallPermit,
        seq: u32,
        page: &mut TextPage,
    ) -> Result<Option<CallText>, BufferError> {
        Ok(session::text(self, permit, seq, page).await?)
    }

    /// Notes that the agent received the answer of a call. It is stored with the next sweep, or when a session ends.
    pub fn mark_delivered(&self, call: CallPk) {
        session::mark_delivered(self, call);
    }

    /// Stores which calls were delivered; needed before the process ends.
    pub async fn flush_delivered(&self) -> Result<(), StoreError> {
        session::flush_delivered(self).await
    }

    /// Finishes sessions, all or none: their rollouts are ingested as one bundle.
    #[instrument(level = "debug", skip_all)]
    pub async fn finish_sessions(&self, finishes: Vec<Finish>) -> Result<Vec<Ended>, BufferError> {
        session::finish(self, finishes).await
    }

    /// Ends a session without a reward.
    #[instrument(level = "debug", skip_all, fields(session.id = %abort.session_id))]
    pub async fn abort_session(&self, abort: Abort) -> Result<Ended, BufferError> {
        session::abort(self, abort).await
    }

    /// One session.
    #[instrument(level = "debug", skip_all, fields(session.id = %session_id))]
    pub async fn session(&self, session_id: SessionId) -> Result<Session, BufferError> {
        Ok(self.store.read(FindSession(session_id)).await?.ok_or(Refusal::Unknown("the session"))?)
    }

    /// Sessions that record rollouts of a policy, in the order in which they were opened.
    #[instrument(level = "debug", skip_all)]
    pub async fn sessions(&self, filter: SessionFilter) -> Result<Page<Session>, BufferError> {
        policies::existing_policy(self, &filter.policy).await?;
        Ok(self.store.read(filter).await?)
    }

    /// The recorded calls of a session, and what becomes of them.
    #[instrument(level = "debug", skip_all, fields(session.id = %session_id))]
    pub async fn session_turns(&self, session_id: SessionId) -> Result<Vec<Turn>, BufferError> {
        session::turns(self, session_id).await
    }

    /// The next batch, or none when no batch became ready in time.
    ///
    /// If the caller drops the future while it waits, no batch was claimed. `is_still_permitted` is called before every
    /// claim, because a permission can end during the wait.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn lease(
        &self,
        request: LeaseRequest,
        is_still_permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Option<Leased>, BufferError> {
        lease::lease(self, request, is_still_permitted).await
    }

    /// Heartbeat: the lease now expires `ttl_s` from now.
    #[instrument(level = "debug", skip_all, fields(batch.id = %holder.batch_id))]
    pub async fn extend(&self, holder: Holder, ttl_s: u64) -> Result<Batch, BufferError> {
        lease::extend(self, holder, ttl_s).await
    }

    /// Records that an optimizer step consumed the batch.
    #[instrument(level = "debug", skip_all, fields(batch.id = %holder.batch_id))]
    pub async fn ack(&self, holder: Holder, step: Step) -> Result<Batch, BufferError> {
        lease::ack(self, holder, step).await
    }

    /// Gives the batch back; the named groups are quarantined.
    #[instrument(level = "debug", skip_all, fields(batch.id = %holder.batch_id))]
    pub async fn nack(
        &self,
        holder: Holder,
        reason: Option<String>,
        groups: Vec<GroupId>,
    ) -> Result<Batch, BufferError> {
        lease::nack(self, holder, reason, groups).await
    }

    /// Makes a quarantined batch, or the quarantined groups of a split batch, available again with a fresh count.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch_id))]
    pub async fn readmit(&self, batch_id: BatchId) -> Result<Batch, BufferError> {
        lease::readmit(self, batch_id).await
    }

    /// Acks and settles everything that a reader has read, with a step of its own. Returns the number of batches.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn ack_reads(&self, reader: &Reader) -> Result<usize, BufferError> {
        reading::ack_reads(self, reader).await
    }

    /// Records that the whole response of a read was sent. Refused if a lease of the read was lost meanwhile.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn mark_read(&self, reader: &Reader, read: Vec<Holder>) -> Result<(), BufferError> {
        reading::mark_read(self, reader, read).await
    }

    /// Gives back a batch that was not sent to a reader. It counts as no delivery.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn release_read(&self, reader: &Reader, holder: Holder) -> Result<(), BufferError> {
        reading::release_read(self, reader, holder).await
    }

    /// Gives back everything that a reader holds. Returns the number of batches.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn give_back_reads(&self, reader: &Reader) -> Result<u64, BufferError> {
        reading::give_back_reads(self, reader).await
    }

    /// One batch.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch_id))]
    pub async fn batch(&self, batch_id: BatchId) -> Result<Batch, BufferError> {
        lease::batch(self, batch_id).await
    }

    /// Batches in the order in which they were cut.
    #[instrument(level = "debug", skip_all)]
    pub async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, BufferError> {
        lease::batches(self, filter).await
    }

    /// Opens a batch, or a shard of it, for reading; needs no lease.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch_id))]
    pub async fn samples(&self, batch_id: BatchId, shard: Option<Shard>) -> Result<SampleReader, BufferError> {
        samples::samples(self, batch_id, shard).await
    }

    /// The samples of the policy's newest group that is ready or in a batch.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn newest_group(&self, policy: PolicyName) -> Result<Vec<wire::Sample>, BufferError> {
        samples::newest_group(self, policy).await
    }

    /// The first ready groups of the policy, in the order in which they became ready.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn ready_groups(&self, policy: PolicyName, limit: u32) -> Result<Vec<ReadyGroup>, BufferError> {
        Ok(self.store.read(ListReadyGroups { policy, limit }).await?)
    }

    /// The state of a foreign protocol. None if there is none, or if its revision is `known`.
    #[instrument(level = "debug", skip_all)]
    pub async fn facade_state(&self, name: String, known: u64) -> Result<Option<FacadeState>, BufferError> {
        Ok(self.store.read(FindFacadeState { name, known }).await?)
    }

    /// Replaces the state of a foreign protocol, if it still has the revision before this one. Returns whether it had.
    #[instrument(level = "debug", skip_all)]
    pub async fn write_facade_state(&self, name: String, state: FacadeState) -> Result<bool, BufferError> {
        Ok(self.store.write(WriteFacadeState { name, state }).await?)
    }

    /// The totals of each shard of a batch.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch.batch_id))]
    pub async fn shards(&self, batch: &Batch, division: Division) -> Result<Vec<ShardTotals>, BufferError> {
        samples::shards(self, batch, division).await
    }

    /// Records that the trainer has saved `step` durably. A step above the last acked one is refused unless forced.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn checkpoint(
        &self,
        policy: PolicyName,
        step: Step,
        force: bool,
        epoch: Option<Epoch>,
    ) -> Result<Checkpointed, BufferError> {
        lineage::checkpoint(self, policy, step, force, epoch).await
    }

    /// Restarts a trainer from its checkpoint of `step`, or from nothing.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn resume(
        &self,
        policy: PolicyName,
        step: Option<Step>,
        force: bool,
        epoch: Option<Epoch>,
    ) -> Result<Resumed, BufferError> {
        lineage::resume(self, policy, step, force, epoch).await
    }

    /// Starts the policy afresh.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn reset(&self, policy: PolicyName, epoch: Option<Epoch>) -> Result<ResetDone, BufferError> {
        lineage::reset(self, policy, epoch).await
    }

    /// Publishes a weight version. True unless it was an identical repeat.
    #[instrument(level = "debug", skip_all)]
    pub async fn publish(&self, publish: Publish) -> Result<bool, BufferError> {
        lineage::publish(self, publish).await
    }

    /// Sweeps until the future is dropped. Expired leases come back within a second.
    pub async fn run_sweeper(&self) {
        sweep::run_sweeper(self).await;
    }

    /// Moves payloads to where the configuration wants them, and removes objects that are no longer needed, until the future
    /// is dropped.
    pub async fn run_payload_care(&self) {
        sweep::run_payload_care(self).await;
    }

    /// Sweeps once: expired leases, overdue groups, and payloads and tombstones whose retention is over.
    pub async fn sweep(&self) -> Result<(), StoreError> {
        sweep::sweep(self).await
    }

    /// Adds appended changes to the tallies, if the store appends changes.
    pub async fn fold_tallies(&self) -> Result<(), StoreError> {
        sweep::fold_tallies(self).await
    }

    /// Writes rules. Rules that decide groups apply to groups opened from now on; all other rules apply from the next
    /// call on.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn put_policy(&self, name: PolicyName, rules: Arc<Rules>) -> Result<RulesWritten, BufferError> {
        policies::put_policy(self, name, rules).await
    }

    /// Changes the rules of a policy by a JSON merge patch. `parse` checks the resulting rules, which may take longer
    /// than an async worker should be blocked.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn patch_policy(
        &self,
        name: PolicyName,
        patch: Value,
        parse: fn(Value) -> Result<Rules, Refusal>,
    ) -> Result<(), BufferError> {
        policies::patch_policy(self, name, patch, parse).await
    }

    /// One policy.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn policy(&self, name: &PolicyName) -> Result<PolicyOverview, BufferError> {
        policies::policy(self, name).await
    }

    /// One policy, once its version is above `version`, or below it because a resume or reset lowered it.
    ///
    /// None when neither happened in time. A request that waits takes a slot in the share of its caller.
    /// `is_still_permitted` is called before the answer, because a permission can end during the wait.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn policy_above(
        &self,
        name: &PolicyName,
        version: Version,
        wait: Duration,
        caller: Option<&CallerId>,
        is_still_permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Option<PolicyOverview>, BufferError> {
        policies::policy_above(self, name, version, wait, caller, is_still_permitted).await
    }

    /// Policies after a name that the caller may see, in order.
    #[instrument(level = "debug", skip_all)]
    pub async fn policies(
        &self,
        after: String,
        limit: u32,
        sees: impl Fn(&PolicyName) -> bool,
    ) -> Result<Vec<PolicyOverview>, BufferError> {
        policies::policies(self, after, limit, sees).await
    }

    /// Why a policy is as it is.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn why(&self, policy: &PolicyName) -> Result<Arc<Insight>, BufferError> {
        insight::why(self, policy).await
    }

    /// All policies, the worst first.
    #[instrument(level = "debug", skip_all)]
    pub async fn overview(&self) -> Result<Arc<Glance>, BufferError> {
        insight::overview(self).await
    }

    /// What became of what has an id.
    #[instrument(level = "debug", skip_all)]
    pub async fn life(
        &self,
        id: &str,
        policy: Option<&PolicyName>,
        askable: Askable,
        sees: impl Fn(&PolicyName) -> bool + Send + Sync,
    ) -> Result<LifeStory, BufferError> {
        life::life(self, id, policy, askable, sees).await
    }

    /// What happened to a policy over time.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn series(&self, request: SeriesRequest) -> Result<Series, BufferError> {
        series::series(self, request).await
    }

    /// The steps of the current run of a policy, one by one.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn steps(
        &self,
        policy: &PolicyName,
        order: Order,
        after: Option<StepCursor>,
        limit: u32,
    ) -> Result<StepPage, BufferError> {
        step_log::steps(self, policy, order, after, limit).await
    }

    /// The steps of the current run of a policy, several together: from a step up to another one, in at most `points`
    /// buckets.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn step_buckets(
        &self,
        policy: &PolicyName,
        from: Step,
        to: Step,
        points: i64,
    ) -> Result<StepBuckets, BufferError> {
        step_log::buckets(self, policy, from, to, points).await
    }

    /// What operators and time did to a policy.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn journal(
        &self,
        policy: &PolicyName,
        from: Cursor,
        limit: u32,
    ) -> Result<Page<JournalEntry>, BufferError> {
        journal::journal(self, policy, from, limit).await
    }

    /// The history of a rollout, in the current run of its policy.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn story(&self, policy: PolicyName, rollout_id: RolloutId) -> Result<Story, BufferError> {
        ledger::story(self, policy, rollout_id).await
    }

    /// Rollouts in the order in which they arrived. Without a policy, only those of policies that the caller `sees`.
    #[instrument(level = "debug", skip_all)]
    pub async fn stories(
        &self,
        filter: StoryFilter,
        sees: impl Fn(&PolicyName) -> bool,
    ) -> Result<Page<Story>, BufferError> {
        ledger::stories(self, filter, sees).await
    }

    /// The group of the newest rollout of an execution, in the current run of a policy; none if it has no rollout there.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn latest_group(
        &self,
        policy: PolicyName,
        execution_id: ExecutionId,
    ) -> Result<Option<LatestGroup>, StoreError> {
        self.store.read(FindLatestGroup { policy, execution_id }).await
    }

    /// Checks filters that are to be tried on the groups that were decided last. Nothing is changed.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn try_filters(&self, request: TryFilters) -> Result<DryRun, BufferError> {
        dry_run::prepare(self, request).await
    }

    /// A rollout of the current run, whose payload can then be read.
    #[instrument(level = "debug", skip_all)]
    pub async fn content(&self, policy: PolicyName, rollout_id: RolloutId) -> Result<ContentReader, BufferError> {
        content::find(self, policy, rollout_id).await
    }

    /// Groups in the order in which they were opened, or the newest first.
    #[instrument(level = "debug", skip_all)]
    pub async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, BufferError> {
        ledger::groups(self, filter).await
    }

    /// Begins an export of a run, or of the current one.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn export(
        &self,
        policy: PolicyName,
        run: Option<Run>,
        filter: ExportFilter,
    ) -> Result<ExportReader, BufferError> {
        export::begin(Arc::clone(&self.store), policy, run, filter).await
    }

    /// Decides an open group now, as if it had timed out.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn close_group(&self, policy: PolicyName, group_id: GroupId) -> Result<Group, BufferError> {
        ledger::close_group(self, policy, group_id).await
    }

    /// Discards a group that is open, ready or quarantined.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn discard_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        reason: String,
    ) -> Result<Group, BufferError> {
        ledger::discard_group(self, policy, group_id, reason).await
    }

    /// Tallies of every policy.
    #[instrument(level = "debug", skip_all)]
    pub async fn stats(&self) -> Result<BTreeMap<PolicyName, Tallies>, BufferError> {
        ledger::stats(self).await
    }

    /// Updates the gauges from the tallies before a scrape.
    #[instrument(level = "debug", skip_all)]
    pub async fn refresh_gauges(&self) -> Result<(), BufferError> {
        ledger::refresh_gauges(self).await
    }

    /// Deletes unused rules until the future is dropped.
    pub async fn run_rules_cleanup(&self) {
        unused_rules::run_rules_cleanup(self).await;
    }

    /// Deletes those rules of `superseded`, found by an earlier check, that no group uses. Returns all rules that no
    /// policy uses now. Replaced rules never become those of a policy again.
    pub async fn forget_rules(&self, superseded: &BTreeSet<i64>) -> Result<BTreeSet<i64>, StoreError> {
        unused_rules::forget_rules(self, superseded).await
    }

    /// Publishes events of this replica to the other replicas and receives their notifications, until the future is
    /// dropped.
    ///
    /// Returns at once if the database belongs to one process.
    pub async fn run_replicas(&self) {
        replicas::run_replicas(self).await;
    }

    /// Keeps service time correct until the future is dropped.
    pub async fn run_clock(&self) {
        service_time::run_clock(self).await;
    }

    /// Stores the time that was reached, for the next start.
    pub async fn stop_clock(&self) -> Result<(), StoreError> {
        service_time::stop_clock(self).await
    }

    /// Checks the database's clock, and answers replicas that have asked for a check.
    pub async fn check_clock(&self) -> Result<(), StoreError> {
        service_time::check_clock(self).await
    }
}
