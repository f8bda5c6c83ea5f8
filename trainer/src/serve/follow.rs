//! Follows a policy: loads every version that its trainer publishes, and lets the model draw with it from the next token
//! on.
//!
//! A version is loaded while the old weights draw, so nothing pauses. If a version cannot be loaded, the old weights stay
//! and the load is tried again: the folder may have been replaced by that of a newer version.

use std::{sync::Arc, time::Duration};

use super::{
    model::{Hosting, OpenError, ServedModel, Slot, UpdateError},
    runner::Weights,
};
use crate::{
    chain,
    model::InferenceModel,
    published::{self, FolderError, Publication},
    service::Service,
};

/// Pause after a failed attempt to load a version; it doubles with each attempt.
const PAUSE: Duration = Duration::from_millis(500);

/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Why a version is not served.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Update(#[from] UpdateError),
}

/// Follows the policy of `service` until it is dropped.
pub(super) async fn follow(service: Service, slot: Arc<Slot>, hosting: Hosting) {
    let (mut seen, mut loaded) = (None, None);
    let mut pause = PAUSE;
    loop {
        let status = match published::status(&service, seen).await {
            Ok(status) => status,
            Err(error) => {
                let policy = service.policy();
                tracing::error!(policy, error = chain(&error), "cannot follow the policy; trying again");
                tokio::time::sleep(PAUSE_MAX).await;
                continue;
            }
        };
        seen = Some(status.version);
        let Some(current) = Publication::current(&status).filter(|current| Some(current) != loaded.as_ref()) else {
            continue;
        };
        match load(&current, &slot, &hosting).await {
            Ok(()) => (loaded, pause) = (Some(current), PAUSE),
            Err(error) => {
                let (model, version) = (slot.name(), current.version);
                tracing::warn!(model, weight_version = version, error = chain(&error), "cannot load the version");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
                // The status is fetched again at once.
                seen = None;
            }
        }
    }
}

/// Loads a version, and starts the model with it if it is the first.
async fn load(publication: &Publication, slot: &Slot, hosting: &Hosting) -> Result<(), FollowError> {
    let (publication, name, host) = (publication.clone(), slot.name().to_owned(), hosting.clone());
    let version = publication.version;
    let reading = tokio::task::spawn_blocking(move || {
        publication.read(|folder| {
            let model = InferenceModel::load(folder, host.device, host.compute);
            model.map(|model| (folder.to_owned(), model)).map_err(|source| OpenError::Load { name, source })
        })
    });
    let (folder, model) = reading.await.map_err(|_| UpdateError::Ended)???;
    let weights = Weights { model, version: version.to_string().into() };
    if let Ok(served) = slot.model() {
        served.exchange(weights, &folder).await?;
    } else {
        slot.fill(ServedModel::start(slot.name(), weights, &folder, hosting)?);
    }
    Ok(())
}
