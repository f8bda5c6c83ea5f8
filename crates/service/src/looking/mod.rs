//! What people and programs look at. Nothing here changes a rollout.
//!
//! [`content`] is one rollout, [`life`] what became of what has an id, [`insight`] why a policy is as it is; [`series`],
//! [`step_log`] and [`journal`] are what happened over time, [`ledger`] the lists; [`dry_run`] decides groups again by other
//! filters, [`export`] reads everything, and [`doctor`] examines a whole store.

pub mod content;
pub mod doctor;
pub mod dry_run;
pub mod export;
pub mod insight;
pub mod journal;
pub mod ledger;
pub mod life;
pub mod series;
pub mod step_log;
