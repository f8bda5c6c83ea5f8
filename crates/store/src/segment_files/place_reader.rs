//! Reads payloads that are not in the database, from segment files or from an object store.

use std::sync::Arc;

use super::{
    folder::Place,
    object::Objects,
    reader::{Found, Reader, Scan, ScannedFrame},
};
use crate::error::StoreError;

/// What reads payloads that are not in the database.
#[derive(Clone, Debug)]
pub(crate) enum PlaceReader {
    /// Segment files.
    Files(Arc<Reader>),
    /// An object store.
    Objects(Objects),
}

impl PlaceReader {
    /// Payloads in the order of their places.
    pub(crate) async fn read(self, places: Vec<Place>) -> Result<Vec<Found>, StoreError> {
        match self {
            Self::Files(files) => {
                let read = tokio::task::spawn_blocking(move || files.read(&places));
                Ok(read.await.map_err(|_| StoreError::Closed)??)
            }
            Self::Objects(objects) => Ok(objects.read(&places).await?),
        }
    }

    /// The name of a file or object in messages.
    pub(crate) fn name(&self, file: i64) -> String {
        match self {
            Self::Files(files) => files.folder().file(file).display().to_string(),
            Self::Objects(objects) => format!("object {}", objects.path(file)),
        }
    }

    /// All frames of a file or object, up to the first bytes that are none; a text if it is missing or another one.
    pub(crate) async fn frames(
        &self,
        file: i64,
        mark: i64,
        end: u64,
    ) -> Result<Result<Vec<ScannedFrame>, String>, StoreError> {
        match self {
            Self::Files(files) => {
                let files = Arc::clone(files);
                let walk = move || {
                    files.folder().check(file, mark, end)?;
                    files.next_frames(&mut Scan::new(file, end), usize::MAX, u64::MAX)
                };
                let frames = tokio::task::spawn_blocking(walk).await.map_err(|_| StoreError::Closed)?;
                Ok(frames.map_err(|error| error.to_string()))
            }
            Self::Objects(objects) => Ok(objects.frames(file, mark).await),
        }
    }
}
