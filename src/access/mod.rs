//! Keys: who may do what, and which policies they see. No HTTP, no SQL.
//!
//! Separate from [`buffer`](crate::buffer), which serves whoever asks: who asks is settled before it is asked.
//!
//! - [`globs`]: which policies a key sees. [`key`]: a key, its secret and its hash.
//! - [`keyring`]: the keys of the store, kept in memory, renewed within a second.
//!
//! Which route takes which role is [`api`](crate::api)'s table.
//!
//! Secrets are stored as a plain BLAKE3 hash. Password hashes are slow on purpose, because people choose passwords that
//! can be guessed; a secret here is 256 random bits, so that guessing is hopeless at any speed, and a slow hash would
//! only let strangers burn the service's time. Hashes are compared in constant time.

pub mod globs;
pub mod key;
pub mod keyring;

pub use forebay_client::wire::Role;

use self::{globs::PolicyGlobs, key::KeyId};
use crate::buffer::{ids::PolicyName, refusal::Refusal};

/// What a caller may do: the outcome of looking at its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// What the caller may do.
    pub role: Role,
    /// Policies that the caller sees.
    pub policies: PolicyGlobs,
    /// The key; none where the service needs none.
    pub key_id: Option<KeyId>,
}

impl Grant {
    /// What everybody may do where no key is needed: everything.
    #[must_use]
    pub fn open() -> Self {
        Self { role: Role::Admin, policies: PolicyGlobs::all(), key_id: None }
    }

    /// Whether the caller sees a policy.
    #[must_use]
    pub fn sees(&self, policy: &PolicyName) -> bool {
        self.policies.matches(policy.as_str())
    }

    /// Refuses a policy that the caller does not see, exactly as one that does not exist.
    pub fn check(&self, policy: &PolicyName) -> Result<(), Refusal> {
        if self.sees(policy) { Ok(()) } else { Err(Refusal::UnknownPolicy(policy.clone())) }
    }
}
