//! Uploads: bytes that are stored once, and that rollouts name by their digest.
//!
//! Pieces are hashed here, before the store has them and after it has read them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    time::{Duration, Instant},
};

use bytes::Bytes;
use forebay_bounds::work;
use forebay_domain::{
    blobs::{self, Blob, KEPT_UNUSED_S, PART_BYTES, PIECE_BYTES, UNUSED_BYTES_MAX, UNUSED_MAX},
    ids::BlobDigest,
    ingest::Bundle,
    media::Inline,
    refusal::Refusal,
};
pub use forebay_store::ops::blobs::Stored;
use forebay_store::{
    Store,
    error::StoreError,
    ops::blobs::{BlobPk, FindBlob, FindBlobs, KeepBlobs, StorePieces, SumNeverNamed},
};
use tokio::sync::{Mutex, Semaphore};
use tracing::instrument;

use crate::{Buffer, error::BufferError};

/// How often an upload begins anew because others have sent other bytes under its name.
const ATTEMPTS: u32 = 3;

/// How many parts are stored at the same time. On Postgres each takes a connection, and with objects for as long as an
/// object store takes; leases and acks need the others.
const STORING_MAX: usize = 4;

/// How long a sum of the uploads that no rollout has named is good enough.
const SUM_AGE: Duration = Duration::from_secs(1);

/// What all uploads share.
#[derive(Debug)]
pub(crate) struct Uploads {
    storing: Semaphore,
    never_named: Mutex<NeverNamed>,
}

/// The uploads that no rollout has named, when they were last counted, with what this process has stored since.
#[derive(Debug, Default)]
struct NeverNamed {
    counted: Option<Instant>,
    blobs: u64,
    bytes: u64,
}

impl Default for Uploads {
    fn default() -> Self {
        Self { storing: Semaphore::new(STORING_MAX), never_named: Mutex::default() }
    }
}

impl Uploads {
    /// Refuses bytes for which there is no room. Several replicas may find the same room within a second.
    async fn take_room(&self, store: &Store, is_new: bool, bytes: u64) -> Result<(), BufferError> {
        let mut found = self.never_named.lock().await;
        if found.counted.is_none_or(|counted| counted.elapsed() >= SUM_AGE) {
            let (blobs, bytes) = store.read(SumNeverNamed(UNUSED_MAX)).await?;
            *found = NeverNamed { counted: Some(Instant::now()), blobs, bytes };
        }
        if is_new && found.blobs >= UNUSED_MAX || found.bytes + bytes > UNUSED_BYTES_MAX {
            return Err(Refusal::TooManyUploads.into());
        }
        found.blobs += u64::from(is_new);
        found.bytes += bytes;
        Ok(())
    }
}

/// A blob as far as it is stored, for reading its pieces.
#[derive(Clone, Debug)]
pub struct FoundBlob {
    pub blob: Blob,
    key: BlobPk,
}

impl Buffer {
    /// Finds a blob that is stored whole.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %digest))]
    pub async fn blob(&self, digest: BlobDigest) -> Result<Option<FoundBlob>, BufferError> {
        let found = self.store.read(FindBlob(digest)).await?;
        Ok(found.map(|(key, blob)| FoundBlob { blob, key }))
    }

    /// Finds those of some blobs that are stored whole.
    #[instrument(level = "debug", skip_all)]
    pub async fn blobs(&self, digests: BTreeSet<BlobDigest>) -> Result<HashMap<BlobDigest, FoundBlob>, BufferError> {
        let found = self.store.read(FindBlobs(digests)).await?;
        Ok(found.into_iter().map(|(digest, (key, blob))| (digest, FoundBlob { blob, key })).collect())
    }

    /// Finds a blob that is stored whole, and keeps it as long as a new upload, or else what is stored of one with so many
    /// bytes.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %digest))]
    pub async fn keep_blob(&self, digest: BlobDigest, bytes: u64) -> Result<Option<Blob>, BufferError> {
        Ok(keep(self, [(digest, bytes)].into()).await?.remove(&digest))
    }

    /// Stores the next pieces of a blob of so many bytes, from a first one on. It is durable when this returns.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %digest))]
    pub async fn store_pieces(
        &self,
        digest: BlobDigest,
        bytes: u64,
        media_type: Option<String>,
        first: u64,
        body: Bytes,
    ) -> Result<Stored, BufferError> {
        self.uploads.take_room(&self.store, first == 0, body.len() as u64).await?;
        let pieces = work::run(body.len(), || {
            let starts = (0..body.len()).step_by(PIECE_BYTES as usize);
            let pieces = starts.map(|start| body.slice(start..body.len().min(start + PIECE_BYTES as usize)));
            (first..).zip(pieces).map(|(index, piece)| blobs::piece(bytes, index, piece)).collect()
        })
        .await;
        let _turn = self.uploads.storing.acquire().await.map_err(|_| StoreError::Closed)?;
        let store = StorePieces { digest, bytes, media_type, first, pieces, now: self.clock.now() };
        Ok(self.store.write(store).await?)
    }

