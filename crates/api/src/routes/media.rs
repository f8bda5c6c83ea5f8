//! `/media/{digest}` and `/columns/{digest}`: bytes that are uploaded once, and that messages and segments name by their digest.
//!
//! Neither an upload nor an answer is ever in memory as a whole: parts of a few MiB are stored while the next one
//! arrives, and sent while the next one is read. An upload that broke off goes on where it was: the digest of the bytes is
//! its name, so it does not matter who sends which part.

use std::{ops::Range, sync::Arc};

use axum::{
    Json as Answer,
    body::{Body, HttpBody as _},
    extract::State,
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_bounds::budget::{Owner, Shares, arriving::InParts, paid};
use forebay_domain::{
    blobs::{Blob, KEPT_UNUSED_S, PART_BYTES, PIECE_BYTES},
    columns::COLUMN_BYTES_MAX,
    ids::BlobDigest,
    media::{MEDIA_BYTES_MAX, MEDIA_TYPE_BYTES_MAX, SCHEME},
    refusal::Refusal,
};
use forebay_service::{Buffer, blobs::Stored};
use forebay_wire::Upload;
use futures::{StreamExt as _, stream};

use crate::{
    Api,
    http::{
        accept::knows,
        body::{self, ReadBody},
        budgets::IsPaid,
        guard::{Caller, owner},
        pages::FIRST_PAGE_WAIT,
        params::{self, DigestPath},
        problem::Failure,
        uploads::Reading,
    },
    openapi::AnyContent,
};

/// Upload an image
///
/// The name of an upload is the BLAKE3 digest of its bytes. A message names it as
/// `{"type": "image_url", "image_url": {"url": "forebay:DIGEST"}}`, and it is kept as long as the payload of a rollout
/// whose messages do, and for a day after the last PUT. To upload it again changes nothing.
///
/// A PUT that broke off has stored all but its last few MiB. A PUT of nothing with the header `Content-Range: bytes */TOTAL` says how
/// many bytes are stored, and one with `Content-Range: bytes FIRST-LAST/TOTAL` goes on.
#[utoipa::path(
    put,
    path = "/media/{digest}",
    operation_id = "put_media",
    tag = "agents",
    params(
        ("digest" = String, Path, description = "BLAKE3 digest of the bytes: 64 hexadecimal digits in lower case"),
        ("Content-Range" = Option<String>, Header, description = "Which bytes these are: `bytes FIRST-LAST/TOTAL`, or `bytes */TOTAL` with no bytes"),
    ),
    request_body(content = AnyContent, content_type = "application/octet-stream", description = "The bytes. Their Content-Type is kept."),
    responses(
        (status = 201, description = "All of it is stored", body = Upload),
        (status = 200, description = "All of it was stored before", body = Upload),
        (status = 202, description = "A part of it is stored: go on behind `stored`", body = Upload),
        (status = 400, description = "The body broke off; what is stored stays"),
        (status = 409, description = "`upload-gap`: the bytes before these are not stored"),
        (status = 411, description = "`length-required`: neither Content-Length nor Content-Range says how long it is"),
        (status = 413, description = "It has more than 64 MiB"),
        (status = 422, description = "`digest-mismatch`: the digest of the bytes is another one; nothing of them is kept"),
        (status = 503, description = "The byte budget is used up, the store cannot write, or there are too many uploads that no rollout has named"),
    )
)]
pub(crate) async fn put(
    State(api): State<Api>,
    Caller(grant): Caller,
    DigestPath(digest): DigestPath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    uploaded(&api, owner(&grant), digest, &headers, body, MEDIA_BYTES_MAX).await
}

