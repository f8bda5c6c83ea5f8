//! The keys of the store, in memory: every request is checked without a look at the database.
//!
//! Separate from the store's keys because they change behind this process's back: another replica, or `forebay keys` on
//! a shared database, creates and revokes them. So they are read again twice a second, and at once after a change
//! that goes through this process. A request that is already being served when its key is revoked is finished; one that
//! waits for a batch or a version gets none.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use forebay_client::wire::{ApiKey, KeyRequest};

use super::{
    Grant, Role,
    key::{KeyHash, KeyId, NewKey, PresentedKey, StoredKey},
};
use crate::{
    buffer::{
        Buffer,
        refusal::{BufferError, Refusal},
    },
    clock::Timestamp,
    store::{KeyFilter, Store, StoreError},
};

/// Keys that are not revoked: all of them are held, and read again and again.
pub const LIVE_KEYS_MAX: u32 = 1_000;

/// Pause between two looks at the store's keys: a revocation elsewhere takes effect within a second.
const RELOAD_EVERY: Duration = Duration::from_millis(500);

/// Looks between two writes of when keys were used: ten seconds, so that traffic costs no writes of its own.
const WRITE_USES_EVERY: u32 = 20;

/// Why a caller is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// No key was sent.
    Missing,
    /// What was sent is no key, or none of this service, or revoked.
    Invalid,
    /// The key's time is over.
    Expired,
}

impl Denied {
    /// The name in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Invalid => "invalid",
            Self::Expired => "expired",
        }
    }
}

/// What the service knows of its keys.
pub struct Keyring {
    buffer: Buffer,
    /// Whether a key is needed although there is none.
    required: bool,
    live: RwLock<Arc<HashMap<KeyId, NewKey>>>,
    uses: Mutex<HashMap<KeyId, Timestamp>>,
    /// One look at the store at a time: an older answer must not overwrite a newer one.
    reloading: tokio::sync::Mutex<()>,
}

impl Keyring {
    /// The keys of a buffer's store. With `required`, a key is needed also while there is none.
    pub async fn start(buffer: Buffer, required: bool) -> Result<Self, StoreError> {
        let keyring = Self {
            buffer,
            required,
            live: RwLock::default(),
            uses: Mutex::default(),
            reloading: tokio::sync::Mutex::default(),
        };
        keyring.reload().await?;
        Ok(keyring)
    }

