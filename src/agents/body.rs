//! Bodies of calls. All bytes that agents make the service hold are taken from one budget.

use std::{sync::Arc, time::Duration};

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use forebay_gateway::DialectError;
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Agents;

/// Bytes per permit of the budget.
const PERMIT_BYTES: usize = 1 << 10;

/// How long the body of a refused call is read and discarded. A client that still writes would not read the answer.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// When an agent repeats a call for which there is no memory.
const RETRY_AFTER_S: u32 = 1;

/// A body with its share of the budget.
pub(super) struct ReadBody {
    pub(super) bytes: Bytes,
    pub(super) share: Option<OwnedSemaphorePermit>,
}

pub(super) fn budget(bytes: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(bytes.div_ceil(PERMIT_BYTES).min(Semaphore::MAX_PERMITS)))
}

/// Reads a body. If it is refused, the rest of it is discarded.
pub(super) async fn read(agents: &Agents, mut body: Body) -> Result<ReadBody, DialectError> {
    let reading = tokio::time::timeout(agents.0.options.read_timeout, read_all(agents, &mut body));
    let outcome = reading.await.unwrap_or_else(|_| {
        let why = format!("did not arrive within {} s", agents.0.options.read_timeout.as_secs());
        Err(DialectError::Invalid { field: "body".to_owned(), why })
    });
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

async fn read_all(agents: &Agents, body: &mut Body) -> Result<ReadBody, DialectError> {
    let bytes_max = agents.0.options.body_bytes_max;
    let too_large = || DialectError::BodyTooLarge { bytes_max: bytes_max as u64 };
    let announced = body.size_hint().lower() as usize;
    if announced > bytes_max {
        return Err(too_large());
    }
    let mut share = None;
    let mut held = 0;
    let mut bytes = BytesMut::new();
    take(agents, &mut share, &mut held, announced)?;
    bytes.reserve(announced);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| DialectError::Invalid {
            field: "body".to_owned(),
            why: "ended before its announced length".to_owned(),
        })?;
        let Ok(piece) = frame.into_data() else { continue };
        if bytes.len() + piece.len() > bytes_max {
            return Err(too_large());
        }
        take(agents, &mut share, &mut held, bytes.len() + piece.len())?;
        bytes.extend_from_slice(&piece);
    }
    Ok(ReadBody { bytes: bytes.freeze(), share })
}

/// Makes a share at least as large as `bytes`, or fails at once.
fn take(
    agents: &Agents,
    share: &mut Option<OwnedSemaphorePermit>,
    held: &mut usize,
    bytes: usize,
) -> Result<(), DialectError> {
    let missing = bytes.div_ceil(PERMIT_BYTES).saturating_sub(*held);
    if missing == 0 {
        return Ok(());
    }
    let more = u32::try_from(missing).ok().and_then(|n| Arc::clone(&agents.0.bytes).try_acquire_many_owned(n).ok());
    let more = more.ok_or_else(|| DialectError::Busy {
        why: "too many bytes of calls are in flight".to_owned(),
        retry_after_s: RETRY_AFTER_S,
    })?;
    *held += missing;
    match share {
        Some(share) => share.merge(more),
        None => *share = Some(more),
    }
    Ok(())
}