/// Upload a column
///
/// As the PUT of an image, for the columns of segments: the bytes of the rows one after the other, up to 4 GiB. The segment
/// names it as `"columns": {"NAME": {"digest": DIGEST, "bytes": TOTAL}}`.
#[utoipa::path(
    put,
    path = "/columns/{digest}",
    operation_id = "put_column",
    tag = "agents",
    params(
        ("digest" = String, Path, description = "BLAKE3 digest of the bytes: 64 hexadecimal digits in lower case"),
        ("Content-Range" = Option<String>, Header, description = "Which bytes these are: `bytes FIRST-LAST/TOTAL`, or `bytes */TOTAL` with no bytes"),
    ),
    request_body(content = AnyContent, content_type = "application/octet-stream", description = "The bytes"),
    responses(
        (status = 201, description = "All of it is stored", body = Upload),
        (status = 200, description = "All of it was stored before", body = Upload),
        (status = 202, description = "A part of it is stored: go on behind `stored`", body = Upload),
        (status = 400, description = "The body broke off; what is stored stays"),
        (status = 409, description = "`upload-gap`: the bytes before these are not stored"),
        (status = 411, description = "`length-required`: neither Content-Length nor Content-Range says how long it is"),
        (status = 413, description = "It has more than 4 GiB"),
        (status = 422, description = "`digest-mismatch`: the digest of the bytes is another one; nothing of them is kept"),
        (status = 503, description = "The byte budget is used up, the store cannot write, or there are too many uploads that no rollout has named"),
    )
)]
pub(crate) async fn put_column(
    State(api): State<Api>,
    Caller(grant): Caller,
    DigestPath(digest): DigestPath,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    uploaded(&api, owner(&grant), digest, &headers, body, COLUMN_BYTES_MAX).await
}

/// Answers to an upload of at most so many bytes.
async fn uploaded(
    api: &Api,
    owner: Owner,
    digest: BlobDigest,
    headers: &HeaderMap,
    mut body: Body,
    bytes_max: u64,
) -> Result<Response, Failure> {
    let uploaded = match Sent::of(headers, bytes_max) {
        Ok(sent) => receive(api, owner, digest, sent, &mut body).await,
        Err(failure) => Err(failure),
    };
    // Nothing of a body is left, or the client does not send it before it is asked to.
    if !is_held_back(headers, &body) {
        body::discard_body(body).await;
    }
    let (blob, status) = uploaded?;
    Ok((status, Answer(on_wire(&blob))).into_response())
}

/// Upload an image without its digest
///
/// As the PUT, but the service computes the digest. Of an upload that breaks off nothing is stored.
#[utoipa::path(
    post,
    path = "/media",
    operation_id = "post_media",
    tag = "agents",
    request_body(content = AnyContent, content_type = "application/octet-stream", description = "The bytes. Their Content-Type is kept."),
    responses(
        (status = 201, description = "It is stored", body = Upload),
        (status = 200, description = "It was stored before", body = Upload),
        (status = 413, description = "It has more bytes than a body, or than 64 MiB"),
        (status = 503, description = "The byte budget is used up, the store cannot write, or there are too many uploads that no rollout has named"),
    )
)]
pub(crate) async fn post(
    State(api): State<Api>,
    Caller(grant): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    uploaded_at_once(&api, owner(&grant), &headers, body, MEDIA_BYTES_MAX).await
}

/// Upload a column without its digest
///
/// As the PUT, but the service computes the digest. Of an upload that breaks off nothing is stored.
#[utoipa::path(
    post,
    path = "/columns",
    operation_id = "post_column",
    tag = "agents",
    request_body(content = AnyContent, content_type = "application/octet-stream", description = "The bytes"),
    responses(
        (status = 201, description = "It is stored", body = Upload),
        (status = 200, description = "It was stored before", body = Upload),
        (status = 413, description = "It has more bytes than a body may have"),
        (status = 503, description = "The byte budget is used up, the store cannot write, or there are too many uploads that no rollout has named"),
    )
)]
pub(crate) async fn post_column(
    State(api): State<Api>,
    Caller(grant): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    uploaded_at_once(&api, owner(&grant), &headers, body, COLUMN_BYTES_MAX).await
}