    /// Whether there is a key that is not revoked. One that has expired counts: time must not open what a key closed.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        !self.live().is_empty()
    }

    /// Keys that are not revoked.
    #[must_use]
    pub fn live_keys(&self) -> usize {
        self.live().len()
    }

    /// Whether callers need a key.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.required || self.has_keys()
    }

    /// What a caller may do who presents this key, or none.
    pub fn admit(&self, presented: Option<&str>) -> Result<Grant, Denied> {
        if !self.is_required() {
            return Ok(Grant::open());
        }
        let presented = PresentedKey::parse(presented.ok_or(Denied::Missing)?).ok_or(Denied::Invalid)?;
        let live = self.live();
        let known = live.get(&presented.key_id);
        // Compared also where there is nothing to compare with, so that both ways take the same time.
        let expected = known.map_or_else(KeyHash::of_nothing, |key| key.hash);
        let matches = presented.hash == expected;
        let key = known.filter(|_| matches).ok_or(Denied::Invalid)?;
        let now = self.buffer.now();
        if key.expires_at.is_some_and(|end| end <= now) {
            return Err(Denied::Expired);
        }
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).insert(presented.key_id.clone(), now);
        Ok(Grant { role: key.role, policies: key.policies.clone(), key_id: Some(presented.key_id) })
    }

    /// Whether what a caller was granted still holds: who waits is asked again before it is given anything.
    #[must_use]
    pub fn still_grants(&self, grant: &Grant) -> bool {
        let Some(key_id) = &grant.key_id else { return !self.is_required() };
        let live = self.live();
        live.get(key_id).is_some_and(|key| key.expires_at.is_none_or(|end| end > self.buffer.now()))
    }

    /// Creates a key; with its secret, which nobody can read again.
    pub async fn create(&self, request: KeyRequest) -> Result<(StoredKey, ApiKey), BufferError> {
        let (key, secret) = NewKey::mint(request, self.buffer.now())?;
        let is_operators = key.role == Role::Admin && key.policies.are_all();
        if !is_operators && !self.has_keys() {
            return Err(Refusal::FirstKey.into());
        }
        let stored = create(&**self.buffer.store(), key).await?;
        self.reload().await?;
        Ok((stored, secret))
    }

    /// Revokes a key. From when this answers, this process takes it no more.
    pub async fn revoke(&self, key_id: KeyId) -> Result<StoredKey, BufferError> {
        self.write_uses().await?;
        let stored = revoke(&**self.buffer.store(), key_id, self.buffer.now()).await?;
        self.reload().await?;
        if !self.is_required() {
            tracing::warn!("the last key is revoked: from now on everybody who reaches the service may do everything");
        }
        Ok(stored)
    }

    /// Keys in the order in which they were created, with the uses that this process has seen.
    pub async fn list(&self, after: i64, limit: u32) -> Result<Vec<StoredKey>, BufferError> {
        self.write_uses().await?;
        Ok(self.buffer.store().keys(KeyFilter { live_only: false, after, limit }).await?)
    }

    /// Keeps the keys up to date until it is dropped.
    pub async fn run(&self) {
        let mut looks = 0_u32;
        loop {
            tokio::time::sleep(RELOAD_EVERY).await;
            looks = looks.wrapping_add(1);
            let mut outcome = self.reload().await;
            if outcome.is_ok() && looks.is_multiple_of(WRITE_USES_EVERY) {
                outcome = self.write_uses().await;
            }
            if let Err(error) = outcome {
                tracing::warn!(error = %error, "the keys could not be read; those known before are used on");
            }
        }
    }

    /// Reads the keys from the store.
    pub async fn reload(&self) -> Result<(), StoreError> {
        let _one_at_a_time = self.reloading.lock().await;
        // A few more than may be created: two replicas can pass the bound at once.
        let filter = KeyFilter { live_only: true, after: 0, limit: LIVE_KEYS_MAX * 2 };
        let keys = self.buffer.store().keys(filter).await?;
        let live = keys.into_iter().map(|stored| (stored.key.key_id.clone(), stored.key)).collect();
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(live);
        Ok(())
    }

    /// Writes when keys were used since the last time.
    pub async fn write_uses(&self) -> Result<(), StoreError> {
        let uses = std::mem::take(&mut *self.uses.lock().unwrap_or_else(PoisonError::into_inner));
        if uses.is_empty() {
            return Ok(());
        }
        let written = self.buffer.store().write_key_uses(uses.clone().into_iter().collect()).await;
        if written.is_err() {
            // They are written the next time, unless the key was used again since.
            let mut since = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
            for (key_id, used_at) in uses {
                since.entry(key_id).or_insert(used_at);
            }
        }
        written
    }

    fn live(&self) -> Arc<HashMap<KeyId, NewKey>> {
        Arc::clone(&self.live.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Stores a key, and says so in the log.
pub async fn create(store: &dyn Store, key: NewKey) -> Result<StoredKey, BufferError> {
    let stored = store.create_key(key, LIVE_KEYS_MAX).await??;
    let key = &stored.key;
    tracing::info!(
        key.id = %key.key_id, key.name = ?key.name, key.role = %key.role, key.policies = %key.policies, "key created"
    );
    Ok(stored)
}

/// Revokes a key, and says so in the log.
pub async fn revoke(store: &dyn Store, key_id: KeyId, now: Timestamp) -> Result<StoredKey, BufferError> {
    let stored = store.revoke_key(key_id, now).await?.ok_or(Refusal::Unknown("the key"))?;
    tracing::info!(key.id = %stored.key.key_id, key.name = ?stored.key.name, "key revoked");
    Ok(stored)
}
