//! Request bodies. Their size is bounded before they are read and again after decompression, their arrival has a
//! deadline, and then they are parsed.

use std::{fmt::Write as _, io::Read, time::Duration};

use axum::{
    body::{Body, HttpBody as _},
    extract::{FromRequest, Request},
    http::{HeaderMap, HeaderValue, StatusCode, header},
};
use bytes::Bytes;
use forebay_bounds::{
    budget::{
        Budget, Owner, Shares,
        arriving::{self, Arriving, InParts, Unread},
        collected::{Collected, NoMemory},
    },
    work,
};
use forebay_domain::{access::Grant, session::SAVED_STATE_BYTES_MAX};
use forebay_gateway::structure;
use forebay_wire::{ARROW_STREAM, Object, Violation};
use http_body_util::BodyExt as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    Api,
    codecs::explain::{explain, explain_text},
    http::{
        budgets::{ByteBudgets, HeldByRequest, overloaded},
        guard::owner,
        problem::Failure,
    },
};

/// Media type of a JSON merge patch.
pub const MERGE_PATCH: &str = "application/merge-patch+json";

/// The most bytes of a control call's body.
const CONTROL_BYTES_MAX: usize = 256 << 10;

/// These first bytes of a control body take nothing from the budget. Acks and heartbeats are smaller, so they succeed
/// even if the budget is used up. The number of connections bounds the free bytes.
const CONTROL_FREE_BYTES: usize = 4 << 10;

/// The largest ratio of decompressed to received bytes of a body above [`RATIO_FREE_BYTES`]. A larger ratio is an
/// attack with a decompression bomb.
const RATIO_MAX: usize = 200;

/// How long a post waits for its turn. It is not in memory yet, and to read and discard the body of a post that is refused
/// costs nearly as much as to store it: with ten times the agents of the peak, 0.6 of the peak was stored without this.
const TURN: Duration = Duration::from_secs(1);

/// How long the rest of a refused body is read and discarded.
const UNREAD_BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The first room for a body that is decompressed. It doubles when it is full.
const FIRST_BYTES: usize = 64 << 10;

/// The largest window of a zstd frame, as a power of two. RFC 9659 allows 8 MB over HTTP. The decoder holds a window in
/// addition to the body.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// The decompressed size up to which any ratio is allowed, because it is harmless.
const RATIO_FREE_BYTES: usize = 16 << 20;

/// Limits of request bodies.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    /// The most bytes of one body, both as received and after decompression.
    pub body_bytes_max: usize,
    /// The most bytes that are held at the same time.
    pub budgets: ByteBudgets,
    /// Timeout for receiving a body, and for a client to read the lines of a bulk response.
    pub read_timeout: Duration,
}

/// A body that was read and decompressed, with its share of the budget.
pub struct ReadBody {
    pub bytes: Bytes,
    pub shares: Shares,
}

/// Media types of bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media {
    /// `application/json`
    Json,
    /// `application/x-ndjson`
    Ndjson,
    /// `application/vnd.apache.arrow.stream`
    Arrow,
}

/// Reads the media type of a body of trajectories.
pub fn media(headers: &HeaderMap) -> Result<Media, Failure> {
    let sent = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match sent.split(';').next().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
        "application/json" => Ok(Media::Json),
        "application/x-ndjson" => Ok(Media::Ndjson),
        ARROW_STREAM => Ok(Media::Arrow),
        _ => Err(unsupported(
            "Content-Type must be application/json, application/x-ndjson or application/vnd.apache.arrow.stream",
        )),
    }
}

/// The error of a form, which is what curl sends with -d unless it is told otherwise.
pub fn form() -> Failure {
    unsupported(
        "the Content-Type is that of a form: send JSON with the header `Content-Type: application/json` \
         (curl: -H 'content-type: application/json')",
    )
}

pub fn unsupported(detail: &str) -> Failure {
    Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "The media type is not supported")
        .detail(detail)
}

pub(crate) fn too_large(detail: String) -> Failure {
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The body is too large").detail(detail)
}

/// The error of a body that exceeds the configured limit, or the fixed limit of control calls.
fn over(max: usize) -> Failure {
    too_large(match max {
        CONTROL_BYTES_MAX | SAVED_STATE_BYTES_MAX => format!("the body of this call may have at most {max} bytes"),
        _ => format!("a body may have at most {max} bytes, also after decompression (`limits.body_bytes`)"),
    })
}

