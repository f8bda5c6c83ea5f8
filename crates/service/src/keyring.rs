//! The keys of the store, kept in memory, so that requests are checked without a database query.
//!
//! It is separate from the key store because other processes change the keys too: another replica, or `forebay keys` on
//! a shared database, creates and revokes keys. The keyring therefore reads all keys twice a second, immediately after a
//! change that this process makes, and when a caller presents a key that it does not know. If a key is revoked while the service handles a request with it, the request
//! is finished. A request that waits for a batch or a version does not get it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use forebay_domain::{
    access::{
        Grant,
        key::{KeyFilter, KeyHash, KeyId, KeyUse, NewKey, PresentedKey, StoredKey},
    },
    clock::{Clock, Timestamp},
    refusal::Refusal,
};
use forebay_store::{
    Store,
    error::StoreError,
    ops::keys::{CreateKey, ListKeys, RevokeKey, WriteKeyUses},
};
use forebay_wire::{ApiKey, KeyRequest, Role};

use crate::error::BufferError;

#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most keys that are not revoked. The bound exists because all of them are held in memory and read twice a second.
pub const LIVE_KEYS_MAX: u32 = 1_000;

/// Pause between two reads of the store's keys. With it, a revocation by another process takes effect within a second.
const RELOAD_EVERY: Duration = Duration::from_millis(500);

/// The least time between the last read and one for a caller whose key is unknown. Callers share such a read, so that
/// guessed keys cause at most twenty of them in a second.
const CATCH_UP_EVERY: Duration = Duration::from_millis(50);

/// How many reads pass between two writes of the times of use: ten seconds in all. Requests therefore cause no database
/// writes of their own.
const WRITE_USES_EVERY: u32 = 20;

/// Why a caller's key is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The request has no key.
    Missing,
    /// The key is malformed, unknown to this service, or revoked.
    Invalid,
    /// The key has expired.
    Expired,
    /// The key is that of a session, which is only for the listener of agents.
    Session,
}

impl Denied {
    /// The name in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Invalid => "invalid",
            Self::Expired => "expired",
            Self::Session => "session",
        }
    }
}

/// The live keys of the service, and when each was last used.
pub struct Keyring {
    keys: Arc<Store>,
    clock: Arc<dyn Clock>,
    /// Whether requests need a key even while no key exists.
    required: bool,
    live: RwLock<Arc<HashMap<KeyId, NewKey>>>,
    uses: Mutex<HashMap<KeyId, Timestamp>>,
    /// Allows one read of the store at a time, because an older result must not overwrite a newer one. It has the time at
    /// which the last one began.
    reloading: tokio::sync::Mutex<Option<Instant>>,
    /// How often the store was read.
    #[cfg(test)]
    reads: AtomicUsize,
}

impl Keyring {
    /// Reads the keys of a store. If `required` is set, requests need a key even while no key exists.
    pub async fn start(keys: Arc<Store>, clock: Arc<dyn Clock>, required: bool) -> Result<Self, StoreError> {
        let keyring = Self {
            keys,
            clock,
            required,
            live: RwLock::default(),
            uses: Mutex::default(),
            reloading: tokio::sync::Mutex::default(),
            #[cfg(test)]
            reads: AtomicUsize::default(),
        };
        keyring.reload().await?;
        Ok(keyring)
    }

    /// Whether a key exists that is not revoked. An expired key counts, so that the service does not become open when
    /// its last key expires.
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

