//! Bodies of calls. They are taken from one budget, as long as their calls are in flight.

use std::{sync::Arc, time::Duration};

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use forebay_gateway::DialectError;
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Agents;

/// Bytes per permit of the budget.
pub(super) const PERMIT_BYTES: usize = 1 << 10;

/// How long the body of a refused call is read and discarded. A client that still writes would not read the answer.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// When an agent repeats a call for which there is no memory.
const RETRY_AFTER_S: u32 = 1;

/// A body with its share of the budget.
pub(super) struct ReadBody {
    pub(super) bytes: Bytes,
    pub(super) share: Share,
}

/// A part of the budget, which is given back when it is dropped.
pub(super) type Share = OwnedSemaphorePermit;

pub(super) fn budget(bytes: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(bytes.div_ceil(PERMIT_BYTES).min(Semaphore::MAX_PERMITS)))
}

/// Reads a body. If it is refused, the rest of it is discarded.
pub(super) async fn read(agents: &Agents, mut body: Body) -> Result<ReadBody, DialectError> {
    let timeout = agents.options().read_timeout;
    let outcome = match reserve(agents, body.size_hint().lower() as usize, timeout).await {
        Ok(share) => tokio::time::timeout(timeout, read_all(agents, &mut body, share)).await.unwrap_or_else(|_| {
            let why = format!("did not arrive within {} s", timeout.as_secs());
            Err(DialectError::Invalid { field: "body".to_owned(), why })
        }),
        Err(error) => Err(error),
    };
    if outcome.is_err() {
        discard(body).await;
    }
    outcome
}

/// Reads the rest of a body, within bounds, and forgets it.
pub(super) async fn discard(mut body: Body) {
    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
    // A client that goes on for longer loses its connection.
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, rest).await;
}

/// Takes the announced bytes from the budget, and waits for them. A body whose length is not announced takes its bytes as
/// they arrive.
async fn reserve(agents: &Agents, announced: usize, timeout: Duration) -> Result<Share, DialectError> {
    check_size(agents, announced)?;
    let permits = announced.div_ceil(PERMIT_BYTES) as u32;
    let taking = Arc::clone(&agents.0.bytes).acquire_many_owned(permits);
    let permit = tokio::time::timeout(timeout, taking).await.map_err(|_| overloaded())?;
    Ok(permit.expect("the semaphore is never closed"))
}

async fn read_all(agents: &Agents, body: &mut Body, mut share: Share) -> Result<ReadBody, DialectError> {
    let mut bytes = BytesMut::with_capacity(share.num_permits() * PERMIT_BYTES);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| DialectError::Invalid {
            field: "body".to_owned(),
            why: "ended before its announced length".to_owned(),
        })?;
        let Ok(piece) = frame.into_data() else { continue };
        let length = bytes.len() + piece.len();
        check_size(agents, length)?;
        let missing = length.div_ceil(PERMIT_BYTES).saturating_sub(share.num_permits());
        if missing > 0 {
            // Waiting here would hold up others, because this body already holds a part of the budget.
            let more = Arc::clone(&agents.0.bytes).try_acquire_many_owned(missing as u32);
            share.merge(more.map_err(|_| overloaded())?);
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(ReadBody { bytes: bytes.freeze(), share })
}

fn check_size(agents: &Agents, bytes: usize) -> Result<(), DialectError> {
    let bytes_max = agents.options().body_bytes_max;
    if bytes > bytes_max { Err(DialectError::BodyTooLarge { bytes_max: bytes_max as u64 }) } else { Ok(()) }
}

fn overloaded() -> DialectError {
    let why = "too many bytes of calls are in flight".to_owned();
    DialectError::Busy { why, retry_after_s: RETRY_AFTER_S }
}