async fn uploaded_at_once(
    api: &Api,
    owner: Owner,
    headers: &HeaderMap,
    body: Body,
    bytes_max: u64,
) -> Result<Response, Failure> {
    body::refuse_coding(headers)?;
    let media_type = media_type(headers)?;
    if !api.buffer.is_writable() {
        return Err(Failure::unwritable());
    }
    let limits = body::BodyLimits { body_bytes_max: api.limits.body_bytes_max.min(bytes_max as usize), ..api.limits };
    let ReadBody { bytes, shares } = body::read(&api.budgets.posts, owner, limits, headers, body).await?;
    if bytes.is_empty() {
        return Err(Failure::invalid("", "an upload has at least one byte"));
    }
    let store = move |buffer: Buffer| async move {
        let stored = buffer.store_blob(bytes, media_type).await;
        drop(shares);
        stored
    };
    let (blob, is_new) = api.run_uncancelled(store).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Answer(on_wire(&blob))).into_response())
}

/// Whether the client waits for `100 Continue`, which it gets when the first of its bytes are read.
fn is_held_back(headers: &HeaderMap, body: &Body) -> bool {
    let announced = body::declared_length(headers).map(|length| length as u64);
    headers.contains_key(header::EXPECT) && announced.is_some() && body.size_hint().exact() == announced
}

/// What the head of a PUT says.
struct Sent {
    /// Bytes of the whole.
    total: u64,
    /// Which of them are in the body.
    range: Range<u64>,
    media_type: Option<String>,
}

impl Sent {
    fn of(headers: &HeaderMap, bytes_max: u64) -> Result<Self, Failure> {
        body::refuse_coding(headers)?;
        let (total, range) = match (headers.get(header::CONTENT_RANGE), body::declared_length(headers)) {
            (Some(sent), length) => {
                let range = sent.to_str().ok().and_then(content_range);
                let fits =
                    |(_, range): &(u64, Range<u64>)| length.is_none_or(|it| it as u64 == range.end - range.start);
                range.filter(fits).ok_or_else(|| {
                    Failure::new(StatusCode::BAD_REQUEST, "malformed", "The request is malformed").detail(
                        "Content-Range must be `bytes FIRST-LAST/TOTAL` with these bytes, or `bytes */TOTAL` with none",
                    )
                })?
            }
            (None, Some(length)) => (length as u64, 0..length as u64),
            (None, None) => {
                let failure = Failure::new(StatusCode::LENGTH_REQUIRED, "length-required", "The length is not known");
                return Err(failure.detail("send Content-Length, or Content-Range: bytes FIRST-LAST/TOTAL"));
            }
        };
        if total == 0 {
            return Err(Failure::invalid("", "an upload has at least one byte"));
        }
        if total > bytes_max {
            return Err(body::too_large(format!("an upload may have at most {bytes_max} bytes, this has {total}")));
        }
        Ok(Self { total, range, media_type: media_type(headers)? })
    }
}

/// The bytes of the whole, and which of them follow.
fn content_range(text: &str) -> Option<(u64, Range<u64>)> {
    let (range, total) = text.strip_prefix("bytes ")?.trim().split_once('/')?;
    let total = total.parse().ok()?;
    if range == "*" {
        return Some((total, 0..0));
    }
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < total).then_some((total, first..last + 1))
}

fn media_type(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let Some(sent) = headers.get(header::CONTENT_TYPE) else { return Ok(None) };
    let text = sent.to_str().ok().and_then(|text| text.split(';').next()).map(|text| text.trim().to_ascii_lowercase());
    match text {
        Some(text) if text == "application/x-www-form-urlencoded" => Err(body::unsupported(
            "the Content-Type is that of a form, which is what curl sends unless it is told otherwise: name the medium, for \
             example -H 'content-type: image/png'",
        )),
        Some(text) if text.len() <= MEDIA_TYPE_BYTES_MAX && text.contains('/') => Ok(Some(text)),
        _ => Err(body::unsupported("Content-Type must be a media type such as image/png")),
    }
}

