//! What people and programs look at: the requests and answers that read, and what is made of them. Nothing here changes
//! a rollout.

pub mod content;
pub mod diagnosis;
pub mod dry_run;
pub mod explain;
pub mod export;
pub mod history;
pub mod insight;
pub mod journal;
pub mod ledger;
pub mod steps;
