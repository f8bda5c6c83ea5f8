//! Payloads in an object store: the payloads of a transaction are one object, with the bytes of a segment file.
//!
//! Separate from files, because an object is written once and whole, and never appended to. Replicas share the store.
//! The object is written before its transaction commits, so a row never names an object that is not there. If the
//! transaction fails, or its answer is lost, the object stays without a row, and is removed later.
//!
//! Each replica looks after objects in a task of its own: payloads move by slices of a MiB, whose rows are locked;
//! objects without payloads are removed after a grace. For objects without a row a replica looks once an hour, and
//! removes an object when two looks in a row have found no row for it. The number of an object begins with the second
//! in which it was made, so a look lists only the objects since the look before the last one.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use forebay_domain::{formats::payload::Payload, ids::RolloutPk};
use forebay_telemetry::metrics::StoreMetrics;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::{
    ClientConfigKey, ClientOptions, ObjectStore, ObjectStoreExt as _, ObjectStoreScheme, PutPayload, RetryConfig,
    aws::AmazonS3Builder, azure::MicrosoftAzureBuilder, gcp::GoogleCloudStorageBuilder, local::LocalFileSystem,
    path::Path,
};
use url::Url;

use super::{
    appender::Appended,
    folder::{FIRST_FRAME_AT, Place, new_mark},
    frame,
    object_cache::ObjectCache,
    pending::Pending,
    reader::{Found, ScannedFrame},
};
use crate::error::{DatabaseFailure, StoreError};

/// How long one request may take. A transaction waits for the object that it writes, and holds its locks meanwhile.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a request is repeated after errors that may pass.
const RETRY_TIMEOUT: Duration = Duration::from_secs(20);

/// How often it is repeated at most.
const RETRIES_MAX: usize = 4;

/// How long the requests of one step may take together, with their repetitions. It is below the 60 s after which Postgres
/// ends a transaction that waits for its object. It also bounds the wait for a shared folder whose server does not answer.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Objects that are read or removed at the same time for one call.
const CONCURRENT: usize = 8;

/// For how long a store may answer that it does not have an object that was written. Until then, the object is not taken
/// for lost, and the read fails in a way that may pass.
const VISIBLE_AFTER_S: u64 = 120;

/// The length of the object that checks the store.
const CHECKED_BYTES: usize = 1_024;

/// The pauses before an object that was written is looked for again. Stores that are eventually consistent show it late.
const VISIBLE_PAUSES: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(200), Duration::from_secs(1)];

/// The random bits in the number of an object. The bits above them are the second in which it was made.
const RANDOM_BITS: u32 = 28;

/// The object store of a database.
#[derive(Clone, Debug)]
pub(crate) struct Objects {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) folder: Path,
    cache: Arc<ObjectCache>,
    /// Whether a recent object that is not found may be found later.
    waits: bool,
    metrics: StoreMetrics,
}

/// An object store cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub(crate) struct ObjectError {
    action: String,
    source: object_store::Error,
}

impl ObjectError {
    pub(super) fn new(action: &str, path: &Path, source: object_store::Error) -> Self {
        Self { action: format!("{action} object {path}"), source }
    }
}

/// Waits for a step of requests, but not for ever.
pub(super) async fn bounded<T>(
    action: &str,
    path: &Path,
    step: impl Future<Output = object_store::Result<T>>,
) -> Result<T, ObjectError> {
    let done = tokio::time::timeout(STEP_TIMEOUT, step).await.unwrap_or_else(|_| {
        let source = format!("it has not answered within {} s", STEP_TIMEOUT.as_secs()).into();
        Err(object_store::Error::Generic { store: "object store", source })
    });
    done.map_err(|error| ObjectError::new(action, path, error))
}

impl From<ObjectError> for StoreError {
    fn from(error: ObjectError) -> Self {
        Self::Database(DatabaseFailure::new(error))
    }
}

/// Checks the form of a URL.
pub(crate) fn check_url(url: &str) -> Result<Url, String> {
    let parsed = Url::parse(url).map_err(|error| error.to_string())?;
    match ObjectStoreScheme::parse(&parsed) {
        Ok((ObjectStoreScheme::Memory, _)) | Err(_) => {
            Err("must be s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///FOLDER".to_owned())
        }
        Ok(_) => Ok(parsed),
    }
}

/// The endpoint of the environment, with the name of the variable, if keys and payloads would be sent to it in plain text.
/// The client refuses that, too, but at the first request and without saying what allows it.
fn endpoint_without_tls() -> Option<(&'static str, String)> {
    let of = |variable| Some((variable, std::env::var(variable).ok()?));
    let endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"].into_iter().find_map(of);
    endpoint.filter(|(_, endpoint)| endpoint.starts_with("http://"))
}

