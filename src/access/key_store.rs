//! The port through which [`access`](crate::access) uses a store: the keys, and when each was last used.
//!
//! It is separate from the port of [`buffer`](crate::buffer), because the buffer does not know about keys.

use async_trait::async_trait;
use forebay_domain::clock::Timestamp;

use super::key::{KeyId, NewKey, StoredKey};
use crate::buffer::port::error::{Answer, StoreError};

/// The keys of a store.
#[async_trait]
pub trait KeyStore: Send + Sync + 'static {
    /// Stores a key, unless the store already holds `live_max` keys that are not revoked.
    async fn create_key(&self, key: NewKey, live_max: u32) -> Answer<StoredKey>;
    /// Keys in the order in which they were created.
    async fn keys(&self, filter: KeyFilter) -> Result<Vec<StoredKey>, StoreError>;
    /// Revokes a key and returns it, or returns nothing if no key has this id. Revoking a key again changes nothing.
    async fn revoke_key(&self, key_id: KeyId, now: Timestamp) -> Result<Option<StoredKey>, StoreError>;
    /// Writes when keys were last accepted. A time earlier than the stored one changes nothing.
    async fn write_key_uses(&self, uses: Vec<KeyUse>) -> Result<(), StoreError>;
}

/// Which keys to list.
#[derive(Clone, Copy, Debug)]
pub struct KeyFilter {
    /// Only keys that are not revoked.
    pub live_only: bool,
    /// Only keys after this cursor.
    pub after: i64,
    /// The most keys to return.
    pub limit: u32,
}

/// When a key was last accepted.
#[derive(Clone, Debug)]
pub struct KeyUse {
    /// The key.
    pub key_id: KeyId,
    /// The time.
    pub used_at: Timestamp,
}
