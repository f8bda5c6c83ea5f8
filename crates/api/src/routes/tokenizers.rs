//! `GET /policies/{policy}/tokenizer`: the vocabulary with which the live page shows token ids as text.
//!
//! The files are those that the operator lists in the configuration. A request cannot name a path, and neither can a
//! trainer, whose `uri` of a version is never opened.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use forebay_bounds::budget::{Budget, paid};
use forebay_domain::{access::globs::PolicyGlobs, ids::PolicyName};
use serde::de::IgnoredAny;
use tokio::sync::Mutex;

use crate::{
    Api,
    http::{
        accept::{accepts_gzip, knows},
        body,
        budgets::IsPaid,
        pages::FIRST_PAGE_WAIT,
        params::PolicyPath,
        problem::Failure,
    },
    openapi::TokenizerJson,
};

/// The largest tokenizer file: nearly twice the size of the largest published ones.
const TOKENIZER_BYTES_MAX: u64 = 64 << 20;

/// The tokenizers of policies.
#[derive(Clone, Debug, Default)]
pub struct Tokenizers(Arc<[Entry]>);

/// A tokenizer file of the configuration.
#[derive(Clone, Debug)]
pub struct TokenizerFile {
    /// The policies whose tokens it describes: one pattern.
    pub policies: PolicyGlobs,
    /// Where it is.
    pub path: PathBuf,
}

impl TokenizerFile {
    fn pattern(&self) -> &str {
        self.policies.as_slice().first().map_or("", String::as_str)
    }
}

#[derive(Debug)]
struct Entry {
    file: TokenizerFile,
    /// The file as it was last read. The lock is held while the file is read, so that requests do not read it at the same
    /// time.
    last: Mutex<Option<ReadFile>>,
}

impl Tokenizers {
    /// Tokenizers whose files are read when they are asked for. If several patterns include a policy, the longest one
    /// decides.
    #[must_use]
    pub fn new(mut files: Vec<TokenizerFile>) -> Self {
        files.sort_by_key(|file| std::cmp::Reverse(file.pattern().len()));
        Self(files.into_iter().map(|file| Entry { file, last: Mutex::default() }).collect())
    }

    /// The patterns whose files cannot be used, with the reasons.
    pub fn unusable(&self) -> impl Iterator<Item = (&str, String)> {
        self.0.iter().filter_map(|Entry { file, .. }| {
            let error = read(&file.path).err()?;
            Some((file.pattern(), format!("{}: {error}", file.path.display())))
        })
    }

    fn of(&self, policy: &PolicyName) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.file.policies.matches(policy.as_str()))
    }
}

/// Get the tokenizer of a policy
///
/// The file that the operator has configured for the policy, as `tokenizer.json` of Hugging Face. A request with the
/// `ETag` of an earlier answer in `If-None-Match` is answered 304 if the file is the same.
#[utoipa::path(
    get,
    path = "/policies/{policy}/tokenizer",
    operation_id = "get_tokenizer",
    tag = "console",
    params(("policy" = String, Path, description = "Name of the policy")),
    responses(
        (status = 200, description = "The file, compressed with gzip if `Accept-Encoding` allows it", body = TokenizerJson),
        (status = 304, description = "The file is that of `If-None-Match`"),
        (status = 404, description = "No tokenizer is configured for the policy, or its file cannot be read"),
        (status = 503, description = "Other readers use up the byte budget; retry"),
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let entry = api.tokenizers.of(&policy).ok_or_else(|| {
        absent(format!("no tokenizer is configured for policy `{policy}`: name its file in `tokenizers` of [console]"))
    })?;
    let budget = &api.budgets.samples;
    let read = entry.read(&policy, budget).await?;
    let mut head = HeaderMap::new();
    head.insert(header::ETAG, read.etag.clone());
    head.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if knows(&headers, &read.etag) {
        return Ok((StatusCode::NOT_MODIFIED, head).into_response());
    }
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let text = if accepts_gzip(&headers) {
        head.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        read.gzip
    } else {
        let share = budget.wait_at_most(FIRST_PAGE_WAIT, read.version.length as usize).await?;
        let expanded = tokio::task::spawn_blocking(move || read.expand()).await.map_err(|_| body::stopped())?;
        paid(expanded.map_err(|error| unreadable(&policy, &entry.file.path, &error))?, share)
    };
    let mut response = (head, Body::from(text)).into_response();
    // The compressed file is kept anyway.
    response.extensions_mut().insert(IsPaid);
    Ok(response)
}