impl Objects {
    /// Opens the store that a URL names. Credentials, regions and endpoints are those of the environment.
    /// Payloads that were written or read lately take at most `cache_bytes` of memory.
    pub(crate) fn open(url: &str, store_id: u32, cache_bytes: u64, metrics: StoreMetrics) -> Result<Self, String> {
        forebay_client::install_tls_provider();
        let url = check_url(url)?;
        let failed = |error: object_store::Error| error.to_string();
        let (scheme, path) = ObjectStoreScheme::parse(&url).map_err(|error| error.to_string())?;
        let retry = RetryConfig { max_retries: RETRIES_MAX, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let timeout = REQUEST_TIMEOUT.as_secs();
        let client = ClientOptions::new().with_config(ClientConfigKey::Timeout, format!("{timeout}s"));
        let store: Arc<dyn ObjectStore> = match scheme {
            ObjectStoreScheme::Local => Arc::new(LocalFileSystem::new().with_fsync(true)),
            ObjectStoreScheme::AmazonS3 => {
                let allows_http = std::env::var("AWS_ALLOW_HTTP").is_ok_and(|value| value == "true");
                if !allows_http && let Some((variable, endpoint)) = endpoint_without_tls() {
                    return Err(format!(
                        "the endpoint {endpoint} of {variable} is not encrypted: use https, or set AWS_ALLOW_HTTP=true in a \
                         network that you trust"
                    ));
                }
                let client = client.with_allow_http(allows_http);
                let builder = AmazonS3Builder::from_env().with_url(url.as_str());
                Arc::new(builder.with_client_options(client).with_retry(retry).build().map_err(failed)?)
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str());
                Arc::new(builder.with_client_options(client).with_retry(retry).build().map_err(failed)?)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
                Arc::new(builder.with_client_options(client).with_retry(retry).build().map_err(failed)?)
            }
            other => return Err(format!("{other:?} is not supported")),
        };
        let folder = path.join(format!("{store_id:08x}"));
        let cache = Arc::new(ObjectCache::new(cache_bytes));
        Ok(Self { store, folder, cache, waits: true, metrics })
    }

    /// For processes that do not serve: they report an object that is not found, and go on.
    pub(crate) fn without_waiting(self) -> Self {
        Self { waits: false, ..self }
    }

    /// The name of an object.
    pub(crate) fn path(&self, number: i64) -> Path {
        self.folder.clone().join(format!("{number:016x}"))
    }

    /// Checks that the store keeps what is written, with an object that is removed at once. A store, or a proxy before it,
    /// that alters bytes is noticed here. An object of payloads is not read back, because its payloads have digests.
    pub(crate) async fn check(&self) -> Result<(), ObjectError> {
        let path = self.path(new_number(0));
        let written: Bytes = rand::random::<[u8; CHECKED_BYTES]>().to_vec().into();
        let check = async {
            self.store.put(&path, written.clone().into()).await?;
            let read = async { self.store.get(&path).await?.bytes().await };
            let read = read.await;
            self.store.delete(&path).await?;
            match read {
                Ok(read) if read != written => Err(object_store::Error::Generic {
                    store: "object store",
                    source: "it has other bytes than were written".into(),
                }),
                // Stores that are eventually consistent show it late.
                Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(error),
            }
        };
        bounded("check", &path, check).await
    }

    /// Writes the object of a transaction, and looks whether it is there. The rows that name what is in it may be committed
    /// then.
    pub(crate) async fn put(&self, object: PendingObject) -> Result<(), ObjectError> {
        let path = self.path(object.number);
        let head = Bytes::copy_from_slice(&frame::of_file(object.number, object.mark));
        let frames = &object.pending.frames;
        let parts = frames.iter().flat_map(|(head, body)| [Bytes::copy_from_slice(head), body.clone()]);
        let payload: PutPayload = std::iter::once(head).chain(parts).collect();
        let length = payload.content_length() as u64;
        let write = async {
            self.store.put(&path, payload).await?;
            self.check_written(&path, length).await
        };
        bounded("write", &path, write).await?;
        let mut start = FIRST_FRAME_AT;
        for (head, body) in object.pending.frames {
            let place = Place { file: object.number, start: start + frame::HEAD_BYTES, length: body.len() as u64 };
            start = place.end();
            // Pieces of uploads are parts of larger bytes, which the cache would hold as well.
            if frame::read_frame(&head).is_some_and(|head| head.rollout.0 > 0) {
                self.cache.keep(place, body);
            }
        }
        Ok(())
    }

