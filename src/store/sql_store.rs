//! The only implementation of the port. It hands each operation to a dialect, in the order of the stages.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use forebay_domain::{
    admission::{Admit, Admitted},
    askers::Asker,
    clock::Timestamp,
    facades::{FacadeState, ReadyGroup},
    finalize::Cause,
    formats::payload::Codec,
    groups::{CloseGroup, DecidedGroup, DiscardGroup, Group},
    health::Health,
    ids::{
        BatchId, CallPk, Epoch, ExecutionId, GroupPk, PolicyName, PolicyPk, RolloutPk, Run, SessionId, SessionPk,
        Version,
    },
    ingest::{BundleOutcome, Ingest},
    lease::{Ack, Batch, BatchFilter, Claim, ClaimAnswer, ExpiredLeases, Extend, Nack, Readmit},
    lineage::{Checkpoint, Checkpointed, Publish, Reset, ResetDone, Resume, Resumed},
    looking::{
        diagnosis::{Examination, PayloadPlaces},
        dry_run::{FindPastGroups, PastGroups},
        export::{ExportPage, ExportedPage},
        history::{History, ReadHistory},
        insight::{FindId, FindLife, IdMatches, LedgerFacts, Life, ReadFacts},
        journal::{JournalEntry, Notice, ReadJournal},
        ledger::{GroupFilter, LatestGroup, Story, StoryFilter},
        steps::{ReadStepBuckets, ReadSteps, StepBuckets, StepPage},
    },
    pages::Page,
    policies::{EnvironmentGroups, Policy, PolicyGauges, ReadEnvironments, RulesWritten, WaitingFor, WriteRules},
    reads::{AckReads, GiveBackReads, MarkRead, ReleaseRead},
    samples::{BatchMember, FindContent, StoredContent, StoredPayload},
    service_time::{ClockReading, CorrectClock},
    session::{
        CallTexts, Delivery, FindAnswer, KeepSession, NewSession, OpenedSession, RecordCall, RecordedCall, Session,
        SessionFilter, SessionKeyHash, StoredAnswer, StoredCall, notes::SessionNotes,
    },
    sweep::{PayloadMoves, RulesOfGroups},
    tally::Tallies,
};
use tokio::sync::{Mutex, watch};

use super::{
    dialect::{Dialect, Op},
    group_commit::GroupCommit,
    ops::{
        admission::ExpireAdmissions,
        askers::WriteAskers,
        clock::{AskClock, MarkClock, ReadClock},
        dry_run::ListPublished,
        epochs::BeginEpochs,
        examine::{Examine, GroupMembers, Integrity},
        executions::FindLatestGroup,
        exports::LastRollout,
        facades::{FindFacadeState, ListReadyGroups, NewestMembers, WriteFacadeState},
        gauges::{ReadGauges, ReadVersions},
        group::{DecideOverdue, OverdueGroups},
        history::TakeSnapshot,
        journal::WriteNotices,
        keys::{CreateKey, ListKeys, RevokeKey, WriteKeyUses},
        lease::QuarantineDamaged,
        policy::{FindPolicy, ListPolicies, PublishVersion, ReadTallies, ReadWaiting},
        samples::{BatchMembers, FindBatch},
        session::{
            BeginFinish, DueSessions, FindCalls, FindSession, FindSessionOfKey, FindTexts, FindUnmarked, MarkCalls,
            MarkFull, NoteSession, ReopenSessions, RetireSessions,
        },
        sweep::{AnythingDue, DiscardStragglers, ExpireLeases, FoldTallies, MayFoldTallies, Ping, Probe, Retire},
        unused_rules::{FindRulesOfGroups, ForgetRules, SupersededRules},
    },
    payloads,
    snapshot_times::{Due, SnapshotTimes},
};
use crate::{
    access::{
        key::{KeyId, NewKey, StoredKey},
        key_store::{KeyFilter, KeyStore, KeyUse},
    },
    buffer::port::{
        AdmissionStore, AskerStore, ClockStore, DiagnosisStore, DryRunStore, ExportStore, FacadeStore, GroupStore,
        HealthStore, HistoryStore, IngestStore, InsightStore, JournalStore, LeaseStore, LedgerStore, LineageStore,
        Peers, PolicyStore, ReadStore, SampleStore, SessionStore, StepStore, SweepStore,
        error::{Answer, StoreError},
    },
};

/// A store in a SQL database.
pub(super) struct SqlStore<D> {
    dialect: Arc<D>,
    group_commit: Arc<GroupCommit>,
    /// Whether anything was written since the clock was last marked. An idle service writes nothing, not even marks.
    wrote: AtomicBool,
    snapshots: SnapshotTimes,
    snapshotting: Mutex<()>,
}