/// Stores what is new in a body.
async fn receive(
    api: &Api,
    owner: Owner,
    digest: BlobDigest,
    sent: Sent,
    body: &mut Body,
) -> Result<(Blob, StatusCode), Failure> {
    if !api.buffer.is_writable() {
        return Err(Failure::unwritable());
    }
    let Sent { total, range, media_type } = sent;
    let known = api.run_uncancelled(move |buffer| async move { buffer.keep_blob(digest, total).await }).await?;
    let known = match known {
        Some(known) if known.bytes != total => return Err(mismatch(digest)),
        Some(known) if known.is_complete() => return Ok((known, StatusCode::OK)),
        Some(known) => known,
        None => Blob { digest, bytes: total, stored: 0, media_type: None, expires_at: None },
    };
    let stored = known.stored;
    if range.start > stored {
        let failure = Failure::new(StatusCode::CONFLICT, "upload-gap", "The bytes before these are not stored");
        let first = range.start;
        return Err(failure.detail(format!("{stored} bytes are stored, and these begin with byte {first}")));
    }
    // What is behind the last whole piece is sent again with the rest.
    let end = if range.end == total { total } else { range.end - range.end % PIECE_BYTES };
    if end <= stored {
        return Ok((known, StatusCode::ACCEPTED));
    }
    let first = (range.end - range.start).min(PART_BYTES);
    let mut parts = body::in_parts(&api.budgets.posts, owner, api.limits, first as usize).await?;
    if !parts.skip(body, stored - range.start).await.map_err(body::unread_part)? {
        return Err(body::incomplete());
    }
    let stored = store(api, &Blob { media_type, ..known.clone() }, end, &mut parts, body).await?;
    let status = if stored == total { StatusCode::CREATED } else { StatusCode::ACCEPTED };
    Ok((Blob { stored, expires_at: Some(api.buffer.now().plus_seconds(KEPT_UNUSED_S)), ..known }, status))
}

/// Stores the bytes from those that are stored up to `end`, a part while the next one arrives. Returns how many are stored
/// then: fewer if an upload of the same bytes was wrong and was deleted. What another upload has stored meanwhile is passed
/// over.
async fn store(api: &Api, blob: &Blob, end: u64, parts: &mut InParts, body: &mut Body) -> Result<u64, Failure> {
    let (mut stored, mut at) = (blob.stored, blob.stored);
    // Two parts are in memory at once. A small budget has room for several uploads all the same.
    let part_bytes = if api.budgets.posts.bytes() as u64 >= 8 * PART_BYTES { PART_BYTES } else { PIECE_BYTES };
    let mut arrived: Option<(Bytes, Shares)> = None;
    loop {
        let wanted = (end - at).min(part_bytes);
        let written = async {
            match arrived.take() {
                Some((part, shares)) => store_part(api, blob, stored, part, shares).await,
                None => Ok(stored),
            }
        };
        let (next, written) = tokio::join!(parts.next(body, wanted as usize), written);
        stored = written?;
        if stored < at || wanted == 0 {
            return Ok(stored);
        }
        let (part, shares) = next.map_err(body::unread_part)?;
        if (part.len() as u64) < wanted {
            return Err(body::incomplete());
        }
        let arrived_to = at + wanted;
        if stored < arrived_to {
            arrived = Some((part.slice((stored - at) as usize..), shares));
            at = arrived_to;
        } else {
            at = stored.min(end);
            if !parts.skip(body, at - arrived_to).await.map_err(body::unread_part)? {
                return Err(body::incomplete());
            }
        }
    }
}

