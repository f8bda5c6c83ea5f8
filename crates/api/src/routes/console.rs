//! The live page: a page at `/`, and its scripts and styles below `/console`.
//!
//! The files are part of the program, so that the page needs no internet and no folder beside the program. They hold
//! no data and need no key: the page asks the other calls for everything that it shows, with the reader's key.

use std::{collections::BTreeMap, io::Write as _, sync::LazyLock};

use axum::{
    extract::{Path, rejection::PathRejection},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};

use crate::http::{
    accept::{accepts_gzip, knows},
    headers,
    problem::{self, Failure},
};

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// Browsers ask each time whether a file has changed: an old script must not meet a new API after an upgrade.
const REVALIDATE: &str = "no-cache";

/// Makes an entry of the table: a path below `console/`, its media type and the bytes.
macro_rules! file {
    ($path:literal, $media:expr) => {
        ($path, $media, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../console/", $path)))
    };
}

/// Every file of the folder `console/` that browsers load: path, media type and bytes.
const FILES: &[(&str, &str, &[u8])] = &[
    file!("index.html", HTML),
    file!("icon.svg", IMAGE),
    file!("style.css", STYLE),
    file!("rollout.css", STYLE),
    file!("address.js", SCRIPT),
    file!("api.js", SCRIPT),
    file!("app.js", SCRIPT),
    file!("batch/columns.js", SCRIPT),
    file!("batch/contents.js", SCRIPT),
    file!("charts.js", SCRIPT),
    file!("chat/json.js", SCRIPT),
    file!("chat/messages.js", SCRIPT),
    file!("chat/render.js", SCRIPT),
    file!("elements.js", SCRIPT),
    file!("evaluation/chart.js", SCRIPT),
    file!("evaluation/geometry.js", SCRIPT),
    file!("evaluation/section.js", SCRIPT),
    file!("evaluation/tasks.js", SCRIPT),
    file!("evaluation/versions.js", SCRIPT),
    file!("evaluation/words.js", SCRIPT),
    file!("format.js", SCRIPT),
    file!("group/beside.js", SCRIPT),
    file!("group/columns.js", SCRIPT),
    file!("group/decision.js", SCRIPT),
    file!("group/judged.js", SCRIPT),
    file!("group/message.js", SCRIPT),
    file!("group/order.js", SCRIPT),
    file!("group/siblings.js", SCRIPT),
    file!("html.js", SCRIPT),
    file!("keys.js", SCRIPT),
    file!("language.js", SCRIPT),
    file!("listing.js", SCRIPT),
    file!("policy/charts.js", SCRIPT),
    file!("policy/flow.js", SCRIPT),
    file!("policy/journal.js", SCRIPT),
    file!("policy/load.js", SCRIPT),
    file!("policy/windows.js", SCRIPT),
    file!("poll.js", SCRIPT),
    file!("rollout/find.js", SCRIPT),
    file!("rollout/load.js", SCRIPT),
    file!("rollout/session.js", SCRIPT),
    file!("rollout/story.js", SCRIPT),
    file!("rollout/tokens.js", SCRIPT),
    file!("router.js", SCRIPT),
    file!("session.js", SCRIPT),
    file!("shell.js", SCRIPT),
    file!("step/band.js", SCRIPT),
    file!("step/read.js", SCRIPT),
    file!("step/stretches.js", SCRIPT),
    file!("tokens/describe.js", SCRIPT),
    file!("tokens/map.js", SCRIPT),
    file!("tokens/moves.js", SCRIPT),
    file!("tokens/scale.js", SCRIPT),
    file!("tokens/strip.js", SCRIPT),
    file!("tokens/tokenizers.js", SCRIPT),
    file!("tokens/vocabulary.js", SCRIPT),
    file!("tokens/window.js", SCRIPT),
    file!("try/draft.js", SCRIPT),
    file!("try/names.js", SCRIPT),
    file!("try/outcome.js", SCRIPT),
    file!("try/rows.js", SCRIPT),
    file!("views/batch.js", SCRIPT),
    file!("views/batches.js", SCRIPT),
    file!("views/group.js", SCRIPT),
    file!("views/groups.js", SCRIPT),
    file!("views/overview.js", SCRIPT),
    file!("views/policy.js", SCRIPT),
    file!("views/rollout.js", SCRIPT),
    file!("views/rollouts.js", SCRIPT),
    file!("views/step.js", SCRIPT),
    file!("views/steps.js", SCRIPT),
    file!("views/suite.js", SCRIPT),
    file!("views/try.js", SCRIPT),
    file!("views/why.js", SCRIPT),
    file!("vendor/VENDOR.toml", TEXT),
    file!("vendor/lit-html/LICENSE", TEXT),
    file!("vendor/lit-html/directive-helpers.js", SCRIPT),
    file!("vendor/lit-html/directive.js", SCRIPT),
    file!("vendor/lit-html/directives/repeat.js", SCRIPT),
    file!("vendor/lit-html/lit-html.js", SCRIPT),
    file!("vendor/uplot/LICENSE", TEXT),
    file!("vendor/uplot/uPlot.iife.min.js", SCRIPT),
    file!("vendor/uplot/uPlot.min.css", STYLE),
];

/// The page itself. Its links are relative to `/`, so it is not served below `/console`.
const PAGE: &str = "index.html";

/// A file, ready to be sent.
struct File {
    media: HeaderValue,
    bytes: &'static [u8],
    /// The same bytes compressed with gzip.
    gzip: Bytes,
    /// The digest of the bytes as a weak tag, because it stands for both forms.
    tag: HeaderValue,
}

static TABLE: LazyLock<BTreeMap<&str, File>> = LazyLock::new(|| {
    let files = FILES.iter().map(|&(path, media, bytes)| {
        let tag = format!("W/\"{}\"", blake3::hash(bytes).to_hex());
        let tag = HeaderValue::from_str(&tag).expect("hexadecimal digits are valid in a header");
        (path, File { media: HeaderValue::from_static(media), bytes, gzip: compressed(bytes), tag })
    });
    files.collect()
});

fn compressed(bytes: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.expect("writing to memory does not fail").into()
}

/// Answers with the page.
pub(crate) async fn page(request: HeaderMap) -> Response {
    let mut response = answer(PAGE, &request).expect("the table has the page");
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(headers::CONSOLE_POLICY));
    response
}

/// Answers with a file of the page.
pub(crate) async fn file(path: Result<Path<String>, PathRejection>, request: HeaderMap) -> Result<Response, Failure> {
    let path = path.ok().filter(|Path(path)| path != PAGE);
    match path.and_then(|Path(path)| answer(&path, &request)) {
        Some(response) => Ok(response),
        None => Err(problem::not_found().await),
    }
}

fn answer(path: &str, request: &HeaderMap) -> Option<Response> {
    let file = TABLE.get(path)?;
    let cached = [
        (header::ETAG, file.tag.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static(REVALIDATE)),
        (header::VARY, HeaderValue::from_static("accept-encoding")),
    ];
    if knows(request, &file.tag) {
        return Some((StatusCode::NOT_MODIFIED, cached).into_response());
    }
    let media = [(header::CONTENT_TYPE, file.media.clone())];
    Some(if accepts_gzip(request) {
        let coding = [(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))];
        (cached, media, coding, file.gzip.clone()).into_response()
    } else {
        (cached, media, file.bytes).into_response()
    })
}

#[cfg(test)]
mod tests;