impl<D: Dialect> SqlStore<D> {
    pub(super) fn new(dialect: D) -> Self {
        Self {
            dialect: Arc::new(dialect),
            group_commit: Arc::new(GroupCommit::new(D::INGESTS)),
            wrote: AtomicBool::new(true),
            snapshots: SnapshotTimes::default(),
            snapshotting: Mutex::default(),
        }
    }
}

impl<D: Dialect> SqlStore<D> {
    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        self.note_write();
        self.dialect.write(op).await
    }

    fn note_write(&self) {
        self.wrote.store(true, Ordering::Release);
        self.snapshots.note_write();
    }
}

#[async_trait]
impl<D: Dialect> PolicyStore for SqlStore<D> {
    async fn write_rules(&self, write: WriteRules) -> Answer<RulesWritten> {
        self.write(write).await
    }

    async fn policy(&self, name: PolicyName) -> Result<Option<Policy>, StoreError> {
        self.dialect.read(FindPolicy(name)).await
    }

    async fn policies(&self, after: String, limit: u32) -> Result<Vec<Policy>, StoreError> {
        self.dialect.read(ListPolicies { after, limit }).await
    }

    async fn tallies(&self, policy: Option<PolicyPk>) -> Result<BTreeMap<PolicyName, Tallies>, StoreError> {
        self.dialect.read(ReadTallies(policy)).await
    }

    async fn waiting_for(&self, policy: PolicyPk, run: Run, now: Timestamp) -> Result<WaitingFor, StoreError> {
        self.dialect.read(ReadWaiting { policy, run, now }).await
    }

    async fn environments(&self, read: ReadEnvironments) -> Result<EnvironmentGroups, StoreError> {
        self.dialect.read(read).await
    }

    async fn versions(&self) -> Result<Vec<(PolicyName, Version)>, StoreError> {
        self.dialect.read(ReadVersions).await
    }

    async fn gauges(&self, policies: Vec<PolicyName>) -> Result<Vec<PolicyGauges>, StoreError> {
        self.dialect.read(ReadGauges(policies)).await
    }
}

#[async_trait]
impl<D: Dialect> AdmissionStore for SqlStore<D> {
    async fn admit(&self, admit: Admit) -> Answer<Admitted> {
        self.write(admit).await
    }

    async fn expire_admissions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(ExpireAdmissions { now, limit }).await
    }
}

#[async_trait]
impl<D: Dialect> IngestStore for SqlStore<D> {
    fn payload_codec(&self) -> Codec {
        D::PAYLOADS
    }

    async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError> {
        self.note_write();
        self.group_commit.ingest(&self.dialect, ingest).await
    }
}

#[async_trait]
impl<D: Dialect> GroupStore for SqlStore<D> {
    async fn close_group(&self, close: CloseGroup) -> Answer<Group> {
        self.write(close).await
    }

    async fn discard_group(&self, discard: DiscardGroup) -> Answer<Group> {
        self.write(discard).await
    }

    async fn overdue_groups(&self, now: Timestamp, limit: u32) -> Result<Vec<GroupPk>, StoreError> {
        self.dialect.read(OverdueGroups { now, limit }).await
    }

    async fn decide_overdue(
        &self,
        group: GroupPk,
        cause: Cause,
        now: Timestamp,
    ) -> Result<Option<DecidedGroup>, StoreError> {
        self.write(DecideOverdue { group, cause, now }).await
    }

    async fn discard_stragglers(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(DiscardStragglers { now, limit }).await
    }
}

#[async_trait]
impl<D: Dialect> LeaseStore for SqlStore<D> {
    async fn claim(&self, claim: Claim) -> Answer<ClaimAnswer> {
        self.write(claim).await
    }

    async fn extend(&self, extend: Extend) -> Answer<Batch> {
        self.write(extend).await
    }

    async fn ack(&self, ack: Ack) -> Answer<Batch> {
        self.write(ack).await
    }

    async fn nack(&self, nack: Nack) -> Answer<Batch> {
        self.write(nack).await
    }

    async fn readmit(&self, readmit: Readmit) -> Answer<Batch> {
        self.write(readmit).await
    }

    async fn expire_leases(&self, now: Timestamp, limit: u32) -> Result<Vec<ExpiredLeases>, StoreError> {
        self.write(ExpireLeases { now, limit }).await
    }

    async fn batch(&self, batch_id: BatchId) -> Result<Option<Batch>, StoreError> {
        self.dialect.read(FindBatch(batch_id)).await
    }

