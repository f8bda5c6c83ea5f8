//! Path and query parameters, parsed once into domain types.

use axum::{
    extract::{FromRequestParts, rejection::PathRejection},
    http::{Uri, request::Parts},
};
use forebay_domain::{
    access::{Grant, key::KeyId},
    clock::Timestamp,
    ids::{BatchId, BlobDigest, Epoch, InvalidDigest, InvalidId, PolicyName, SessionId, Step, Version},
    pages::{Cursor, Order},
    refusal::Refusal,
    session::Session,
    staleness,
};
use forebay_formats::Format;
use forebay_wire::{ListOrder, TrainedVersions};
use serde::de::DeserializeOwned;

use crate::{
    Api,
    codecs::explain::explain,
    http::{guard::Caller, problem::Failure},
};

/// The default number of entries in a page.
pub(crate) const PAGE_DEFAULT: u32 = 100;

/// The largest number of entries in a page.
const PAGE_MAX: u32 = 1_000;

/// Query parameters. The error of an unknown or malformed parameter names it.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Api> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _api: &Api) -> Result<Self, Failure> {
        query(&parts.uri).map(Self)
    }
}

/// Parses the query of a URI.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, Failure> {
    // The query is checked first, because the form decoder would silently replace invalid UTF-8.
    let text = percent_encoding::percent_decode_str(uri.query().unwrap_or_default()).decode_utf8();
    if text.is_err() {
        return Err(Failure::invalid("", "the query is not UTF-8"));
    }
    let query = axum::extract::Query::<T>::try_from_uri(uri);
    query.map(|query| query.0).map_err(|error| {
        let text = error.body_text();
        let text = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
        // If the parser knows which parameter the message is about, it puts the name before the message.
        let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        match text.split_once(": ").filter(|(name, _)| is_name(name)) {
            Some((name, message)) => Failure::invalid(name, explain(message)),
            None => Failure::invalid("", explain(text)),
        }
    })
}

pub(crate) struct PolicyPath(pub(crate) PolicyName);

impl FromRequestParts<Api> for PolicyPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let Caller(grant) = Caller::from_request_parts(parts, api).await?;
        let name = path(parts, api).await?;
        policy(&grant, "policy", Some(&name)).map(Self)
    }
}

/// The suite of a policy in a path. The policy must be one that the caller may access.
pub(crate) struct SuitePath(pub(crate) PolicyName, pub(crate) String);

impl FromRequestParts<Api> for SuitePath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let Caller(grant) = Caller::from_request_parts(parts, api).await?;
        let path = axum::extract::Path::<(String, String)>::from_request_parts(parts, api).await;
        let (name, suite) = path.map_err(|error: PathRejection| Failure::invalid("", error.body_text()))?.0;
        Ok(Self(policy(&grant, "policy", Some(&name))?, suite))
    }
}

/// The digest of an upload in a path.
pub(crate) struct DigestPath(pub(crate) BlobDigest);

impl FromRequestParts<Api> for DigestPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let text = path(parts, api).await?;
        text.parse().map(Self).map_err(|error: InvalidDigest| Failure::invalid("digest", error.to_string()))
    }
}

/// The batch in a path. Its policy must be one that the caller may access.
pub(crate) struct BatchPath(pub(crate) BatchId);

impl FromRequestParts<Api> for BatchPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let Caller(grant) = Caller::from_request_parts(parts, api).await?;
        let unknown = || Failure::from(Refusal::Unknown("the batch"));
        // A malformed id is answered like the id of a batch that does not exist.
        let id: BatchId = path(parts, api).await?.parse().map_err(|_| unknown())?;
        // The policy is only known after reading the batch, which is not necessary for a caller that may access all
        // policies.
        if !grant.policies.are_all() && !grant.sees(&api.buffer.batch(id).await?.policy) {
            return Err(unknown());
        }
        Ok(Self(id))
    }
}

/// The session in a path. The caller must be allowed to access all policies whose rollouts it records.
pub(crate) struct SessionPath(pub(crate) Box<Session>);

impl FromRequestParts<Api> for SessionPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let Caller(grant) = Caller::from_request_parts(parts, api).await?;
        let unknown = || Failure::from(Refusal::Unknown("the session"));
        // A malformed id is answered like the id of a session that does not exist.
        let id: SessionId = path(parts, api).await?.parse().map_err(|_| unknown())?;
        let session = api.buffer.session(id).await?;
        if sees_session(&grant, &session) { Ok(Self(Box::new(session))) } else { Err(unknown()) }
    }
}

/// Whether a caller may access all policies whose rollouts a session records.
pub(crate) fn sees_session(grant: &Grant, session: &Session) -> bool {
    grant.policies.are_all() || session.policies.iter().all(|policy| grant.sees(&policy.policy))
}

/// The import format in a path.
pub(crate) struct FormatPath(pub(crate) &'static Format);

impl FromRequestParts<Api> for FormatPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let name = path(parts, api).await?;
        forebay_formats::format(&name).map(Self).ok_or_else(|| Refusal::Unknown("the import format").into())
    }
}