    /// Checks that an object is stored whole. A store, or a proxy before it, may answer that it stored an object that it has
    /// lost or cut off, and the payloads would be missed only when a trainer reads them.
    async fn check_written(&self, path: &Path, length: u64) -> object_store::Result<()> {
        let mut pauses = VISIBLE_PAUSES.into_iter();
        let found = loop {
            match self.store.head(path).await {
                Err(object_store::Error::NotFound { .. }) if let Some(pause) = pauses.next() => {
                    tokio::time::sleep(pause).await;
                }
                found => break found?,
            }
        };
        if found.size == length {
            return Ok(());
        }
        let source = format!("it has {} bytes instead of {length}", found.size).into();
        Err(object_store::Error::Generic { store: "object store", source })
    }

    /// Reads payloads, in the order of their places.
    pub(crate) async fn read(&self, places: &[Place]) -> Result<Vec<Found>, ObjectError> {
        let mut found = vec![Found::NoFile; places.len()];
        let mut by_object: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
        for (index, place) in places.iter().enumerate() {
            match self.cache.get(*place) {
                Some(payload) => found[index] = Found::Bytes(payload),
                None => by_object.entry(place.file).or_default().push(index),
            }
        }
        let asked = by_object.values().map(Vec::len).sum();
        self.metrics.object_payloads_read(places.len() - asked, asked);
        let reads = by_object.into_iter().map(|(number, indexes)| async move {
            let ranges: Vec<Range<u64>> = indexes.iter().map(|&index| range_of(places[index])).collect();
            let found = self.read_ranges(number, &ranges).await?;
            Ok::<_, ObjectError>(indexes.into_iter().zip(found).collect::<Vec<_>>())
        });
        let read: Vec<Vec<(usize, Found)>> = stream::iter(reads).buffer_unordered(CONCURRENT).try_collect().await?;
        for (index, payload) in read.into_iter().flatten() {
            if let Found::Bytes(bytes) = &payload
                && bytes.len() as u64 == places[index].length
            {
                // A copy, because these bytes are a part of an answer that would be kept whole.
                self.cache.keep(places[index], Bytes::copy_from_slice(bytes));
            }
            found[index] = payload;
        }
        Ok(found)
    }

    /// Reads ranges of an object. Neighbouring ones are read with one request.
    async fn read_ranges(&self, number: i64, ranges: &[Range<u64>]) -> Result<Vec<Found>, ObjectError> {
        let path = self.path(number);
        let read = async {
            match self.store.get_ranges(&path, ranges).await {
                Ok(bytes) => Ok(bytes.into_iter().map(Found::Bytes).collect()),
                Err(object_store::Error::NotFound { .. }) if !self.waits || !may_not_be_visible(number) => {
                    Ok(vec![Found::NoFile; ranges.len()])
                }
                Err(error @ object_store::Error::NotFound { .. }) => Err(error),
                Err(error) => match self.store.head(&path).await {
                    // The digests show that the payloads are damaged.
                    Ok(found) if ranges.iter().any(|range| range.end > found.size) => {
                        Ok(vec![Found::Bytes(Bytes::new()); ranges.len()])
                    }
                    _ => Err(error),
                },
            }
        };
        bounded("read", &path, read).await
    }

    /// All frames of an object, up to the first bytes that are none; an error text if it is another object.
    pub(crate) async fn frames(&self, number: i64, mark: i64) -> Result<Vec<ScannedFrame>, String> {
        let path = self.path(number);
        let read = bounded("read", &path, async { self.store.get(&path).await?.bytes().await });
        let bytes = match read.await {
            // Errors of object stores have the answer of the server, which says no more here.
            Err(ObjectError { source: object_store::Error::NotFound { .. }, .. }) => {
                return Err(format!("object {path} is missing"));
            }
            read => read.map_err(|error| error.to_string())?,
        };
        if !bytes.starts_with(&frame::of_file(number, mark)) {
            return Err(format!("object {path} is another one than the one that this database wrote"));
        }
        let (mut at, mut frames) = (FIRST_FRAME_AT, Vec::new());
        while let Some(head) = bytes.get(at as usize..).and_then(<[u8]>::first_chunk).and_then(frame::read_frame) {
            let place = Place { file: number, start: at + frame::HEAD_BYTES, length: head.length };
            at = place.end();
            frames.push(ScannedFrame { place, head });
        }
        Ok(frames)
    }

