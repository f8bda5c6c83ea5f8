//! A key: its public id, its secret, which the service does not keep, and the hash that the service keeps instead.

use std::fmt;

use forebay_wire::{ApiKey, KeyInfo, KeyRequest, Violation};

use super::{Role, globs::PolicyGlobs};
use crate::{
    clock::Timestamp,
    ids::{KeyPk, check_name},
    refusal::Refusal,
};

/// The prefix of every key. Secret scanners recognise keys by it.
pub const KEY_PREFIX: &str = "fb_";

/// Hexadecimal digits of an id.
const ID_DIGITS: usize = 12;

/// Hexadecimal digits of a secret: 256 bits.
const SECRET_DIGITS: usize = 64;

/// The longest lifetime of a key: ten years, the same bound as for every other configured duration.
const EXPIRES_IN_S_MAX: u64 = 315_360_000;

/// The public part of a key: it names the key in lists, logs and revocations.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(String);

impl KeyId {
    /// Parses twelve hexadecimal digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        is_hex(text, ID_DIGITS).then(|| Self(text.to_owned()))
    }

    /// The id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The BLAKE3 hash of a whole key, including the id.
///
/// Two hashes are compared in constant time, because `==` of [`blake3::Hash`] guarantees it. That is why the hash is
/// kept in that type: a comparison of byte arrays would stop at the first difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHash(blake3::Hash);

impl KeyHash {
    fn of(key: &str) -> Self {
        Self(blake3::hash(key.as_bytes()))
    }

    /// From the 32 bytes of [`Self::as_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(blake3::Hash::from_bytes(bytes))
    }

    /// The 32 bytes that the store keeps.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// A hash that no key has. The service compares with it when the key does not exist.
    #[must_use]
    pub fn of_nothing() -> Self {
        Self::from_bytes([0; 32])
    }
}

/// A key as a caller presents it. It is well formed, but not yet checked.
#[derive(Debug)]
pub struct PresentedKey {
    /// The id of the key that the caller claims to have.
    pub key_id: KeyId,
    /// The hash of the presented key.
    pub hash: KeyHash,
}

impl PresentedKey {
    /// Parses `fb_<id>_<secret>`. The secret is hashed and then forgotten.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (key_id, secret) = text.strip_prefix(KEY_PREFIX)?.split_once('_')?;
        if !is_hex(secret, SECRET_DIGITS) {
            return None;
        }
        Some(Self { key_id: KeyId::parse(key_id)?, hash: KeyHash::of(text) })
    }
}

/// A new key, ready to be stored.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// Its public part.
    pub key_id: KeyId,
    /// Who or what the key is for.
    pub name: String,
    /// What the key may do.
    pub role: Role,
    /// The policies that the key may access.
    pub policies: PolicyGlobs,
    /// The hash that the secret is checked against.
    pub hash: KeyHash,
    /// When the key was created.
    pub created_at: Timestamp,
    /// When the key expires, if it does.
    pub expires_at: Option<Timestamp>,
}

impl NewKey {
    /// Creates a key as requested, together with its secret. The caller shows the secret once.
    pub fn mint(request: KeyRequest, now: Timestamp) -> Result<(Self, ApiKey), Refusal> {
        let mut violations = Vec::new();
        let mut refuse = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
        let KeyRequest { name, role, policies, expires_in_s } = request;
        if let Err(detail) = check_name(&name) {
            refuse("/name".to_owned(), detail);
        }
        if expires_in_s.is_some_and(|seconds| !(1..=EXPIRES_IN_S_MAX).contains(&seconds)) {
            refuse("/expires_in_s".to_owned(), format!("must be 1 to {EXPIRES_IN_S_MAX}"));
        }
        let policies = policies.map_or_else(|| Ok(PolicyGlobs::all()), |globs| PolicyGlobs::parse(&globs));
        if let Err((index, error)) = &policies {
            refuse(format!("/policies/{index}"), error.to_string());
        }
        let (Ok(policies), true) = (policies, violations.is_empty()) else {
            return Err(Refusal::Invalid(violations));
        };
        // The random number generator is cryptographic and seeded by the operating system.
        let random = |digits: usize| -> String {
            rand::random::<[u8; SECRET_DIGITS / 2]>()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .take(digits / 2)
                .collect()
        };
        let key_id = KeyId(random(ID_DIGITS));
        let key = format!("{KEY_PREFIX}{key_id}_{}", random(SECRET_DIGITS));
        let expires_at = expires_in_s.map(|seconds| now.plus_seconds(seconds));
        let hash = KeyHash::of(&key);
        Ok((Self { key_id, name, role, policies, hash, created_at: now, expires_at }, ApiKey::new(key)))
    }
}

