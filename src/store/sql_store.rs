//! The one implementation of [`Store`]: hands each operation to a dialect.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use tokio::sync::watch;

use super::{
    Admit, Answer, Batch, BatchFilter, BatchMember, BundleOutcome, Claim, ClaimAnswer, ClockReading, Decide,
    Examination, Expired, Group, GroupFilter, Health, Ingest, KeyFilter, LeaseProof, Page, Peers, Policy, Publish,
    Resume, Resumed, RulesOfGroups, RulesWritten, Store, StoreError, StoredPayload, Story, StoryFilter, Tallies,
    WaitingFor, WriteRules,
    dialect::{Dialect, Op},
    gather::Gather,
    ops::{
        admission::ExpireAdmissions,
        clock::{AskClock, CorrectClock, MarkClock, ReadClock},
        epochs::BeginEpochs,
        examine::{Examine, GroupMembers, Integrity},
        group::{CloseGroup, DecideOverdue, DiscardGroup, OverdueGroups},
        keys::{CreateKey, ListKeys, RevokeKey, WriteKeyUses},
        lease::{Ack, Extend, Nack, QuarantineDamaged, Readmit},
        lineage::{Checkpoint, Reset},
        policy::{FindPolicy, ListPolicies, PublishVersion, ReadTallies, ReadWaiting},
        samples::{BatchMembers, FindBatch, ReadPayloads},
        sweep::{AnythingDue, DiscardStragglers, ExpireLeases, FoldTallies, MayFoldTallies, Ping, Probe, Retire},
        upkeep::{FindRulesOfGroups, ForgetRules, SupersededRules},
    },
};
use crate::{
    access::key::{KeyId, NewKey, StoredKey},
    buffer::{
        admission::Admitted,
        finalize::Cause,
        ids::{BatchId, Epoch, GroupId, GroupPk, PolicyName, PolicyPk, RolloutPk, Run, Step},
        payload::Codec,
    },
    clock::Timestamp,
};

/// A store in a SQL database.
pub(super) struct SqlStore<D> {
    dialect: Arc<D>,
    gather: Arc<Gather>,
    /// Something was written since the clock was marked: an idle service writes nothing, marks included.
    wrote: AtomicBool,
}

impl<D: Dialect> SqlStore<D> {
    pub(super) fn new(dialect: D) -> Self {
        Self { dialect: Arc::new(dialect), gather: Arc::new(Gather::new(D::INGESTS)), wrote: AtomicBool::new(true) }
    }
}

impl<D: Dialect> SqlStore<D> {
    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        self.wrote.store(true, Ordering::Release);
        self.dialect.write(op).await
    }
}

#[async_trait]
impl<D: Dialect> Store for SqlStore<D> {
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError> {
        self.wrote.store(true, Ordering::Release);
        self.gather.ingest(&self.dialect, ingest).await
    }

    async fn admit(&self, admit: Admit) -> Answer<Admitted> {
        self.write(admit).await
    }