    async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, StoreError> {
        self.dialect.read(filter).await
    }
}

#[async_trait]
impl<D: Dialect> ReadStore for SqlStore<D> {
    async fn ack_reads(&self, ack: AckReads) -> Answer<Vec<Batch>> {
        self.write(ack).await
    }

    async fn mark_read(&self, mark: MarkRead) -> Answer<()> {
        self.write(mark).await
    }

    async fn release_read(&self, release: ReleaseRead) -> Answer<()> {
        self.write(release).await
    }

    async fn give_back_reads(&self, give_back: GiveBackReads) -> Answer<u64> {
        self.write(give_back).await
    }
}

#[async_trait]
impl<D: Dialect> SampleStore for SqlStore<D> {
    async fn batch_members(&self, batch: Batch) -> Result<Option<Vec<BatchMember>>, StoreError> {
        self.dialect.read(BatchMembers(batch)).await
    }

    async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError> {
        payloads::read(&*self.dialect, rollouts).await
    }

    async fn content(&self, find: FindContent) -> Result<Option<StoredContent>, StoreError> {
        self.dialect.read(find).await
    }

    async fn quarantine_damaged(&self, batch_id: BatchId, group: GroupPk, now: Timestamp) -> Result<(), StoreError> {
        self.write(QuarantineDamaged { batch_id, group, now }).await
    }
}

#[async_trait]
impl<D: Dialect> LineageStore for SqlStore<D> {
    async fn checkpoint(&self, checkpoint: Checkpoint) -> Answer<Checkpointed> {
        self.write(checkpoint).await
    }

    async fn resume(&self, resume: Resume) -> Answer<Resumed> {
        self.write(resume).await
    }

    async fn reset(&self, reset: Reset) -> Answer<ResetDone> {
        self.write(reset).await
    }

    async fn publish(&self, publish: Publish) -> Answer<bool> {
        self.write(PublishVersion(publish)).await
    }

    async fn begin_epochs(&self, first: Epoch) -> Result<u64, StoreError> {
        self.write(BeginEpochs(first)).await
    }
}

#[async_trait]
impl<D: Dialect> ExportStore for SqlStore<D> {
    async fn last_rollout(&self) -> Result<RolloutPk, StoreError> {
        self.dialect.read(LastRollout).await
    }

    async fn exported(&self, page: ExportPage) -> Result<ExportedPage, StoreError> {
        self.dialect.read(page).await
    }
}

#[async_trait]
impl<D: Dialect> DryRunStore for SqlStore<D> {
    async fn past_groups(&self, find: FindPastGroups) -> Result<PastGroups, StoreError> {
        self.dialect.read(find).await
    }

    async fn published(&self, policy: PolicyPk) -> Result<Vec<(Version, Timestamp)>, StoreError> {
        self.dialect.read(ListPublished(policy)).await
    }
}

#[async_trait]
impl<D: Dialect> LedgerStore for SqlStore<D> {
    async fn stories(&self, filter: StoryFilter) -> Result<Page<Story>, StoreError> {
        self.dialect.read(filter).await
    }

    async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, StoreError> {
        self.dialect.read(filter).await
    }

    async fn latest_group(
        &self,
        policy: PolicyName,
        execution_id: ExecutionId,
    ) -> Result<Option<LatestGroup>, StoreError> {
        self.dialect.read(FindLatestGroup { policy, execution_id }).await
    }
}

#[async_trait]
impl<D: Dialect> InsightStore for SqlStore<D> {
    async fn policy_facts(&self, read: ReadFacts) -> Result<LedgerFacts, StoreError> {
        self.dialect.read(read).await
    }

    async fn find_id(&self, find: FindId) -> Result<IdMatches, StoreError> {
        self.dialect.read(find).await
    }

    async fn life(&self, find: FindLife) -> Result<Option<Life>, StoreError> {
        self.dialect.read(find).await
    }
}

#[async_trait]
impl<D: Dialect> HistoryStore for SqlStore<D> {
    async fn snapshot(&self, now: Timestamp) -> Result<(), StoreError> {
        // A caller may rely on the snapshot when this returns, even if another task has begun it.
        let _one = self.snapshotting.lock().await;
        let Some(Due { since }) = self.snapshots.due(now) else { return Ok(()) };
        let taken = self.dialect.write(TakeSnapshot { now, since }).await;
        self.snapshots.done(now, taken.as_ref().ok());
        taken.map(drop)
    }

    async fn history(&self, read: ReadHistory) -> Result<History, StoreError> {
        self.dialect.read(read).await
    }
}