    /// Removes objects, if they are there. No removal begins after a time. Returns those that were removed.
    pub(crate) async fn remove(&self, numbers: &[i64], until: Instant) -> Result<Vec<i64>, ObjectError> {
        let removals = stream::iter(numbers.to_vec()).map(|number| self.remove_one(number, until));
        let removed: Vec<Option<i64>> = removals.buffer_unordered(CONCURRENT).try_collect().await?;
        Ok(removed.into_iter().flatten().collect())
    }

    async fn remove_one(&self, number: i64, until: Instant) -> Result<Option<i64>, ObjectError> {
        if Instant::now() >= until {
            return Ok(None);
        }
        let path = self.path(number);
        let remove = async {
            match self.store.delete(&path).await {
                Err(object_store::Error::NotFound { .. }) => Ok(()),
                removed => removed,
            }
        };
        bounded("remove", &path, remove).await.map(|()| Some(number))
    }

    /// The numbers of the objects that were made in a second or later, at most so many of them.
    pub(crate) async fn made_since(&self, second: u64, numbers_max: usize) -> Result<Vec<i64>, ObjectError> {
        let from = self.path((second << RANDOM_BITS) as i64);
        let mut listed = self.store.list_with_offset(Some(&self.folder), &from);
        let mut numbers = Vec::new();
        while numbers.len() < numbers_max
            && let Some(found) = bounded("list", &self.folder, listed.try_next()).await?
        {
            numbers.extend(found.location.filename().and_then(|name| i64::from_str_radix(name, 16).ok()));
        }
        Ok(numbers)
    }
}

fn range_of(place: Place) -> Range<u64> {
    place.start..place.end()
}

/// A number for an object: numbers are in the order of the seconds in which they were made.
fn new_number(second: u64) -> i64 {
    (second << RANDOM_BITS) as i64 | rand::random_range(0..1_i64 << RANDOM_BITS)
}

/// Whether an object was made so lately that the store may not show it to every reader yet.
fn may_not_be_visible(number: i64) -> bool {
    wall_clock_s().saturating_sub((number >> RANDOM_BITS) as u64) < VISIBLE_AFTER_S
}

/// The second of the wall clock, for the numbers of objects.
pub(crate) fn wall_clock_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The object of an open transaction.
#[derive(Debug)]
pub(crate) struct PendingObject {
    number: i64,
    pub(crate) mark: i64,
    pending: Pending,
}

impl Default for PendingObject {
    fn default() -> Self {
        Self { number: new_number(wall_clock_s()), mark: new_mark(), pending: Pending::default() }
    }
}

impl PendingObject {
    /// Takes a payload, and says where it will be.
    pub(crate) fn place(&mut self, rollout: RolloutPk, payload: &Payload) -> Place {
        self.pending.place(self.number, FIRST_FRAME_AT, rollout, payload)
    }

    /// What the transaction writes; none if it has no payloads.
    pub(crate) fn appended(&self) -> Option<Appended> {
        let (frames, bytes) = (self.pending.frames.len(), self.pending.bytes);
        (frames > 0).then_some(Appended { file: self.number, frames, bytes, end: FIRST_FRAME_AT + bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_telemetry::metrics::Metrics;

    fn open() -> (tempfile::TempDir, Objects) {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let url = format!("file://{}", folder.path().display());
        let objects = Objects::open(&url, 1, 0, Metrics::new().store()).expect("a folder can be used");
        (folder, objects)
    }

    #[tokio::test]
    async fn no_removal_begins_when_the_proof_of_ownership_is_too_old() {
        let (folder, objects) = open();
        let path = folder.path().join(format!("00000001/{:016x}", 5));
        objects.store.put(&objects.path(5), "object".into()).await.expect("it can be written");
        let now = Instant::now();
        assert!(objects.remove(&[5], now).await.expect("the store answers").is_empty() && path.exists());
        let removed = objects.remove(&[5], now + STEP_TIMEOUT).await.expect("the store answers");
        assert_eq!(removed, [5]);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn an_object_that_is_missing_is_lost_only_when_it_must_be_visible() {
        let (_folder, objects) = open();
        let read = async |second| {
            let place = Place { file: new_number(second), start: FIRST_FRAME_AT, length: 1 };
            objects.read(&[place]).await
        };
        let found = read(wall_clock_s() - VISIBLE_AFTER_S).await.expect("the store answers");
        assert!(matches!(found.as_slice(), [Found::NoFile]));
        let error = read(wall_clock_s()).await.expect_err("it may be there soon");
        assert!(error.to_string().starts_with("cannot read object"), "{error}");
    }
}