/// The error of a compressed body that expands to more than the allowed ratio.
fn over_expanded(sent: usize, max: usize, body_bytes_max: usize) -> Failure {
    if max >= body_bytes_max {
        return over(body_bytes_max);
    }
    too_large(format!(
        "the body has {sent} bytes as sent and more than {max} after decompression: a body may expand to {RATIO_MAX} \
         times its size, or to {RATIO_FREE_BYTES} bytes if that is more; send it uncompressed, or in smaller parts"
    ))
}

/// Content codings of bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Identity,
    Gzip,
    Zstd,
}

fn coding(headers: &HeaderMap) -> Result<Coding, Failure> {
    let mut sent = headers.get_all(header::CONTENT_ENCODING).iter();
    let Some(first) = sent.next() else { return Ok(Coding::Identity) };
    match (first.to_str().map(|text| text.trim().to_ascii_lowercase()).as_deref(), sent.next()) {
        (Ok("identity" | ""), None) => Ok(Coding::Identity),
        (Ok("gzip"), None) => Ok(Coding::Gzip),
        (Ok("zstd"), None) => Ok(Coding::Zstd),
        _ => Err(unsupported("Content-Encoding must be gzip or zstd, once")),
    }
}

/// Reads a body of trajectories within the limits and the budget.
pub async fn read(
    budget: &Budget,
    owner: Owner,
    limits: BodyLimits,
    headers: &HeaderMap,
    mut body: Body,
) -> Result<ReadBody, Failure> {
    let read = match admit(budget, owner, limits, headers).await {
        Ok((coding, arriving)) => read_whole(coding, limits, arriving, budget, &mut body).await,
        // The client waits for `100 Continue` before it sends the body. Reading would send that and make the client
        // send a body that is refused anyway.
        Err(failure) if headers.contains_key(header::EXPECT) => return Err(failure),
        Err(failure) => Err(failure),
    };
    if read.is_err() {
        discard_body(body).await;
    }
    read
}

/// Takes bytes of the budget for what is made of a body, besides those that the body holds, before any of it is made.
pub fn pay(budget: &Budget, shares: &mut Shares, bytes: usize) -> Result<(), Failure> {
    let missing = bytes.saturating_sub(shares.bytes());
    if shares.bytes() + missing > budget.bytes() {
        return Err(too_large(format!(
            "the body has so many values that it takes {bytes} bytes of memory, and the service has {} for all bodies \
             (`limits.inflight_bytes`); divide it into smaller documents",
            budget.bytes()
        )));
    }
    shares.push(budget.take(missing)?);
    Ok(())
}

/// Reads and discards the rest of a refused body for a while. If the connection were closed while the client still
/// sends, it would be reset, and the client would not receive the response that says why.
pub async fn discard_body(mut body: Body) {
    let pass_by = async { while let Some(Ok(_)) = body.frame().await {} };
    // If the client takes longer than this, it may not receive the response.
    let _ = tokio::time::timeout(UNREAD_BODY_TIMEOUT, pass_by).await;
}

/// Checks what the head announces: the coding, and whether the length is within the limit and the budget.
async fn admit(
    budget: &Budget,
    owner: Owner,
    limits: BodyLimits,
    headers: &HeaderMap,
) -> Result<(Coding, Arriving), Failure> {
    let coding = coding(headers)?;
    let limits =
        arriving::Limits { bytes_max: limits.body_bytes_max, timeout: limits.read_timeout, turn: TURN, patience: TURN };
    let mut arriving = Arriving::new(budget, Some(owner), declared_length(headers), limits);
    arriving.admit().await.map_err(|unread| refused(unread, limits.bytes_max))?;
    Ok((coding, arriving))
}

async fn read_whole(
    coding: Coding,
    limits: BodyLimits,
    arriving: Arriving,
    budget: &Budget,
    body: &mut Body,
) -> Result<ReadBody, Failure> {
    let max = limits.body_bytes_max;
    let (bytes, shares) = arriving.read(body).await.map_err(|unread| refused(unread, max))?;
    if coding == Coding::Identity {
        return Ok(ReadBody { bytes, shares });
    }
    let paid = Paid { budget: budget.clone(), bytes: shares.bytes(), shares };
    let expand = move || expand(&bytes, coding, max, paid);
    work::on_thread(expand).await.map_err(|_| stopped())?
}

/// Refuses a body that is compressed, where its bytes are taken as they are.
pub(crate) fn refuse_coding(headers: &HeaderMap) -> Result<(), Failure> {
    match coding(headers)? {
        Coding::Identity => Ok(()),
        Coding::Gzip | Coding::Zstd => Err(unsupported("this call does not accept a Content-Encoding")),
    }
}