#[async_trait]
impl<D: Dialect> StepStore for SqlStore<D> {
    async fn steps(&self, read: ReadSteps) -> Result<StepPage, StoreError> {
        self.dialect.read(read).await
    }

    async fn step_buckets(&self, read: ReadStepBuckets) -> Result<StepBuckets, StoreError> {
        self.dialect.read(read).await
    }
}

#[async_trait]
impl<D: Dialect> JournalStore for SqlStore<D> {
    async fn journal(&self, read: ReadJournal) -> Result<Page<JournalEntry>, StoreError> {
        self.dialect.read(read).await
    }

    async fn note(&self, notices: Vec<Notice>) -> Result<(), StoreError> {
        self.write(WriteNotices(notices)).await
    }
}

#[async_trait]
impl<D: Dialect> AskerStore for SqlStore<D> {
    async fn write_askers(&self, askers: Vec<Asker>, now: Timestamp) -> Result<(), StoreError> {
        self.write(WriteAskers { askers, now }).await
    }
}

#[async_trait]
impl<D: Dialect> SweepStore for SqlStore<D> {
    async fn anything_due(&self, now: Timestamp) -> Result<bool, StoreError> {
        self.dialect.read(AnythingDue(now)).await
    }

    async fn fold_tallies(&self) -> Result<(), StoreError> {
        // An idle service writes nothing.
        if D::APPENDS_TALLIES && self.dialect.read(MayFoldTallies).await? {
            self.dialect.write(FoldTallies).await?;
        }
        Ok(())
    }

    async fn retire(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(Retire { now, limit }).await
    }

    async fn look_after_payloads(&self, now: Timestamp) -> Result<PayloadMoves, StoreError> {
        match self.dialect.object_care() {
            Some(care) => care.step(&*self.dialect, now).await,
            None if self.dialect.is_moving_payloads() => Ok(PayloadMoves::InBackground),
            None => Ok(PayloadMoves::Done),
        }
    }

    async fn superseded_rules(&self, limit: u32) -> Result<Vec<i64>, StoreError> {
        self.dialect.read(SupersededRules { limit }).await
    }

    async fn rules_of_groups(&self, after: GroupPk, limit: u32) -> Result<RulesOfGroups, StoreError> {
        self.dialect.read(FindRulesOfGroups { after, limit }).await
    }

    async fn forget_rules(&self, rules: Vec<i64>) -> Result<u64, StoreError> {
        self.write(ForgetRules(rules)).await
    }
}

#[async_trait]
impl<D: Dialect> SessionStore for SqlStore<D> {
    async fn open_session(&self, open: NewSession) -> Answer<OpenedSession> {
        self.write(open).await
    }

    async fn session_of_key(&self, key: SessionKeyHash) -> Result<Option<Session>, StoreError> {
        self.dialect.read(FindSessionOfKey(key)).await
    }

    async fn session(&self, session_id: SessionId) -> Result<Option<Session>, StoreError> {
        self.dialect.read(FindSession(session_id)).await
    }

    async fn sessions(&self, filter: SessionFilter) -> Result<Page<Session>, StoreError> {
        self.dialect.read(filter).await
    }

    async fn record_call(&self, record: RecordCall) -> Answer<RecordedCall> {
        self.write(record).await
    }

    async fn keep_session(&self, keep: KeepSession) -> Answer<()> {
        self.write(keep).await
    }

    async fn mark_full(&self, session: SessionPk) -> Result<(), StoreError> {
        self.write(MarkFull(session)).await
    }

    async fn note_session(&self, session: SessionPk, notes: SessionNotes) -> Result<(), StoreError> {
        self.write(NoteSession { session, notes }).await
    }

    async fn mark_calls(&self, calls: Vec<CallPk>, delivery: Delivery) -> Result<(), StoreError> {
        self.write(MarkCalls { calls, delivery }).await
    }

    async fn has_unmarked(&self, session: SessionPk, ended_after: Timestamp) -> Result<bool, StoreError> {
        self.dialect.read(FindUnmarked { session, ended_after }).await
    }

    async fn answer(&self, find: FindAnswer) -> Result<Option<StoredAnswer>, StoreError> {
        self.dialect.read(find).await
    }

    async fn session_calls(&self, session: SessionPk, after: u32, limit: u32) -> Result<Vec<StoredCall>, StoreError> {
        self.dialect.read(FindCalls { session, after, limit }).await
    }

    async fn call_texts(&self, session: SessionPk, after: u32, limit: u32) -> Result<Vec<CallTexts>, StoreError> {
        self.dialect.read(FindTexts { session, after, limit }).await
    }