async fn store_part(api: &Api, blob: &Blob, from: u64, part: Bytes, shares: Shares) -> Result<u64, Failure> {
    let (digest, bytes, media_type) = (blob.digest, blob.bytes, blob.media_type.clone());
    let stored = api
        .run_uncancelled(move |buffer| async move {
            let stored = buffer.store_pieces(digest, bytes, media_type, from / PIECE_BYTES, part).await;
            drop(shares);
            stored
        })
        .await?;
    match stored {
        Stored::UpTo(stored) => Ok(stored),
        Stored::Differs => Err(mismatch(digest)),
    }
}

fn mismatch(digest: BlobDigest) -> Failure {
    Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "digest-mismatch", "The bytes are others than the digest says")
        .detail(format!(
            "the BLAKE3 digest of the bytes is not {digest}, so nothing of them is kept: upload all of them anew"
        ))
}

fn on_wire(blob: &Blob) -> Upload {
    Upload {
        digest: blob.digest.to_string(),
        bytes: blob.bytes,
        stored: blob.stored,
        url: format!("{SCHEME}{}", blob.digest),
        expires_at: params::time(blob.expires_at),
    }
}

/// Get an image
///
/// Whoever has the digest may have the bytes: it is in the messages of rollouts, and cannot be guessed.
#[utoipa::path(
    get,
    path = "/media/{digest}",
    operation_id = "get_media",
    tag = "trainers",
    params(
        ("digest" = String, Path, description = "BLAKE3 digest of the bytes: 64 hexadecimal digits in lower case"),
        ("Range" = Option<String>, Header, description = "Which bytes are wanted: `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`"),
    ),
    responses(
        (status = 200, description = "The bytes, with the Content-Type that they were uploaded with", body = AnyContent, content_type = "application/octet-stream"),
        (status = 206, description = "The bytes that `Range` names", body = AnyContent, content_type = "application/octet-stream"),
        (status = 304, description = "The bytes have the tag of `If-None-Match`"),
        (status = 404, description = "It was never uploaded whole, or was deleted with the last rollout that named it"),
        (status = 416, description = "`range-not-satisfiable`: there are no such bytes"),
        (status = 503, description = "Other readers use up the byte budget; retry"),
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    DigestPath(digest): DigestPath,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let found = api.buffer.blob(digest).await?.filter(|found| found.blob.is_complete());
    let found = found.ok_or(Refusal::Unknown("the upload"))?;
    let total = found.blob.bytes;
    let mut head = HeaderMap::new();
    let tag = HeaderValue::try_from(format!("\"{digest}\"")).expect("hexadecimal digits are allowed in headers");
    head.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    // A browser asks again, with the tag: a key may have been revoked.
    head.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    let is_known = knows(&headers, &tag);
    head.insert(header::ETAG, tag);
    if is_known {
        return Ok((StatusCode::NOT_MODIFIED, head).into_response());
    }
    // Other units than bytes are ignored, as RFC 9110 has it.
    let asked = headers.get(header::RANGE).and_then(|asked| asked.to_str().ok()?.strip_prefix("bytes="));
    let asked = asked.map(|asked| range(asked, total));
    let (status, wanted) = match asked {
        None => (StatusCode::OK, 0..total),
        Some(Some(wanted)) => (StatusCode::PARTIAL_CONTENT, wanted),
        Some(None) => {
            let status = StatusCode::RANGE_NOT_SATISFIABLE;
            let failure = Failure::new(status, "range-not-satisfiable", "There are no such bytes");
            return Err(failure.detail(format!(
                "Range must be `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`, and the upload has {total} bytes"
            )));
        }
    };
    if status == StatusCode::PARTIAL_CONTENT {
        let text = format!("bytes {}-{}/{total}", wanted.start, wanted.end - 1);
        head.insert(header::CONTENT_RANGE, HeaderValue::try_from(text).expect("digits are allowed in headers"));
    }
    head.insert(header::CONTENT_LENGTH, HeaderValue::from(wanted.end - wanted.start));
    // Scripts and pages are not served as such.
    let is_medium = |text: &&str| ["image/", "audio/", "video/"].iter().any(|kind| text.starts_with(kind));
    let media_type = found.blob.media_type.as_deref().filter(is_medium);
    let media_type = media_type.and_then(|text| HeaderValue::try_from(text).ok());
    let unknown = HeaderValue::from_static("application/octet-stream");
    head.insert(header::CONTENT_TYPE, media_type.unwrap_or(unknown));
    // Whatever it says it is, a browser that opens it runs nothing.
    head.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("sandbox; default-src 'none'; frame-ancestors 'none'"),
    );
    if method == Method::HEAD {
        return Ok((status, head).into_response());
    }
    let mut reading = Reading { api, found, wanted };
    // The first part is read before the head is sent, so that an error can still become a problem document.
    let first = paid_part(&mut reading, true).await?;
    let rest = stream::try_unfold(reading, |mut reading| async move {
        if reading.wanted.is_empty() {
            return Ok(None);
        }
        match paid_part(&mut reading, false).await {
            Ok(frames) => Ok(Some((frames, reading))),
            Err(failure) => {
                let problem = failure.into_problem();
                tracing::warn!(problem.kind = problem.kind, "an answer with an upload was aborted");
                Err(std::io::Error::other(problem.kind))
            }
        }
    });
    let frames = stream::once(async move { Ok(first) }).chain(rest);
    let frames = frames.flat_map(|frames| match frames {
        Ok(frames) => stream::iter(frames.into_iter().map(Ok).collect::<Vec<_>>()),
        Err(error) => stream::iter(vec![Err(error)]),
    });
    let mut response = (status, head, Body::from_stream(frames)).into_response();
    response.extensions_mut().insert(IsPaid);
    Ok(response)
}

