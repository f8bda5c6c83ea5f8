//! The port of the buffer: what it needs from a store, as one small trait per stage.
//!
//! The domain owns these traits with their requests and answers, so that it does not depend on a database. `store`
//! implements them and imports the buffer; the buffer never imports `store`. A method is one atomic operation, and its
//! effect is durable when it returns. No transaction handle crosses a trait. The decisions that an operation makes
//! under its locks are functions of the buffer's stages. A store creates no ids, and the time is an argument.
//!
//! The modules are, in the order of the stages: [`policies`], [`admission`], [`ingest`], [`groups`], [`leases`],
//! [`reads`], [`samples`], [`lineage`], [`ledger`], [`insight`], [`exports`], [`dry_run`], [`history`], [`steps`], [`journal`], [`askers`], [`sessions`], [`sweep`]; then the modules that all stages use: [`clock`], [`diagnosis`],
//! [`health`], [`pages`], [`peers`]. [`facades`] is for the protocols of other rollout buffers. [`teachers`] is the connection to models that score segments, and [`conversations`] to what
//! reads the messages of calls.

pub mod admission;
pub mod askers;
pub mod clock;
pub mod conversations;
pub mod diagnosis;
pub mod dry_run;
pub mod error;
pub mod exports;
pub mod facades;
pub mod groups;
pub mod health;
pub mod history;
pub mod ingest;
pub mod insight;
pub mod journal;
pub mod leases;
pub mod ledger;
pub mod lineage;
pub mod pages;
pub mod peers;
pub mod policies;
pub mod reads;
pub mod samples;
pub mod sessions;
pub mod steps;
pub mod sweep;
pub mod teachers;

pub use self::{
    admission::{AdmissionStore, Admit},
    askers::{Asker, AskerStore},
    clock::{ClockReading, ClockStore, CorrectClock},
    conversations::{Conversation, Conversations, NoConversations},
    diagnosis::{Contradiction, DiagnosisStore, Examination, PayloadPlaces},
    dry_run::{DryRunStore, FindPastGroups, PastGroup, PastGroups, PastRollout},
    error::{DatabaseFailure, StoreError},
    exports::{ExportCursor, ExportMember, ExportPage, ExportStore, ExportedPage},
    facades::{FacadeState, FacadeStore, ReadyGroup},
    groups::{CloseGroup, DecidedGroup, DiscardGroup, Group, GroupStore},
    health::{Health, HealthStore},
    history::{History, HistoryStore, ReadHistory, Snapshot, Totals},
    ingest::{Bundle, BundleOutcome, Ingest, IngestStore, Ingested},
    insight::{FindId, FindLife, IdMatches, InsightStore, LastMember, LedgerFacts, Life, LifeOf, ReadFacts},
    journal::{JournalEntry, JournalStore, Notice, ReadJournal},
    leases::{
        Ack, Batch, BatchFilter, Claim, ClaimAnswer, Claimed, ExpiredLeases, Extend, LeaseProof, LeaseStore, Nack,
        Readmit,
    },
    ledger::{GroupFilter, LatestGroup, LedgerStore, Story, StoryFilter},
    lineage::{Checkpoint, Checkpointed, LineageStore, Publish, Reset, ResetDone, Resume, Resumed, VERSION_RISE_MAX},
    pages::{Cursor, Order, Page},
    peers::Peers,
    policies::{
        EnvironmentGroups, ExistingPolicy, HeldBatch, OpenGroup, Policy, PolicyGauges, PolicyStore, ReadEnvironments,
        RulesWritten, WaitingConsumer, WaitingFor, WriteRules,
    },
    reads::{AckReads, GiveBackReads, MarkRead, ReadStore, ReleaseRead},
    samples::{BatchMember, FindContent, SampleStore, SealedRow, StoredContent, StoredPayload},
    sessions::{
        CallHead, CallTexts, Delivery, EndSession, FindAnswer, KeepSession, NewSession, OpenedSession, RecordCall,
        RecordedCall, Session, SessionBounds, SessionFilter, SessionOutcome, SessionPolicy, SessionStore, StoredAnswer,
        StoredCall,
    },
    steps::{ReadStepBuckets, ReadSteps, Spread, StepBucket, StepBuckets, StepCursor, StepPage, StepRow, StepStore},
    sweep::{PayloadMoves, RulesOfGroups, SweepStore},
    teachers::{NoTeachers, TeacherFault, Teachers, Unscored},
};
use super::refusal::Refusal;

/// An answer, or a refusal of the domain. A refusal changed nothing.
pub type Answer<T> = Result<Result<T, Refusal>, StoreError>;

/// Everything that the buffer needs from a store.
pub trait Store:
    PolicyStore
    + AdmissionStore
    + IngestStore
    + GroupStore
    + LeaseStore
    + ReadStore
    + SampleStore
    + LineageStore
    + LedgerStore
    + InsightStore
    + ExportStore
    + DryRunStore
    + HistoryStore
    + StepStore
    + JournalStore
    + AskerStore
    + SweepStore
    + SessionStore
    + FacadeStore
    + ClockStore
    + DiagnosisStore
    + HealthStore
    + 'static
{
}

impl<S> Store for S where
    S: PolicyStore
        + AdmissionStore
        + IngestStore
        + GroupStore
        + LeaseStore
        + ReadStore
        + SampleStore
        + LineageStore
        + LedgerStore
        + InsightStore
        + ExportStore
        + DryRunStore
        + HistoryStore
        + StepStore
        + JournalStore
        + AskerStore
        + SweepStore
        + SessionStore
        + FacadeStore
        + ClockStore
        + DiagnosisStore
        + HealthStore
        + 'static
{
}
