//! Uploads: bytes that are stored once, and that rollouts name by their digest.
//!
//! Pieces are hashed here, before the store has them and after it has read them.

use std::ops::Range;

use bytes::Bytes;
use forebay_bounds::work;
use forebay_domain::blobs::{self, Blob, BlobDigest, PIECE_BYTES};
pub use forebay_store::ops::blobs::Stored;
use forebay_store::{
    error::StoreError,
    ops::blobs::{BlobPk, FindBlob, KeepBlob, StorePieces},
};
use tracing::instrument;

use crate::{Buffer, error::BufferError};

/// A blob as far as it is stored, for reading its pieces.
#[derive(Clone, Debug)]
pub struct FoundBlob {
    pub blob: Blob,
    key: BlobPk,
}

impl Buffer {
    /// Finds a blob.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %digest))]
    pub async fn blob(&self, digest: BlobDigest) -> Result<Option<FoundBlob>, BufferError> {
        let found = self.store.read(FindBlob(digest)).await?;
        Ok(found.map(|(key, blob)| FoundBlob { blob, key }))
    }

    /// Finds a blob, and keeps it as long as a new upload.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %digest))]
    pub async fn keep_blob(&self, digest: BlobDigest) -> Result<Option<Blob>, BufferError> {
        let found = self.store.write(KeepBlob { digest, now: self.clock.now() }).await?;
        Ok(found.map(|(_, blob)| blob))
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
        let pieces = work::run(body.len(), || {
            let starts = (0..body.len()).step_by(PIECE_BYTES as usize);
            let pieces = starts.map(|start| body.slice(start..body.len().min(start + PIECE_BYTES as usize)));
            (first..).zip(pieces).map(|(index, piece)| blobs::piece(bytes, index, piece)).collect()
        })
        .await;
        let store = StorePieces { digest, bytes, media_type, first, pieces, now: self.clock.now() };
        Ok(self.store.write(store).await?)
    }

    /// Reads pieces of a blob that is whole, and checks them. None if they were deleted meanwhile.
    #[instrument(level = "debug", skip_all, fields(blob.digest = %found.blob.digest))]
    pub async fn pieces(&self, found: &FoundBlob, pieces: Range<u64>) -> Result<Option<Vec<Bytes>>, BufferError> {
        let keys: Vec<_> = pieces.clone().map(|index| found.key.piece(index)).collect();
        let wanted = keys.len();
        let read = self.store.payloads(keys).await?;
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
            return Err(
                StoreError::Corrupt(format!("the upload {digest} is damaged: `forebay doctor` says more")).into()
            );
        }
        Ok(Some(read.into_iter().map(|stored| stored.payload.body).collect()))
    }
}