/// A body that is read in parts, each of which takes its bytes from the budget. It waits until there would be room for the
/// first one.
pub(crate) async fn in_parts(
    budget: &Budget,
    owner: Owner,
    limits: BodyLimits,
    first_bytes: usize,
) -> Result<InParts, Failure> {
    // Parts of it are in memory, so only they are compared with the limit of a body.
    let limits = arriving::Limits { bytes_max: usize::MAX, timeout: limits.read_timeout, turn: TURN, patience: TURN };
    let mut arriving = Arriving::new(budget, Some(owner), Some(first_bytes), limits);
    arriving.admit().await.map_err(unread_part)?;
    Ok(arriving.in_parts())
}

/// Why a part of a body was not read, as an answer.
pub(crate) fn unread_part(unread: Unread) -> Failure {
    refused(unread, usize::MAX)
}

pub(crate) fn incomplete() -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, "incomplete-body", "The body did not arrive whole")
}

/// Why a body was not read, as an answer.
fn refused(unread: Unread, max: usize) -> Failure {
    match unread {
        Unread::TooLarge => over(max),
        Unread::Full => overloaded(),
        Unread::NoMemory => NoMemory.into(),
        Unread::Incomplete => incomplete(),
        Unread::Late(_) | Unread::Slow => {
            let failure = Failure::new(StatusCode::REQUEST_TIMEOUT, "body-timeout", "The body took too long to arrive");
            failure.detail(format!("the body {}", unread.too_slow().unwrap_or_default()))
        }
    }
}

/// The bytes that a body takes from the budget while it is decompressed.
struct Paid {
    budget: Budget,
    shares: Shares,
    bytes: usize,
}

impl Paid {
    /// Takes bytes from the budget until they cover a body of this length.
    fn cover(&mut self, bytes: usize) -> Result<(), Failure> {
        if bytes > self.bytes {
            let share = self.budget.take(bytes - self.bytes)?;
            self.bytes += share.bytes();
            self.shares.push(share);
        }
        Ok(())
    }
}

pub(crate) fn declared_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The most bytes to which a body of `sent` bytes may expand.
fn expanded_max(sent: usize, max: usize) -> usize {
    max.min(RATIO_FREE_BYTES.max(sent.saturating_mul(RATIO_MAX)))
}

/// Decompresses a body. Its room is taken from the budget first. The compressed body is dropped at the end.
fn expand(sent: &[u8], coding: Coding, body_bytes_max: usize, mut paid: Paid) -> Result<ReadBody, Failure> {
    let max = expanded_max(sent.len(), body_bytes_max);
    let malformed = |error: std::io::Error| {
        Failure::new(StatusCode::BAD_REQUEST, "malformed", "The body does not decompress").detail(error.to_string())
    };
    let mut decoder: Box<dyn Read + '_> = match coding {
        Coding::Identity => Box::new(sent),
        Coding::Gzip => Box::new(flate2::read::MultiGzDecoder::new(sent)),
        Coding::Zstd => {
            let mut decoder = zstd::Decoder::new(sent).map_err(malformed)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(malformed)?;
            Box::new(decoder)
        }
    };
    // One byte more than the body may have, to tell a body of the largest allowed size from a larger one.
    let mut expanded = Collected::new(max + 1);
    let mut room = FIRST_BYTES.min(max + 1);
    loop {
        // The budget pays for the buffer's room, not only for its contents.
        paid.cover(sent.len() + room)?;
        expanded.reserve(room)?;
        expanded.fill(&mut decoder, room).map_err(malformed)?;
        if expanded.length() > max {
            return Err(over_expanded(sent.len(), max, body_bytes_max));
        }
        if expanded.length() < room {
            break;
        }
        room = (2 * room).min(max + 1);
    }
    drop(decoder);
    paid.shares.shrink(expanded.length());
    Ok(ReadBody { bytes: expanded.into_bytes(), shares: paid.shares })
}

/// Decompresses a body with its own budget.
pub fn expand_alone(sent: &[u8], headers: &HeaderMap, limits: BodyLimits) -> Result<Bytes, Failure> {
    let gauge = prometheus::IntGauge::new("bytes", "bytes").expect("the name is valid");
    let max = limits.body_bytes_max;
    let budget = Budget::counted(limits.budgets.posts, gauge);
    let paid = Paid { budget, shares: Shares::default(), bytes: 0 };
    expand(sent, coding(headers)?, max, paid).map(|body| body.bytes)
}

pub fn stopped() -> Failure {
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "The service is stopping").retry()
}

