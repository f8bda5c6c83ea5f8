//! What only looks: lists, one rollout's life and content, explanations, exports, dry runs and the doctor's
//! examination. None of it changes anything. Lists and pages examine a bounded number of rows; only the doctor reads
//! all.

mod content;
pub mod dry_run;
pub mod examine;
pub mod export;
pub mod insight;
pub mod ledger;
pub mod life;
pub mod step_log;
