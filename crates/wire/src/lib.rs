//! The bodies of the API. Each concept has one noun, which is the same in the service and in SQL.
//!
//! Requests with unknown fields are refused. Answers may gain fields, so readers ignore fields that they do not know.
//! Timestamps are RFC 3339 text; names of durations end with the unit.

#![warn(missing_docs)]

/// The media type of an Arrow IPC stream, for trajectories and for samples.
pub const ARROW_STREAM: &str = "application/vnd.apache.arrow.stream";

mod admission;
mod advantage;
mod batch;
mod content;
mod eval;
mod export;
mod filters;
mod finite;
mod history;
mod import;
mod key;
mod ledger;
mod numbers;
mod object;
mod policy;
mod problem;
mod rules;
mod score;
mod session;
mod text;
mod trajectory;
mod turn;
mod upload;
mod why;

pub use admission::{Admission, AdmissionRequest};
pub use advantage::{
    Advantage, AdvantageName, Gdpo, GdpoKind, Gigpo, GigpoKind, Norm, TurnReturn, TurnReturnKind, Whiten,
};
pub use batch::{
    AckRequest, BatchDescriptor, BatchPage, BatchRequest, BatchState, ExtendRequest, NackRequest, Sample, ShardBalance,
    ShardCount, VersionRange,
};
pub use content::{
    ContentMessage, Delivered, MessagePage, SegmentSummary, SegmentVersions, TokenMap, TokenWindow, TrajectoryContent,
};
pub use eval::{
    EvalDifference, EvalList, EvalRollout, EvalTask, EvalTaskList, EvalTaskResult, EvalVersion, PassAt, Purpose,
    SuiteEvals, SuiteInfo, SuiteRequest,
};
pub use export::{ExportCounts, ExportResult, ExportSummary, ExportedRollout};
pub use filters::{
    FailedFilter, FilterNames, FilterVariable, GroupOutcomes, LookedAt, RolloutOutcomes, TriedChange, TriedGroups,
    TriedOutcome, TriedRollouts, TriedState, TryNote, TryRequest, TryResult, Unjudged,
};
pub use history::{JournalEntry, JournalPage, NumberSpread, PolicySeries, PolicySteps, StepBucket, StepInfo};
pub use import::{IMPORT_REFUSALS_MAX, ImportRefusal, ImportReport, ImportVerdicts};
pub use key::{ApiKey, KeyCreated, KeyInfo, KeyPage, KeyRequest, Role, WhoAmI};
pub use ledger::{
    CloseRequest, DiscardRequest, GroupInfo, GroupPage, GroupState, Health, ListOrder, PolicyStats, RolloutState,
    Stats, StoryGroup, TrainedVersions, TrajectoryPage, TrajectoryStory,
};
pub use numbers::{Logprobs, Mask, Number};
pub use object::{Components, NamedObjects, Object};
pub use policy::{
    CheckpointRequest, CheckpointResponse, HeldBatch, OpenGroup, PolicyList, PolicyStatus, ResetRequest, ResetResponse,
    ResumeRequest, ResumeResponse, VersionRequest, Waiting, WaitingConsumer, WaitingEnvironment,
};
pub use problem::{PROBLEM_JSON, Problem, Violation};
pub use rules::{
    AdmissionRules, AfterWait, BacklogRules, BatchOrder, BatchRules, ColumnDtype, ColumnRetention, ColumnRows,
    ColumnRule, EnvironmentRules, FilterAction, FilterRule, FilterScope, GroupRules, LeaseRules, LossWeighting, OnDrop,
    PolicyRules, RecordRules, Requirement, RetentionRules, Retries, ScoreRules, ScoreWork, ScoreWorkPer, SessionRules,
    Settle, StalenessAction, StalenessRules,
};
pub use score::{
    ScoreExtendRequest, ScoreExtended, ScoreInclude, ScoreInfo, ScoreItem, ScoreItemRollout, ScoreLeaseRequest,
    ScoreLeases, ScoreLine, ScoreList, ScoreOmitted, ScoreReceipt, ScoreRequest, ScoreRetried, ScoreRetryRequest,
    ScoreTurn, SegmentText,
};
pub use session::{
    AbortRequest, BaseUrls, FinishRequest, SavedState, SessionAssembly, SessionBreak, SessionDropped, SessionEnded,
    SessionFinish, SessionInfo, SessionModel, SessionOpened, SessionPage, SessionPolicy, SessionRequest, SessionResume,
    SessionState, SessionTurn, SessionTurns,
};
pub use text::{has_lone_surrogates, replace_lone_surrogates, replace_lone_surrogates_in};
pub use trajectory::{
    BulkLine, ColumnUpload, MediaSpan, Receipt, ReceiptGroup, Sampling, Segment, Status, Trajectory, TurnSpan, Verdict,
    VersionSpan,
};
pub use turn::{Assembly, DroppedCalls, Turn};
pub use upload::Upload;
pub use why::{
    IdKind, IdMatch, IdWhy, LifeStep, Overview, OverviewPolicy, OverviewReward, OverviewStaleness, PolicyCondition,
    PolicyWhy, WhyCause, WhyFinding, WhyNumbers,
};