    async fn begin_finish(&self, sessions: Vec<SessionId>) -> Answer<Vec<Session>> {
        self.write(BeginFinish(sessions)).await
    }

    async fn reopen_sessions(&self, sessions: Vec<SessionId>) -> Result<(), StoreError> {
        self.write(ReopenSessions(sessions)).await
    }

    async fn due_sessions(&self, now: Timestamp, limit: u32) -> Result<Vec<SessionId>, StoreError> {
        self.dialect.read(DueSessions { now, limit }).await
    }

    async fn retire_sessions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(RetireSessions { now, limit }).await
    }
}

#[async_trait]
impl<D: Dialect> FacadeStore for SqlStore<D> {
    async fn facade_state(&self, name: String, known: u64) -> Result<Option<FacadeState>, StoreError> {
        self.dialect.read(FindFacadeState { name, known }).await
    }

    async fn write_facade_state(&self, name: String, state: FacadeState) -> Result<bool, StoreError> {
        self.write(WriteFacadeState { name, state }).await
    }

    async fn ready_groups(&self, policy: PolicyName, limit: u32) -> Result<Vec<ReadyGroup>, StoreError> {
        self.dialect.read(ListReadyGroups { policy, limit }).await
    }

    async fn newest_members(&self, policy: PolicyName) -> Result<Vec<BatchMember>, StoreError> {
        self.dialect.read(NewestMembers { policy }).await
    }
}

#[async_trait]
impl<D: Dialect> ClockStore for SqlStore<D> {
    async fn read_clock(&self) -> Result<ClockReading, StoreError> {
        self.dialect.read(ReadClock).await
    }

    async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError> {
        if !self.wrote.swap(false, Ordering::AcqRel) && answers.is_none() {
            return Ok(());
        }
        self.dialect.write(MarkClock { now, answers }).await
    }

    async fn correct_clock(&self, correct: CorrectClock) -> Result<bool, StoreError> {
        self.dialect.write(correct).await
    }

    async fn ask_clock(&self) -> Result<i64, StoreError> {
        self.dialect.write(AskClock).await
    }
}

#[async_trait]
impl<D: Dialect> DiagnosisStore for SqlStore<D> {
    async fn examine(&self) -> Result<Examination, StoreError> {
        self.dialect.read(Examine).await
    }

    async fn integrity(&self) -> Result<Vec<String>, StoreError> {
        let mut found = self.dialect.read(Integrity).await?;
        found.extend(self.dialect.missing().await?);
        Ok(found)
    }

    async fn count_payloads(&self) -> Result<PayloadPlaces, StoreError> {
        payloads::count(&*self.dialect).await
    }

    async fn payload_places(&self) -> Result<PayloadPlaces, StoreError> {
        payloads::examine(&*self.dialect).await
    }

    async fn group_members(&self, after: GroupPk, groups: u32) -> Result<Vec<BatchMember>, StoreError> {
        self.dialect.read(GroupMembers { after, groups }).await
    }
}

#[async_trait]
impl<D: Dialect> HealthStore for SqlStore<D> {
    fn health(&self) -> watch::Receiver<Health> {
        self.dialect.health_reporter().watch()
    }

    async fn ping(&self) -> Result<(), StoreError> {
        // An idle service writes nothing. The store therefore writes only after a failure, to find out whether it can.
        match self.dialect.health_reporter().health() {
            Health::Writable | Health::WithoutPayloads => self.dialect.write(Ping).await,
            Health::Failing | Health::Broken => self.probe().await,
        }
    }

    async fn probe(&self) -> Result<(), StoreError> {
        self.dialect.write(Probe).await
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        self.dialect.peers()
    }

    async fn close(&self) {
        self.dialect.close().await;
    }
}

#[async_trait]
impl<D: Dialect> KeyStore for SqlStore<D> {
    async fn create_key(&self, key: NewKey, live_max: u32) -> Answer<StoredKey> {
        self.write(CreateKey { key, live_max }).await
    }

    async fn keys(&self, filter: KeyFilter) -> Result<Vec<StoredKey>, StoreError> {
        self.dialect.read(ListKeys(filter)).await
    }

    async fn revoke_key(&self, key_id: KeyId, now: Timestamp) -> Result<Option<StoredKey>, StoreError> {
        self.write(RevokeKey { key_id, now }).await
    }

    async fn write_key_uses(&self, uses: Vec<KeyUse>) -> Result<(), StoreError> {
        self.write(WriteKeyUses(uses)).await
    }
}
