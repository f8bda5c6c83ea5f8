//! Bodies of calls and of their answers. They take bytes from one budget, which bodies keep as long as their calls are in
//! flight.

use std::{cell::RefCell, time::Duration};

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use forebay_bounds::budget::{
    Owner, Shares,
    arriving::{Arriving, Limits, Unread},
};
use forebay_bounds::work;
use forebay_domain::{ids::SessionId, surrogates::LoneSurrogates};
use forebay_gateway::{DialectError, structure};
use forebay_wire::{has_lone_surrogates, replace_lone_surrogates_in};
use http_body_util::BodyExt as _;

use crate::Agents;

/// How long the body of a refused call is read and discarded. A client that still writes would not read the answer.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// When an agent repeats a call for which there is no memory.
const RETRY_AFTER_S: u32 = 1;

/// A body with its shares of the budget.
pub(crate) struct ReadBody {
    pub(crate) bytes: Bytes,
    pub(crate) shares: Shares,
    /// Whether halves of surrogate pairs in its texts became U+FFFD.
    pub(crate) is_repaired: bool,
}

/// Reads a body of a session's call. It waits while the budget has no room for it. If it is refused, the rest of it is
/// discarded.
pub(crate) async fn read(agents: &Agents, session: SessionId, body: Body) -> Result<ReadBody, DialectError> {
    let (bytes, shares) = read_bytes(agents, session, body, agents.options().body_bytes_max).await?;
    let replaces = agents.buffer().trajectory_limits().lone_surrogates == LoneSurrogates::Replace;
    let (bytes, is_repaired) = work::run(bytes.len(), || repaired(bytes, replaces)).await;
    Ok(ReadBody { bytes, shares, is_repaired })
}

/// The same, as it was sent.
pub(crate) async fn read_bytes(
    agents: &Agents,
    session: SessionId,
    mut body: Body,
    bytes_max: usize,
) -> Result<(Bytes, Shares), DialectError> {
    let options = agents.options();
    let limits =
        Limits { bytes_max, timeout: options.read_timeout, turn: options.read_timeout, patience: options.read_timeout };
    let announced = body.size_hint().exact().map(|bytes| bytes as usize);
    let mut arriving = Arriving::new(&agents.0.bytes, Some(owner(session)), announced, limits);
    let outcome = match arriving.admit().await {
        Ok(()) => arriving.read(&mut body).await,
        Err(unread) => Err(unread),
    };
    match outcome {
        Ok(read) => Ok(read),
        Err(unread) => {
            discard(body).await;
            Err(refused(unread, bytes_max))
        }
    }
}

/// A body without halves of surrogate pairs, and whether it had any.
fn repaired(bytes: Bytes, replaces: bool) -> (Bytes, bool) {
    if !replaces || !has_lone_surrogates(&bytes) {
        return (bytes, false);
    }
    let mut held = bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
    replace_lone_surrogates_in(&mut held);
    (held.freeze(), true)
}

/// Takes what the values of a body cost, besides its bytes, before anything is built of it.
pub(crate) async fn pay_structure(
    agents: &Agents,
    session: SessionId,
    body: &mut ReadBody,
) -> Result<(), DialectError> {
    let price = work::run(body.bytes.len(), || structure::price(&body.bytes)).await;
    let missing = price.saturating_sub(body.shares.bytes());
    pay_more(agents, session, &mut body.shares, missing).await
}

/// Takes bytes that a call needs besides its body, as long as the body's.
pub(crate) async fn pay_more(
    agents: &Agents,
    session: SessionId,
    shares: &mut Shares,
    bytes: usize,
) -> Result<(), DialectError> {
    let budget = &agents.0.bytes;
    // A call that needs more than is left of the whole budget gets all of it.
    let bytes = bytes.min(budget.bytes().saturating_sub(shares.bytes()));
    let more = budget.take_more(owner(session), shares.bytes(), bytes, Duration::ZERO).await;
    shares.push(more.map_err(|_| overloaded())?);
    Ok(())
}

/// Takes bytes of the budget for work on a call that holds `held` bytes, until so many bytes are taken. They are given back
/// with the function. Work that needs more than is left of the whole budget gets all of it.
pub(crate) fn work_memory(agents: &Agents, held: usize) -> impl Fn(usize) -> bool + Send + use<> {
    let budget = agents.0.bytes.clone();
    let shares = RefCell::new(Shares::default());
    move |bytes| {
        let mut shares = shares.borrow_mut();
        let missing = bytes.min(budget.bytes().saturating_sub(held)).saturating_sub(shares.bytes());
        missing == 0 || budget.take(missing).map(|share| shares.push(share)).is_ok()
    }
}

/// Reads the rest of a body, within bounds, and forgets it.
pub(crate) async fn discard(mut body: Body) {
    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
    // A client that goes on for longer loses its connection.
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, rest).await;
}

pub(crate) fn owner(session: SessionId) -> Owner {
    Owner::new(&session.to_string())
}

pub(crate) fn overloaded() -> DialectError {
    busy("too many bytes of calls are in flight")
}

fn busy(why: &str) -> DialectError {
    DialectError::Busy { why: why.to_owned(), retry_after_s: RETRY_AFTER_S }
}

fn refused(unread: Unread, bytes_max: usize) -> DialectError {
    let invalid = |why: String| DialectError::Invalid { field: "body".to_owned(), why };
    match unread {
        Unread::TooLarge => DialectError::BodyTooLarge { bytes_max: bytes_max as u64 },
        Unread::Full => overloaded(),
        Unread::NoMemory => busy("the system has no memory for the call"),
        Unread::Incomplete => invalid("ended before its announced length".to_owned()),
        Unread::Late(_) | Unread::Slow => invalid(unread.too_slow().unwrap_or_default()),
    }
}