/// The small JSON body of a control call.
pub struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Api> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, api: &Api) -> Result<Self, Failure> {
        control::<Object<T>>(request, api).await.map(|Object(request)| Self(request))
    }
}

/// The body of a control call with several objects.
pub struct JsonList<T>(pub Vec<T>);

impl<T: DeserializeOwned> FromRequest<Api> for JsonList<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, api: &Api) -> Result<Self, Failure> {
        let sent = control::<Vec<Object<T>>>(request, api).await?;
        Ok(Self(sent.into_iter().map(|Object(one)| one).collect()))
    }
}

/// The body of a control call with one object, with an array of objects, or with an object on each line.
pub enum JsonOrLines<T> {
    One(T),
    Many(Vec<T>),
    /// Numbered lines, which are still to be parsed.
    Lines(Bytes),
}

impl<T: DeserializeOwned> FromRequest<Api> for JsonOrLines<T> {
    type Rejection = Failure;

    async fn from_request(mut request: Request, api: &Api) -> Result<Self, Failure> {
        let is_lines = match media(request.headers())? {
            Media::Json => false,
            Media::Ndjson => true,
            Media::Arrow => return Err(unsupported("Content-Type must be application/json or application/x-ndjson")),
        };
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let bytes = control_bytes(request, api).await?;
        if is_lines {
            return Ok(Self::Lines(bytes));
        }
        if bytes.trim_ascii_start().first() == Some(&b'[') {
            let sent: Vec<Object<T>> = parse(&bytes)?;
            return Ok(Self::Many(sent.into_iter().map(|Object(one)| one).collect()));
        }
        parse(&bytes).map(|Object(one)| Self::One(one))
    }
}

/// The body of a control call, and the JSON value as it was sent, for calls that must know which fields are present.
pub struct JsonAsSent<T>(pub T, pub Value);

impl<T: DeserializeOwned> FromRequest<Api> for JsonAsSent<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, api: &Api) -> Result<Self, Failure> {
        let bytes = control_bytes(request, api).await?;
        let Object(parsed) = parse(&bytes)?;
        Ok(Self(parsed, parse(&bytes)?))
    }
}

/// A JSON merge patch (RFC 7396) of an object. `application/json` is accepted as its media type as well.
pub struct MergePatch(pub Value);

impl FromRequest<Api> for MergePatch {
    type Rejection = Failure;

    async fn from_request(mut request: Request, api: &Api) -> Result<Self, Failure> {
        let sent = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let media = sent.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        if media.eq_ignore_ascii_case(MERGE_PATCH) {
            request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        match control(request, api).await? {
            patch @ Value::Object(_) => Ok(Self(patch)),
            _ => Err(Failure::invalid("", "must be an object")),
        }
    }
}

/// The body of a control call that has only optional fields: it may be left out, or null.
pub struct OptionalJson<T>(pub T);

impl<T: DeserializeOwned + Default> FromRequest<Api> for OptionalJson<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, api: &Api) -> Result<Self, Failure> {
        if request.body().is_end_stream() {
            return Ok(Self(T::default()));
        }
        let sent = control::<Option<Object<T>>>(request, api).await?;
        Ok(Self(sent.map(|Object(request)| request).unwrap_or_default()))
    }
}

/// Reads and parses the body of a control call.
async fn control<T: DeserializeOwned>(request: Request, api: &Api) -> Result<T, Failure> {
    parse(&control_bytes(request, api).await?)
}

/// Any bytes, which nobody looks at.
pub struct AnyBytes(pub Bytes);

impl FromRequest<Api> for AnyBytes {
    type Rejection = Failure;

    async fn from_request(request: Request, api: &Api) -> Result<Self, Failure> {
        small_bytes(request, api, SAVED_STATE_BYTES_MAX, <[u8]>::len).await.map(Self)
    }
}

/// Reads the body of a control call.
async fn control_bytes(request: Request, api: &Api) -> Result<Bytes, Failure> {
    if media(request.headers())? != Media::Json {
        return Err(unsupported("Content-Type must be application/json"));
    }
    small_bytes(request, api, CONTROL_BYTES_MAX, structure::price).await
}