impl Entry {
    /// The file, which is read again if it was replaced.
    async fn read(&self, policy: &PolicyName, budget: &Budget) -> Result<ReadFile, Failure> {
        let unreadable = |error: io::Error| unreadable(policy, &self.file.path, &error);
        let mut last = self.last.lock().await;
        let path = self.file.path.clone();
        let opened = tokio::task::spawn_blocking(move || open(&path)).await.map_err(|_| body::stopped())?;
        let (_, version) = opened.map_err(unreadable)?;
        if let Some(read) = last.as_ref().filter(|read| read.version == version) {
            return Ok(read.clone());
        }
        // The file is held as it is and compressed.
        let share = budget.wait_at_most(FIRST_PAGE_WAIT, 2 * version.length as usize).await?;
        let path = self.file.path.clone();
        let read = move || {
            let read = ReadFile::read(&path);
            drop(share);
            read
        };
        let read = tokio::task::spawn_blocking(read).await.map_err(|_| body::stopped())?.map_err(unreadable)?;
        *last = Some(read.clone());
        Ok(read)
    }
}

/// A tokenizer file. It is kept compressed, because browsers take it compressed.
#[derive(Clone, Debug)]
struct ReadFile {
    version: FileVersion,
    gzip: Bytes,
    etag: HeaderValue,
}

/// What differs when a file was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    length: u64,
    modified: Option<SystemTime>,
}

impl ReadFile {
    fn read(path: &Path) -> io::Result<Self> {
        let (text, version) = read(path)?;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(&text)?;
        // The tag is weak, because it is the same for the file and for its compressed form.
        let etag = format!("W/\"{}\"", blake3::hash(&text).to_hex());
        let etag = HeaderValue::try_from(etag).expect("hexadecimal digits are allowed in headers");
        Ok(Self { version, gzip: encoder.finish()?.into(), etag })
    }

    fn expand(&self) -> io::Result<Bytes> {
        let mut text = Vec::with_capacity(self.version.length as usize);
        GzDecoder::new(&self.gzip[..]).read_to_end(&mut text)?;
        Ok(text.into())
    }
}

/// Reads a file of bounded length, which must be JSON.
fn read(path: &Path) -> io::Result<(Vec<u8>, FileVersion)> {
    let (file, version) = open(path)?;
    let mut text = Vec::with_capacity(version.length as usize);
    file.take(TOKENIZER_BYTES_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 != version.length {
        return Err(io::Error::other("it changed while it was read"));
    }
    serde_json::from_slice::<IgnoredAny>(&text)?;
    Ok((text, version))
}

/// Opens a file of bounded length.
fn open(path: &Path) -> io::Result<(File, FileVersion)> {
    let file = File::open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    if found.len() > TOKENIZER_BYTES_MAX {
        return Err(io::Error::other(format!("it has more than {TOKENIZER_BYTES_MAX} bytes")));
    }
    Ok((file, FileVersion { length: found.len(), modified: found.modified().ok() }))
}

fn absent(detail: String) -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "not-found", "Not found").detail(detail)
}

/// The path is in the log and not in the answer.
fn unreadable(policy: &PolicyName, path: &Path, error: &io::Error) -> Failure {
    tracing::warn!(policy = %policy, path = %path.display(), error = %error, "a tokenizer file cannot be read");
    absent(format!("the tokenizer file of policy `{policy}` cannot be read; the log of the service says why"))
}