    async fn close_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        decide: Arc<dyn Decide>,
        now: Timestamp,
    ) -> Answer<Group> {
        self.write(CloseGroup { policy, group_id, decide, now }).await
    }

    async fn discard_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        reason: String,
        now: Timestamp,
    ) -> Answer<Group> {
        self.write(DiscardGroup { policy, group_id, reason, now }).await
    }

    async fn claim(&self, claim: Claim) -> Answer<ClaimAnswer> {
        self.write(claim).await
    }

    async fn extend(&self, proof: LeaseProof, ttl_s: u64) -> Answer<Batch> {
        self.write(Extend { proof, ttl_s }).await
    }

    async fn ack(&self, proof: LeaseProof, step: Step) -> Answer<Batch> {
        self.write(Ack { proof, step }).await
    }

    async fn nack(&self, proof: LeaseProof, reason: Option<String>, groups: Vec<GroupId>) -> Answer<Batch> {
        self.write(Nack { proof, reason, groups }).await
    }

    async fn readmit(&self, batch_id: BatchId) -> Answer<Batch> {
        self.write(Readmit { batch_id }).await
    }

    async fn quarantine_damaged(&self, batch_id: BatchId, group: GroupPk) -> Result<(), StoreError> {
        self.write(QuarantineDamaged { batch_id, group }).await
    }

    async fn checkpoint(
        &self,
        policy: PolicyName,
        step: Step,
        force: bool,
        epoch: Option<Epoch>,
        now: Timestamp,
    ) -> Answer<(Step, u64)> {
        self.write(Checkpoint { policy, step, force, epoch, now }).await
    }

    async fn resume(&self, resume: Resume) -> Answer<Resumed> {
        self.write(resume).await
    }

    async fn reset(&self, policy: PolicyName, epoch: Option<Epoch>, now: Timestamp) -> Answer<(Run, Epoch, u64)> {
        self.write(Reset { policy, epoch, now }).await
    }

    async fn begin_epochs(&self, first: Epoch) -> Result<u64, StoreError> {
        self.write(BeginEpochs(first)).await
    }

    async fn publish(&self, publish: Publish) -> Answer<bool> {
        self.write(PublishVersion(publish)).await
    }

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

    async fn batch(&self, batch_id: BatchId) -> Result<Option<Batch>, StoreError> {
        self.dialect.read(FindBatch(batch_id)).await
    }

    async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, StoreError> {
        self.dialect.read(filter).await
    }

    async fn batch_members(&self, batch: Batch) -> Result<Option<Vec<BatchMember>>, StoreError> {
        self.dialect.read(BatchMembers(batch)).await
    }

    async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError> {
        self.dialect.read(ReadPayloads(rollouts)).await
    }

    async fn stories(&self, filter: StoryFilter) -> Result<Page<Story>, StoreError> {
        self.dialect.read(filter).await
    }

    async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, StoreError> {
        self.dialect.read(filter).await
    }

    async fn create_key(&self, key: NewKey, live_max: u32) -> Answer<StoredKey> {
        self.write(CreateKey { key, live_max }).await
    }

    async fn keys(&self, filter: KeyFilter) -> Result<Vec<StoredKey>, StoreError> {
        self.dialect.read(ListKeys(filter)).await
    }

    async fn revoke_key(&self, key_id: KeyId, now: Timestamp) -> Result<Option<StoredKey>, StoreError> {
        self.write(RevokeKey { key_id, now }).await
    }

    async fn write_key_uses(&self, uses: Vec<(KeyId, Timestamp)>) -> Result<(), StoreError> {
        self.write(WriteKeyUses(uses)).await
    }

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

    async fn expire_leases(&self, now: Timestamp, limit: u32) -> Result<Expired, StoreError> {
        self.write(ExpireLeases { now, limit }).await
    }

    async fn overdue_groups(&self, now: Timestamp, limit: u32) -> Result<Vec<GroupPk>, StoreError> {
        self.dialect.read(OverdueGroups { now, limit }).await
    }

    async fn decide_overdue(
        &self,
        group: GroupPk,
        cause: Cause,
        decide: Arc<dyn Decide>,
        now: Timestamp,
    ) -> Result<Option<(PolicyName, Group)>, StoreError> {
        self.write(DecideOverdue { group, cause, decide, now }).await
    }

    async fn retire(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(Retire { now, limit }).await
    }

    async fn expire_admissions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(ExpireAdmissions { now, limit }).await
    }

    async fn discard_stragglers(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.write(DiscardStragglers { now, limit }).await
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

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.dialect.read(Examine).await
    }

    async fn integrity(&self) -> Result<Vec<String>, StoreError> {
        self.dialect.read(Integrity).await
    }

    async fn group_members(&self, after: GroupPk, groups: u32) -> Result<Vec<BatchMember>, StoreError> {
        self.dialect.read(GroupMembers { after, groups }).await
    }

    async fn read_clock(&self) -> Result<ClockReading, StoreError> {
        self.dialect.read(ReadClock).await
    }

    async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError> {
        if !self.wrote.swap(false, Ordering::AcqRel) && answers.is_none() {
            return Ok(());
        }
        self.dialect.write(MarkClock { now, answers }).await
    }

    async fn correct_clock(&self, from_us: i64, to_us: i64, now: Timestamp) -> Result<bool, StoreError> {
        self.dialect.write(CorrectClock { from_us, to_us, now }).await
    }

    async fn ask_clock(&self) -> Result<i64, StoreError> {
        self.dialect.write(AskClock).await
    }

    fn payload_codec(&self) -> Codec {
        D::PAYLOADS
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        self.dialect.peers()
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.dialect.vitals().watch()
    }

    async fn ping(&self) -> Result<(), StoreError> {
        // An idle service writes nothing, so only after a failure is there something to find out by writing.
        if self.dialect.vitals().health() == Health::Writable {
            self.dialect.write(Ping).await
        } else {
            self.dialect.write(Probe).await
        }
    }

    async fn close(&self) {
        self.dialect.close().await;
    }
}
