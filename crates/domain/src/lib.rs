//! The domain: what becomes of a rollout, from the posted trajectory to the acked batch, as pure decisions.
//!
//! Nothing here waits, reads a file or knows a database: the crate lists neither tokio nor sqlx nor axum, so the compiler
//! holds that wall. The store calls these functions under its locks, and tests call them without a store.
//!
//! In the order in which a rollout passes them:
//!
//! - [`admission`], whether there is room; [`trajectory`], what a valid rollout is; [`assemble`], which makes segments of
//!   the calls of an agent, and [`session`], which records those calls.
//! - [`ingest`] decides a rollout by the filters that [`evaluation`] has evaluated; [`finalize`] decides its group, and
//!   [`advantage`] and [`credit`] compute what its rollouts and their turns are worth.
//! - [`batch`] cuts batches of ready groups and [`lease`] is who holds one; [`staleness`], [`weights`], [`shard`] and
//!   [`samples`] say what a trainer gets. [`reads`] is for consumers whose next read acks, [`lineage`] for versions and
//!   epochs.
//! - [`sweep`] is what time does.
//! - [`scores`] come later, [`scoring`] is what follows from them, and [`score_work`] is leased by those who give them. [`evals`]
//!   are rollouts that only measure.
//!
//! Each of these has the requests and answers of the store, which are plain types, beside the decisions about them.
//!
//! - [`rules`]: the rules of a policy and the filters in them; [`policies`]: a policy as it is stored.
//! - [`formats`]: what is stored and hashed: payloads, canonical content, seals. [`blobs`]: bytes that rollouts name by their
//!   digest, as messages name [`media`] and segments name [`columns`].
//! - [`states`]: the states of groups, batches and rollouts, and who changes them; [`tally`]: how many there are of each;
//!   [`reasons`]: why they ended there.
//! - [`access`]: keys, and which policies they may access.
//! - [`looking`]: explanations, histories, exports and everything else that only reads.

pub mod clock;
pub mod ids;
pub mod states;

pub mod admission;

pub mod trajectory;

pub mod assemble;

pub mod session;

pub mod blobs;
pub mod columns;
pub mod media;
pub mod memory;
pub mod surrogates;
pub mod warnings;

pub mod ingest;

pub mod evaluation;

pub mod score_work;
pub mod scores;
pub mod scoring;

pub mod evals;

pub mod groups;

pub mod finalize;

pub mod advantage;
pub mod credit;
pub mod turn_calls;

pub mod batch;

pub mod lease;

pub mod reads;

pub mod samples;
pub mod shard;
pub mod staleness;
pub mod weights;

pub mod lineage;

pub mod sweep;

pub mod rules;

pub mod policies;

pub mod quotas;

pub mod formats;

pub mod tally;

pub mod reasons;
pub mod refusal;

pub mod pages;

pub mod consumers;

pub mod peers;

pub mod service_time;

pub mod health;

pub mod access;
pub mod facades;
pub mod looking;