/// The next part, paid for until it is written.
async fn paid_part(reading: &mut Reading, is_first: bool) -> Result<Vec<Bytes>, Failure> {
    let (budget, bytes) = (&reading.api.budgets.samples, reading.next_bytes());
    // Who has got the first part waits for the others, as readers of samples do.
    let share =
        if is_first { budget.wait_at_most(FIRST_PAGE_WAIT, bytes).await? } else { budget.wait_for(bytes).await };
    let share = Arc::new(share);
    Ok(reading.next().await?.into_iter().map(|frame| paid(frame, Arc::clone(&share))).collect())
}

/// The bytes that a `Range` of bytes asks for; none if there are no such bytes, or it asks for several ranges.
fn range(asked: &str, total: u64) -> Option<Range<u64>> {
    let (first, last) = asked.trim().split_once('-')?;
    let range = match (first, last) {
        ("", count) => total.saturating_sub(count.parse().ok()?)..total,
        (first, "") => first.parse().ok()?..total,
        (first, last) => first.parse().ok()?..last.parse::<u64>().ok()?.saturating_add(1).min(total),
    };
    (range.start < range.end).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_requests_are_within_the_upload() {
        for (asked, expected) in [
            ("0-9", Some(0..10)),
            ("90-", Some(90..100)),
            ("-10", Some(90..100)),
            ("-1000", Some(0..100)),
            ("99-1000", Some(99..100)),
            ("100-", None),
            ("9-8", None),
            ("-0", None),
            ("0-1,4-5", None),
            ("a-b", None),
        ] {
            assert_eq!(range(asked, 100), expected, "{asked}");
        }
    }

    #[test]
    fn ranges_of_uploads_are_within_the_whole() {
        for (sent, expected) in [
            ("bytes 0-9/10", Some((10, 0..10))),
            ("bytes 5-9/10", Some((10, 5..10))),
            ("bytes */10", Some((10, 0..0))),
            ("bytes 5-10/10", None),
            ("bytes 6-5/10", None),
            ("bytes 0-9/*", None),
            ("0-9/10", None),
            ("bytes 0-9", None),
        ] {
            assert_eq!(content_range(sent), expected, "{sent}");
        }
    }
}