pub(crate) struct KeyPath(pub(crate) KeyId);

impl FromRequestParts<Api> for KeyPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        let id = path(parts, api).await?;
        KeyId::parse(&id).map(Self).ok_or_else(|| Refusal::Unknown("the key").into())
    }
}

async fn path(parts: &mut Parts, api: &Api) -> Result<String, Failure> {
    let path = axum::extract::Path::<String>::from_request_parts(parts, api).await;
    path.map(|path| path.0).map_err(|error: PathRejection| Failure::invalid("", error.body_text()))
}

/// The policy that a request names, or else the default policy. It must be one that the caller may access.
pub(crate) fn policy(grant: &Grant, pointer: &str, name: Option<&str>) -> Result<PolicyName, Failure> {
    let policy = optional(pointer, name, PolicyName::parse)?.unwrap_or_default();
    grant.check(&policy)?;
    Ok(policy)
}

/// Parses an optional id of a body or query.
pub(crate) fn optional<T>(
    pointer: &str,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, InvalidId>,
) -> Result<Option<T>, Failure> {
    text.map(parse).transpose().map_err(|error| Failure::invalid(pointer, error.to_string()))
}

/// Parses a step of a body.
pub(crate) fn step(pointer: &str, step: i64) -> Result<Step, Failure> {
    natural(pointer, step).map(Step)
}

/// Parses a version of a body or query.
pub(crate) fn version(pointer: &str, version: i64) -> Result<Version, Failure> {
    natural(pointer, version).map(Version)
}

/// Parses an optional epoch of a body.
pub(crate) fn epoch(epoch: Option<i64>) -> Option<Epoch> {
    epoch.map(Epoch)
}

fn natural(pointer: &str, number: i64) -> Result<i64, Failure> {
    if number < 0 { Err(Failure::invalid(pointer, "must be 0 or above")) } else { Ok(number) }
}

/// Checks a text of a body: its length is bounded and it has no control characters.
pub(crate) fn text(pointer: &str, text: String, bytes_max: usize) -> Result<String, Failure> {
    if text.is_empty() || text.len() > bytes_max || text.chars().any(char::is_control) {
        return Err(Failure::invalid(pointer, format!("must be 1 to {bytes_max} bytes without control characters")));
    }
    Ok(text)
}

/// The first character of the cursors of a list that begins with its newest entries.
const NEWEST_FIRST: char = 'n';

/// Parses where a page begins. A cursor has the order of its list, so the order can be left out with it.
pub(crate) fn cursor(order: Option<ListOrder>, after: Option<&str>) -> Result<Cursor, Failure> {
    let order = order.map(|order| match order {
        ListOrder::Oldest => Order::Oldest,
        ListOrder::Newest => Order::Newest,
    });
    let Some(after) = after else { return Ok(Cursor::first(order.unwrap_or_default())) };
    let from = match after.strip_prefix(NEWEST_FIRST) {
        Some(key) => Cursor::Before(row_key(key)?),
        None => Cursor::After(row_key(after)?),
    };
    if order.is_some_and(|order| order != from.order()) {
        return Err(Failure::invalid("after", "is of a page in the other `order`; leave `order` out, or `after`"));
    }
    Ok(from)
}

/// Parses the key of a row in a cursor.
pub(crate) fn row_key(text: &str) -> Result<i64, Failure> {
    text.parse().map_err(|_| Failure::invalid("after", "must be the `next` of an earlier page"))
}

/// Checks the size of a page.
pub(crate) fn page_limit(limit: Option<u32>) -> Result<u32, Failure> {
    match limit.unwrap_or(PAGE_DEFAULT) {
        limit @ 1..=PAGE_MAX => Ok(limit),
        _ => Err(Failure::invalid("limit", format!("must be 1 to {PAGE_MAX}"))),
    }
}

/// The cursor of the next page on the wire.
pub(crate) fn next(next: Option<Cursor>) -> Option<String> {
    next.map(|next| match next {
        Cursor::After(key) => key.to_string(),
        Cursor::Before(key) => format!("{NEWEST_FIRST}{key}"),
    })
}

/// The versions of trained tokens on the wire.
pub(crate) fn trained_versions(versions: Option<staleness::TrainedVersions>) -> Option<TrainedVersions> {
    versions.map(|versions| TrainedVersions { min: versions.oldest.0, max: versions.newest.0 })
}

/// Parses a time in a query.
pub(crate) fn moment(pointer: &str, text: Option<&str>) -> Result<Option<Timestamp>, Failure> {
    let parse = |text| {
        Timestamp::parse(text).ok_or_else(|| Failure::invalid(pointer, "must be a time such as 2026-01-31T12:00:00Z"))
    };
    text.map(parse).transpose()
}

/// A time on the wire.
pub(crate) fn time(time: Option<Timestamp>) -> Option<String> {
    time.map(|time| time.to_string())
}
