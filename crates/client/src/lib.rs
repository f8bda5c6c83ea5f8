//! An async client of the Forebay API, for agents and trainers written in Rust.
//!
//! - [`wire`]: requests, answers and problems, plain serde structs, which the service and every test use as well.
//! - `client`: a small client that retries what is safe to retry.
//! - `heartbeat`: keeps a lease alive while a trainer computes.
//!
//! An agent posts the rollouts of a task. Once the call has returned, they are stored:
//!
//! ```no_run
//! # async fn agent() -> Result<(), forebay_client::ClientError> {
//! use forebay_client::{
//!     Client,
//!     wire::{Segment, Status, Trajectory},
//! };
//!
//! let client = Client::new("http://127.0.0.1:8080")?;
//! let rollout = Trajectory {
//!     // With a name, a rollout can be posted again after any failure: the service recognises it.
//!     rollout_id: Some("task7-0".to_owned()),
//!     group_id: Some("task7".to_owned()),
//!     group_size: Some(2),
//!     status: Status::Completed,
//!     reward: Some(1.0),
//!     segments: vec![Segment {
//!         // One token of the prompt, then three of the response; the second of them came from a tool.
//!         tokens: vec![11, 12, 13, 14],
//!         loss_mask: vec![1, 0, 1],
//!         logprobs: Some(vec![-0.1, 0.0, -0.7]),
//!         ..Segment::default()
//!     }],
//!     ..Trajectory::default()
//! };
//! let receipt = client.post(&rollout).await?;
//! println!("{}: {:?}", receipt.rollout_id, receipt.verdict);
//! # Ok(())
//! # }
//! ```
//!
//! Instead of segments, an agent can post its calls to the inference engine. The service assembles the segments:
//!
//! ```no_run
//! # async fn agent() -> Result<(), forebay_client::ClientError> {
//! use forebay_client::{
//!     Client,
//!     wire::{Trajectory, Turn},
//! };
//!
//! let client = Client::new("http://127.0.0.1:8080")?;
//! let first = Turn {
//!     id: Some("c1".to_owned()),
//!     prompt_tokens: vec![1, 2, 3],
//!     tokens: vec![11, 12, 9],
//!     logprobs: Some(vec![-0.1, -0.2, -0.1]),
//!     ..Turn::default()
//! };
//! // The prompt of the second call is everything up to here, and the output of a tool.
//! let second = Turn {
//!     after: first.id.clone(),
//!     prompt_tokens: vec![8, 4, 3],
//!     tokens: vec![13, 9],
//!     logprobs: Some(vec![-0.3, -0.1]),
//!     ..Turn::default()
//! };
//! let rollout = Trajectory {
//!     rollout_id: Some("task7-1".to_owned()),
//!     reward: Some(1.0),
//!     turns: vec![first, second],
//!     ..Trajectory::default()
//! };
//! let receipt = client.post(&rollout).await?;
//! println!("{:?}", receipt.assembly);
//! # Ok(())
//! # }
//! ```
//!
//! A trainer resumes from its last saved step. It then leases a batch, computes gradients, acks the batch with its step,
//! and moves the weights only if the service has accepted the ack:
//!
//! ```no_run
//! # async fn trainer() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use forebay_client::{
//!     Client, Heartbeat,
//!     wire::{AckRequest, BatchRequest, CheckpointRequest, ResumeRequest, VersionRequest},
//! };
//!
//! let client = Client::new("http://127.0.0.1:8080")?;
//! let saved: Option<i64> = None; // The step of the newest checkpoint on disk, if there is one.
//! let resumed = client.resume("default", &ResumeRequest { step: saved, ..ResumeRequest::default() }).await?;
//! let (mut step, mut version, epoch) = (saved.unwrap_or(0), resumed.version, Some(resumed.epoch));
//! loop {
//!     // The service answers when a batch is ready, or after 30 seconds without one.
//!     let request = BatchRequest { wait_ms: Some(30_000), epoch, ..BatchRequest::default() };
//!     let Some(batch) = client.lease(&request).await? else { continue };
//!     let lease = batch.lease.clone().ok_or("a leased batch has a lease")?;
//!     let heartbeat = Heartbeat::start(client.clone(), &batch, Duration::from_secs(60))?;
//!     let samples = client.samples(&batch.batch_id, &[]).await?;
//!     // ... compute gradients from `samples` ...
//!     drop(heartbeat);
//!     client.ack(&batch.batch_id, &AckRequest { lease, step: step + 1, epoch }).await?;
//!     step += 1;
//!     // ... move the weights and save them ...
//!     client.checkpoint("default", &CheckpointRequest { step, epoch, force: None }).await?;
//!     version += 1;
//!     client.publish("default", &VersionRequest { version, step: Some(step), uri: None, epoch, force: None }).await?;
//! }
//! # }
//! ```

#![warn(missing_docs)]

mod client;
mod heartbeat;

/// The bodies of the API.
pub use forebay_wire as wire;

pub use client::{
    Client, ClientError, ClientOptions, Export, RetryPolicy, SILENCE_TIMEOUT, TransportError, install_tls_provider,
    is_named_authority,
};
pub use heartbeat::Heartbeat;