    /// Stores a blob that is in memory. Returns it, and whether it is new.
    #[instrument(level = "debug", skip_all)]
    pub async fn store_blob(&self, bytes: Bytes, media_type: Option<String>) -> Result<(Blob, bool), BufferError> {
        let digest = work::run(bytes.len(), || BlobDigest(*blake3::hash(&bytes).as_bytes())).await;
        let stored = match self.keep_blob(digest, bytes.len() as u64).await? {
            Some(known) if known.is_complete() => return Ok((known, false)),
            known => known.map_or(0, |known| known.stored),
        };
        Ok((self.store_rest(digest, media_type, bytes, stored).await?, true))
    }

    /// Stores what is behind the bytes of a blob that are stored.
    async fn store_rest(
        &self,
        digest: BlobDigest,
        media_type: Option<String>,
        bytes: Bytes,
        mut stored: u64,
    ) -> Result<Blob, BufferError> {
        let total = bytes.len() as u64;
        let mut attempts = ATTEMPTS;
        while stored < total {
            let part = bytes.slice(stored as usize..bytes.len().min((stored + PART_BYTES) as usize));
            match self.store_pieces(digest, total, media_type.clone(), stored / PIECE_BYTES, part).await? {
                Stored::UpTo(now) if now > stored => stored = now,
                // Somebody has sent other bytes under this name. They are forgotten now.
                Stored::UpTo(_) | Stored::Differs if attempts > 0 => (stored, attempts) = (0, attempts - 1),
                Stored::UpTo(_) | Stored::Differs => {
                    return Err(StoreError::Corrupt(format!("others keep sending other bytes as {digest}")).into());
                }
            }
        }
        let expires_at = Some(self.clock.now().plus_seconds(KEPT_UNUSED_S));
        Ok(Blob { digest, bytes: total, stored, media_type, expires_at })
    }

    /// Stores what rollouts have as data URLs, before the rollouts that name it. Returns the bundles for which there is no
    /// room.
    pub(crate) async fn store_inline(&self, bundles: &[Bundle]) -> Result<BTreeMap<usize, Refusal>, BufferError> {
        let mut wanted: Vec<(usize, Inline)> = Vec::new();
        for (index, bundle) in bundles.iter().enumerate() {
            wanted.extend(bundle.iter().flat_map(|new| &new.inline).map(|inline| (index, inline.clone())));
        }
        let mut refused = BTreeMap::new();
        if wanted.is_empty() {
            return Ok(refused);
        }
        let uploads = wanted.iter().map(|(_, inline)| (inline.digest, inline.body.len() as u64)).collect();
        let known = keep(self, uploads).await?;
        let mut stored: BTreeMap<BlobDigest, u64> = known.iter().map(|(digest, blob)| (*digest, blob.stored)).collect();
        for (bundle, Inline { digest, media_type, body }) in wanted {
            let so_far = stored.get(&digest).copied().unwrap_or(0);
            if refused.contains_key(&bundle) || so_far == body.len() as u64 {
                continue;
            }
            match self.store_rest(digest, Some(media_type), body, so_far).await {
                Ok(blob) => drop(stored.insert(digest, blob.bytes)),
                Err(BufferError::Refused(refusal)) => drop(refused.insert(bundle, refusal)),
                Err(error) => return Err(error),
            }
        }
        Ok(refused)
    }

    /// Reads pieces of a blob that is whole, and checks them. None if they were deleted meanwhile.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %found.blob.digest))]
    pub async fn pieces(&self, found: &FoundBlob, pieces: Range<u64>) -> Result<Option<Vec<Bytes>>, BufferError> {
        read_pieces(&self.store, found, pieces).await
    }
}

async fn keep(buffer: &Buffer, uploads: BTreeMap<BlobDigest, u64>) -> Result<BTreeMap<BlobDigest, Blob>, BufferError> {
    Ok(buffer.store.write(KeepBlobs { uploads, now: buffer.clock.now() }).await?)
}

/// Reads a blob that is stored whole, if there is one with this digest.
pub async fn read(store: &Store, digest: BlobDigest) -> Result<Option<Vec<u8>>, BufferError> {
    let Some((key, blob)) = store.read(FindBlob(digest)).await? else { return Ok(None) };
    let pieces = blobs::pieces(blob.bytes);
    let read = read_pieces(store, &FoundBlob { blob, key }, 0..pieces).await?;
    Ok(read.map(|pieces| pieces.concat()))
}

async fn read_pieces(store: &Store, found: &FoundBlob, pieces: Range<u64>) -> Result<Option<Vec<Bytes>>, BufferError> {
    let keys: Vec<_> = pieces.clone().map(|index| found.key.piece(index)).collect();
    let wanted = keys.len();
    let read = store.payloads(keys).await?;
    if read.len() < wanted {
        return Ok(None);
    }
    let bytes = found.blob.bytes;
    let length = read.iter().map(|stored| stored.payload.body.len()).sum();
    let is_intact = work::run(length, || {
        pieces.clone().zip(&read).all(|(index, stored)| blobs::is_intact(bytes, index, &stored.payload))
    });
    if !is_intact.await {
        let digest = found.blob.digest;
        return Err(StoreError::Corrupt(format!("the upload {digest} is damaged: `forebay doctor` says more")).into());
    }
    Ok(Some(read.into_iter().map(|stored| stored.payload.body).collect()))
}
