//! The port of the buffer: what it needs from a store, as one small trait per stage.
//!
//! `store` implements these traits and imports the buffer; the buffer never imports `store`. A method is one atomic
//! operation, and its effect is durable when it returns. No transaction handle crosses a trait. A store creates no ids,
//! and the time is an argument.
//!
//! [`teachers`] is the connection to models that score segments, and [`conversations`] to what reads the messages of calls.

pub use self::{
    admission::AdmissionStore,
    askers::AskerStore,
    clock::ClockStore,
    conversations::{Conversation, Conversations, NoConversations},
    diagnosis::DiagnosisStore,
    dry_run::DryRunStore,
    exports::ExportStore,
    facades::FacadeStore,
    groups::GroupStore,
    health::HealthStore,
    history::HistoryStore,
    ingest::IngestStore,
    insight::InsightStore,
    journal::JournalStore,
    leases::LeaseStore,
    ledger::LedgerStore,
    lineage::LineageStore,
    peers::Peers,
    policies::PolicyStore,
    reads::ReadStore,
    samples::SampleStore,
    sessions::SessionStore,
    steps::StepStore,
    sweep::SweepStore,
    teachers::{NoTeachers, TeacherFault, Teachers, Unscored},
};

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
pub mod peers;
pub mod policies;
pub mod reads;
pub mod samples;
pub mod sessions;
pub mod steps;
pub mod sweep;
pub mod teachers;

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