    /// What a caller may do with the presented key, or without one.
    pub fn admit(&self, presented: Option<&str>) -> Result<Grant, Denied> {
        if !self.is_required() {
            return Ok(Grant::open());
        }
        let presented = PresentedKey::parse(presented.ok_or(Denied::Missing)?).ok_or(Denied::Invalid)?;
        let live = self.live();
        let key = find(&live, &presented).ok_or(Denied::Invalid)?;
        let now = self.clock.now();
        if key.expires_at.is_some_and(|end| end <= now) {
            return Err(Denied::Expired);
        }
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).insert(presented.key_id.clone(), now);
        Ok(Grant { role: key.role, policies: key.policies.clone(), key_id: Some(presented.key_id) })
    }

    /// Whether a caller presents a key that may have been created since the last read.
    #[must_use]
    pub fn is_unknown(&self, presented: Option<&str>) -> bool {
        let presented = presented.filter(|_| self.is_required()).and_then(PresentedKey::parse);
        // A wrong secret of a key that exists is read for, too, so that the response time does not tell that it exists.
        presented.is_some_and(|presented| find(&self.live(), &presented).is_none())
    }

    /// Reads the keys for a caller whose key is unknown. Returns after a read that began when the caller was there.
    pub async fn catch_up(&self) -> Result<(), StoreError> {
        let arrived = Instant::now();
        let mut began = self.reloading.lock().await;
        if let Some(last) = *began {
            if last >= arrived {
                return Ok(());
            }
            tokio::time::sleep_until((last + CATCH_UP_EVERY).into()).await;
        }
        self.read(&mut began).await
    }

    /// The name of a live key: who or what it is for.
    #[must_use]
    pub fn name(&self, key_id: &KeyId) -> Option<String> {
        self.live().get(key_id).map(|key| key.name.clone())
    }

    /// Whether a grant is still valid. Long polls check it again before they are answered.
    #[must_use]
    pub fn still_grants(&self, grant: &Grant) -> bool {
        let Some(key_id) = &grant.key_id else { return !self.is_required() };
        let live = self.live();
        live.get(key_id).is_some_and(|key| key.expires_at.is_none_or(|end| end > self.clock.now()))
    }

    /// Creates a key and returns it with its secret, which cannot be read again.
    pub async fn create(&self, request: KeyRequest) -> Result<(StoredKey, ApiKey), BufferError> {
        let (key, secret) = NewKey::mint(request, self.clock.now())?;
        let is_operators = key.role == Role::Admin && key.policies.are_all();
        if !is_operators && !self.has_keys() {
            return Err(Refusal::FirstKey.into());
        }
        let stored = create(&self.keys, key).await?;
        self.reload().await?;
        Ok((stored, secret))
    }

    /// Revokes a key. This process rejects the key from the moment this function returns.
    pub async fn revoke(&self, key_id: KeyId) -> Result<StoredKey, BufferError> {
        self.write_uses().await?;
        let stored = revoke(&self.keys, key_id, self.clock.now()).await?;
        self.reload().await?;
        if !self.is_required() {
            tracing::warn!("the last key was revoked: every client that can reach the service may now do everything");
        }
        Ok(stored)
    }

    /// The keys in the order in which they were created, including the uses that this process has seen.
    pub async fn list(&self, after: i64, limit: u32) -> Result<Vec<StoredKey>, BufferError> {
        self.write_uses().await?;
        Ok(self.keys.read(ListKeys(KeyFilter { live_only: false, after, limit })).await?)
    }

    /// Keeps the keys up to date until the future is dropped.
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
                tracing::warn!(error = %error, "reading the keys failed; the keys read before stay in use");
            }
        }
    }

    /// Reads the keys from the store.
    pub async fn reload(&self) -> Result<(), StoreError> {
        self.read(&mut *self.reloading.lock().await).await
    }

    async fn read(&self, began: &mut Option<Instant>) -> Result<(), StoreError> {
        *began = Some(Instant::now());
        // The limit is above the bound, because two replicas that create keys at the same time can exceed it.
        let filter = KeyFilter { live_only: true, after: 0, limit: LIVE_KEYS_MAX * 2 };
        #[cfg(test)]
        self.reads.fetch_add(1, Ordering::SeqCst);
        let keys = self.keys.read(ListKeys(filter)).await?;
        let live = keys.into_iter().map(|stored| (stored.key.key_id.clone(), stored.key)).collect();
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(live);
        Ok(())
    }

    /// Writes the times of use that were recorded since the last write.
    pub async fn write_uses(&self) -> Result<(), StoreError> {
        let uses = std::mem::take(&mut *self.uses.lock().unwrap_or_else(PoisonError::into_inner));
        if uses.is_empty() {
            return Ok(());
        }
        let key_use = |(key_id, used_at): (&KeyId, &Timestamp)| KeyUse { key_id: key_id.clone(), used_at: *used_at };
        let written = self.keys.write(WriteKeyUses(uses.iter().map(key_use).collect())).await;
        if written.is_err() {
            // The failed times are written the next time, unless the key has been used again since.
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

/// The live key that a caller presents.
fn find<'k>(live: &'k HashMap<KeyId, NewKey>, presented: &PresentedKey) -> Option<&'k NewKey> {
    let known = live.get(&presented.key_id);
    // Unknown keys are compared too, so that the response time does not tell whether a key id exists.
    let expected = known.map_or_else(KeyHash::of_nothing, |key| key.hash);
    let matches = presented.hash == expected;
    known.filter(|_| matches)
}

/// Stores a key and logs it.
pub async fn create(store: &Store, key: NewKey) -> Result<StoredKey, BufferError> {
    let stored = store.write(CreateKey { key, live_max: LIVE_KEYS_MAX }).await??;
    let key = &stored.key;
    tracing::info!(
        key.id = %key.key_id, key.name = ?key.name, key.role = %key.role, key.policies = %key.policies, "key created"
    );
    Ok(stored)
}

/// Revokes a key and logs it.
pub async fn revoke(store: &Store, key_id: KeyId, now: Timestamp) -> Result<StoredKey, BufferError> {
    let stored = store.write(RevokeKey { key_id, now }).await?.ok_or(Refusal::Unknown("the key"))?;
    tracing::info!(key.id = %stored.key.key_id, key.name = ?stored.key.name, "key revoked");
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use forebay_domain::clock::AnchoredClock;
    use forebay_telemetry::metrics::Metrics;

    use super::*;

    #[tokio::test]
    async fn callers_with_unknown_keys_share_reads_of_the_store() {
        let store = forebay_store::open("sqlite::memory:", Metrics::new().store()).await.expect("it opens");
        let keyring = Keyring::start(store, Arc::new(AnchoredClock::new()), true).await;
        let keyring = keyring.expect("the store can be read");
        let callers = futures::future::join_all((0..100).map(|_| keyring.catch_up())).await;
        assert!(callers.iter().all(Result::is_ok));
        let reads = keyring.reads.load(Ordering::SeqCst);
        assert!((2..=4).contains(&reads), "one at the start, and at most three for a hundred callers: {reads}");
    }
}