/// A key as the store has it.
#[derive(Clone, Debug)]
pub struct StoredKey {
    /// The key's row number. Row numbers ascend in the order of creation.
    pub key_pk: KeyPk,
    /// The key as it was created.
    pub key: NewKey,
    /// When the key was last accepted. Uses are written with a delay, so the latest may be missing.
    pub last_used_at: Option<Timestamp>,
    /// When the key was revoked, if it was.
    pub revoked_at: Option<Timestamp>,
}

impl StoredKey {
    /// The key as lists of keys show it.
    #[must_use]
    pub fn on_wire(&self) -> KeyInfo {
        let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
        KeyInfo {
            key_id: self.key.key_id.to_string(),
            name: self.key.name.clone(),
            role: self.key.role,
            policies: self.key.policies.as_slice().to_vec(),
            created_at: self.key.created_at.to_string(),
            last_used_at: time(self.last_used_at),
            expires_at: time(self.key.expires_at),
            revoked_at: time(self.revoked_at),
        }
    }
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
    pub key_id: KeyId,
    /// The time.
    pub used_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> KeyRequest {
        KeyRequest { name: "agents".to_owned(), role: Role::Produce, policies: None, expires_in_s: None }
    }

    #[test]
    fn a_minted_key_is_recognised_and_any_other_is_not() {
        let (key, secret) = NewKey::mint(request(), Timestamp::from_micros(0)).expect("the request is valid");
        let presented = PresentedKey::parse(secret.reveal()).expect("it is well formed");
        assert_eq!((&presented.key_id, presented.hash), (&key.key_id, key.hash));
        let (_, other) = NewKey::mint(request(), Timestamp::from_micros(0)).expect("the request is valid");
        let swapped = format!("{}{}", &secret.reveal()[..16], &other.reveal()[16..]);
        let presented = PresentedKey::parse(&swapped).expect("it is well formed");
        assert_eq!(presented.key_id, key.key_id);
        assert_ne!(presented.hash, key.hash);
    }

    #[test]
    fn a_key_has_one_form() {
        let (_, secret) = NewKey::mint(request(), Timestamp::from_micros(0)).expect("the request is valid");
        let secret = secret.reveal();
        assert_eq!(secret.len(), 3 + 12 + 1 + 64);
        for other in [&secret[1..], &secret[..79], &secret.to_uppercase(), &format!("{secret}0"), "", "fb__"] {
            assert!(PresentedKey::parse(other).is_none(), "{other}");
        }
    }

    #[test]
    fn secrets_stay_out_of_what_is_printed() {
        let (key, secret) = NewKey::mint(request(), Timestamp::from_micros(0)).expect("the request is valid");
        let random = &secret.reveal()[16..];
        assert!(!format!("{secret:?}{key:?}").contains(random));
        assert!(!format!("{:?}", PresentedKey::parse(secret.reveal())).contains(random));
    }

    #[test]
    fn every_wrong_value_of_a_request_is_named() {
        let wrong = KeyRequest {
            name: String::new(),
            policies: Some(vec!["a".to_owned(), "b c".to_owned()]),
            expires_in_s: Some(0),
            ..request()
        };
        let Err(Refusal::Invalid(violations)) = NewKey::mint(wrong, Timestamp::from_micros(0)) else {
            panic!("the request is invalid")
        };
        let pointers: Vec<_> = violations.iter().map(|violation| violation.pointer.as_str()).collect();
        assert_eq!(pointers, ["/name", "/expires_in_s", "/policies/1"]);
    }
}