/// Reads a small body. `price` is what its bytes take in memory once they are parsed.
async fn small_bytes(
    request: Request,
    api: &Api,
    bytes_max: usize,
    price: fn(&[u8]) -> usize,
) -> Result<Bytes, Failure> {
    let (parts, mut body) = request.into_parts();
    refuse_coding(&parts.headers)?;
    let limits = arriving::Limits {
        bytes_max,
        timeout: api.limits.read_timeout,
        turn: Duration::ZERO,
        patience: Duration::ZERO,
    };
    // If no key is needed, nobody has to be protected from others, and the bodies that must succeed are free.
    let owner = parts.extensions.get::<Grant>().filter(|grant| grant.key_id.is_some()).map(owner);
    let budget = &api.budgets.control;
    let arriving = Arriving::new(budget, owner, None, limits).with_free(CONTROL_FREE_BYTES);
    let read = match arriving.read(&mut body).await {
        // The values of a body take up to forty times its bytes. Those of small bodies are free like their bytes.
        Ok((bytes, mut shares)) if bytes.len() > CONTROL_FREE_BYTES => {
            let values = budget.take(price(&bytes).saturating_sub(shares.bytes()));
            values.map_err(Unread::from).map(|share| {
                shares.push(share);
                (bytes, shares)
            })
        }
        read => read,
    };
    match read {
        Ok((bytes, shares)) => {
            // The parsed value is part of what was paid for, so the share is held until the handler ends.
            if let Some(held) = parts.extensions.get::<HeldByRequest>() {
                held.hold(shares);
            }
            Ok(bytes)
        }
        Err(unread) => {
            discard_body(body).await;
            Err(refused(unread, bytes_max))
        }
    }
}

/// Parses JSON. Errors have a JSON pointer.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(bytes).map_err(|error| describe::<T>(bytes, &error))
}

/// Parses a value that is part of a body. Errors have a JSON pointer.
pub fn parse_value<T: DeserializeOwned>(value: Value) -> Result<T, Violation> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let place = pointer(error.path());
        let message = error.into_inner().to_string();
        Violation { pointer: format!("{place}{}", unplaced_field(&message, &place)), detail: explain(&message) }
    })
}

/// Explains a parse error. It parses the body a second time to find the pointer, because tracking the path costs time
/// and is only needed after an error.
fn describe<T: DeserializeOwned>(bytes: &[u8], error: &serde_json::Error) -> Failure {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let pointer = match serde_path_to_error::deserialize::<_, T>(&mut deserializer) {
        Err(error) => pointer(error.path()),
        // The value is complete, so the error is extra text after it.
        Ok(_) => String::new(),
    };
    let text = error.to_string();
    let message = text.split(" at line ").next().unwrap_or(&text);
    let field = unplaced_field(message, &pointer);
    let pointer = pointer + &field;
    let out_of_range = message.starts_with("number out of range");
    let detail = match not_a_number(bytes, error) {
        Some(token) => {
            let place = (error.line(), error.column());
            format!("`{token}` is not JSON: numbers must be finite (line {}, column {})", place.0, place.1)
        }
        None => explain_text(error),
    };
    let failure = if error.is_data() || out_of_range {
        Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", "The request is invalid")
    } else {
        Failure::new(StatusCode::BAD_REQUEST, "malformed", "The body is not JSON")
    };
    failure.violations(vec![Violation { pointer, detail }])
}

fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => {
                let _ = write!(pointer, "/{index}");
            }
            Segment::Map { key } => {
                let _ = write!(pointer, "/{}", key.replace('~', "~0").replace('/', "~1"));
            }
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    pointer
}

/// The field that a message names but the path does not include: a duplicate or missing field.
fn unplaced_field(message: &str, pointer: &str) -> String {
    let named = ["duplicate field `", "missing field `"].iter().find_map(|prefix| message.strip_prefix(prefix));
    match named.and_then(|rest| rest.split('`').next()) {
        Some(field) => {
            let field = format!("/{}", field.replace('~', "~0").replace('/', "~1"));
            if pointer.ends_with(&field) { String::new() } else { field }
        }
        None => String::new(),
    }
}

/// The token that Python's `json.dumps` writes for a float that is not finite, if the parser stopped at one.
fn not_a_number(bytes: &[u8], error: &serde_json::Error) -> Option<&'static str> {
    if !error.is_syntax() {
        return None;
    }
    let line_start =
        bytes.split_inclusive(|&byte| byte == b'\n').take(error.line() - 1).map(<[u8]>::len).sum::<usize>();
    let at = line_start + error.column().saturating_sub(1);
    let near = &bytes[at.saturating_sub(2).min(bytes.len())..(at + 10).min(bytes.len())];
    let found = |token: &str| near.windows(token.len()).any(|window| window == token.as_bytes());
    ["-Infinity", "Infinity", "NaN"].into_iter().find(|token| found(token))
}
