//! Identities: a bare `Uuid` or `String` never crosses a function boundary.

use std::{fmt, str::FromStr, sync::Arc};

use uuid::Uuid;

/// Longest rollout, group, request and consumer id in bytes.
pub const ID_BYTES_MAX: usize = 256;

/// Longest policy name in bytes.
pub const POLICY_NAME_BYTES_MAX: usize = 128;

/// Why a text is not an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// Empty or longer than its bound.
    #[error("must be 1 to {ID_BYTES_MAX} bytes")]
    Length,
    /// Contains a control character.
    #[error("must not contain control characters")]
    Control,
    /// Not a policy name.
    #[error("must match [A-Za-z0-9._-]{{1,128}} and be neither `.` nor `..`")]
    PolicyName,
    /// Not a batch id.
    #[error("must be the id of a batch")]
    BatchId,
    /// Not an admission id.
    #[error("must be the id of an admission")]
    AdmissionId,
    /// Not the id of a session.
    #[error("must be the id of a session")]
    SessionId,
    /// Not the id of a replica.
    #[error("must be the id of a replica")]
    ReplicaId,
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses an id of 1 to 256 bytes without control characters.
            pub fn parse(text: &str) -> Result<Self, InvalidId> {
                check_text(text).map(|()| Self(text.into()))
            }

            /// The id as sent.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Key of the id for indexes.
            #[must_use]
            pub fn key(&self) -> IdKey {
                IdKey::of(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id! {
    /// One execution of an agent by one policy on one task, named by its producer.
    RolloutId
}
text_id! {
    /// The rollouts of one task that are compared with each other.
    GroupId
}
text_id! {
    /// One execution of an agent or of several agents, which rollouts of several policies may belong to.
    ExecutionId
}
text_id! {
    /// Makes a request for a batch repeatable.
    RequestId
}
text_id! {
    /// The consumer that asks for batches; the scope of a request id.
    ConsumerName
}

impl RolloutId {
    /// A fresh id for a trajectory that came without one, ordered by time.
    #[must_use]
    pub fn mint() -> Self {
        Self(Uuid::now_v7().to_string().into())
    }
}

/// The first byte of a stored execution id that is a UUID. No id begins with it, because it is a control character.
const STORED_UUID: u8 = 0;

impl ExecutionId {
    /// A fresh id for a bundle that came without one, ordered by time.
    #[must_use]
    pub fn mint() -> Self {
        Self(Uuid::now_v7().to_string().into())
    }

    /// The bytes that the store keeps: half of the text if the id is a UUID, which most are.
    #[must_use]
    pub fn stored(&self) -> Vec<u8> {
        match Uuid::try_parse(&self.0).ok().filter(|uuid| uuid.to_string() == *self.0) {
            Some(uuid) => [&[STORED_UUID], uuid.as_bytes().as_slice()].concat(),
            None => self.0.as_bytes().to_vec(),
        }
    }

    /// From the bytes of [`Self::stored`]; none if they are no id.
    #[must_use]
    pub fn from_stored(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first() {
            Some((&STORED_UUID, uuid)) => Uuid::from_slice(uuid).ok().map(|uuid| Self(uuid.to_string().into())),
            _ => std::str::from_utf8(bytes).ok().and_then(|text| Self::parse(text).ok()),
        }
    }
}

impl From<&RolloutId> for GroupId {
    /// A trajectory without a group is a group of one, named like its rollout.
    fn from(rollout_id: &RolloutId) -> Self {
        Self(Arc::clone(&rollout_id.0))
    }
}

/// The BLAKE3 digest of a blob, which is its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlobDigest(pub [u8; 32]);

/// A text is not the name of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be the BLAKE3 digest of the bytes: 64 hexadecimal digits in lower case")]
pub struct InvalidDigest;

impl FromStr for BlobDigest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        // Only in one form, so that equal names are equal texts.
        let is_lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let digest = blake3::Hash::from_hex(text).ok().filter(|_| is_lower);
        digest.map(|digest| Self(*digest.as_bytes())).ok_or(InvalidDigest)
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

/// The caller that shares of scarce resources are counted by: the id of its key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallerId(Arc<str>);

impl CallerId {
    /// The caller with the key of this id.
    #[must_use]
    pub fn new(key_id: &str) -> Self {
        Self(key_id.into())
    }

    /// The id of its key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What follows the name of a policy in the name of its evaluations. No policy has it in its name.
const EVALUATIONS: &str = "@eval";

/// A policy in training.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyName(Arc<str>);

impl PolicyName {
    /// Parses `[A-Za-z0-9._-]{1,128}`, which needs no encoding in a path. `.` and `..` are refused: clients and proxies
    /// resolve them before a path is sent, so such a policy could not be reached.
    pub fn parse(text: &str) -> Result<Self, InvalidId> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let fits = (1..=POLICY_NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(allowed);
        if fits && !matches!(text, "." | "..") { Ok(Self(text.into())) } else { Err(InvalidId::PolicyName) }
    }

    /// Reads a name as the store has it: that of a policy, or of the rollouts that evaluate one.
    pub fn stored(text: &str) -> Result<Self, InvalidId> {
        Self::parse(text.strip_suffix(EVALUATIONS).unwrap_or(text)).map(|_| Self(text.into()))
    }

    /// The name under which the store keeps the rollouts that evaluate this policy. They are a policy of their own there, so
    /// that nothing of them is grouped, batched or counted with what is trained.
    #[must_use]
    pub fn evaluations(&self) -> Self {
        if self.is_evaluations() { self.clone() } else { Self(format!("{}{EVALUATIONS}", self.0).into()) }
    }

    /// Whether this is such a name.
    #[must_use]
    pub fn is_evaluations(&self) -> bool {
        self.0.ends_with(EVALUATIONS)
    }

    /// The policy that callers know: the one that is evaluated, if this is such a name.
    #[must_use]
    pub fn public(&self) -> Self {
        if self.is_evaluations() { Self(self.public_str().into()) } else { self.clone() }
    }

    fn public_str(&self) -> &str {
        self.0.strip_suffix(EVALUATIONS).unwrap_or(&self.0)
    }

    /// The name in the store, in metrics and in the log.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for PolicyName {
    /// The policy that always exists.
    fn default() -> Self {
        Self("default".into())
    }
}

/// As callers know it.
impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.public_str())
    }
}

/// Bytes of an id's BLAKE3 hash in its key.
const HASH_BYTES: usize = 16;

/// Bytes of the beginning and of the end of a long id that its key contains.
const SHOWN_BYTES: (usize, usize) = (40, 24);

/// The key of an id in an index: at most 80 bytes, where an id may have 256.
///
/// A short id is its own key. The key of a long id is its beginning, a hash of everything but its end, and its end. So
/// similar ids are close together: the rollouts of a group change one page of the index, however large the index is.
/// With hashes they would change one page each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdKey {
    bytes: [u8; Self::BYTES_MAX],
    length: u8,
}

impl IdKey {
    const BYTES_MAX: usize = SHOWN_BYTES.0 + HASH_BYTES + SHOWN_BYTES.1;

    /// The key of an id.
    #[must_use]
    pub fn of(id: &str) -> Self {
        let id = id.as_bytes();
        if id.len() < Self::BYTES_MAX {
            return Self::joined(&[id]);
        }
        let (before, end) = id.split_at(id.len() - SHOWN_BYTES.1);
        let hash = blake3::hash(before);
        Self::joined(&[&before[..SHOWN_BYTES.0], &hash.as_bytes()[..HASH_BYTES], end])
    }

    /// Concatenates parts, which fit together.
    fn joined(parts: &[&[u8]]) -> Self {
        let (mut bytes, mut length) = ([0; Self::BYTES_MAX], 0);
        for part in parts {
            bytes[length..length + part.len()].copy_from_slice(part);
            length += part.len();
        }
        Self { bytes, length: length as u8 }
    }

    /// The key in hexadecimal digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        let digits = self.as_bytes().iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits.map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])).collect()
    }

    /// The key's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length.into()]
    }
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Uuid);

        impl $name {
            /// A fresh id, ordered by time.
            #[must_use]
            pub fn mint() -> Self {
                Self(Uuid::now_v7())
            }

            /// From the 16 bytes of [`Self::as_bytes`].
            #[must_use]
            pub fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(Uuid::from_bytes(bytes))
            }

            /// The 16 bytes that the store keeps.
            #[must_use]
            pub fn as_bytes(&self) -> &[u8] {
                self.0.as_bytes()
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Uuid::try_parse(text).map(Self).map_err(|_| InvalidId::$name)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

uuid_id! {
    /// An immutable list of whole groups.
    BatchId
}
uuid_id! {
    /// Room reserved before work starts.
    AdmissionId
}
uuid_id! {
    /// The recorded calls of one execution of an agent.
    SessionId
}
uuid_id! {
    /// The identity of one process, from its start to its end, among those that share a database.
    ReplicaId
}

/// Proof of a claim: 122 random bits, new at every delivery.
#[derive(Clone, PartialEq, Eq)]
pub struct LeaseToken(Arc<str>);

impl LeaseToken {
    /// A fresh token.
    #[must_use]
    pub fn mint() -> Self {
        Self(Uuid::new_v4().simple().to_string().into())
    }

    /// A token as the client sent it. A token that was never created matches no lease.
    #[must_use]
    pub fn presented(text: &str) -> Self {
        Self(text.into())
    }

    /// The token.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for LeaseToken {
    /// Hides the token: it is a secret and must never reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseToken(..)")
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub i64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// The trainer's optimizer step.
    Step
}
number! {
    /// A policy's weight version.
    Version
}
number! {
    /// Lineage of a policy's weights.
    Epoch
}
number! {
    /// Fresh start of a policy.
    Run
}
number! {
    /// Row of a policy in the store.
    PolicyPk
}
number! {
    /// Row of a group in the store.
    GroupPk
}
number! {
    /// Row of a rollout in the store; ascending in the order of arrival within a group.
    RolloutPk
}
number! {
    /// Row of a batch in the store; ascending in the order in which batches were cut.
    BatchPk
}
number! {
    /// Row of a session in the store; ascending in the order in which sessions were opened.
    SessionPk
}
number! {
    /// Row of a recorded call in the store; ascending in the order in which calls were recorded.
    CallPk
}
number! {
    /// Row of a key in the store; ascending in the order in which keys were created.
    KeyPk
}

/// Refuses a text that is no name: a name has 1 to 256 bytes without control characters. The error continues the name of
/// the field.
pub fn check_name(text: &str) -> Result<(), String> {
    check_text(text).map_err(|_| format!("must be 1 to {ID_BYTES_MAX} bytes without control characters"))
}

fn check_text(text: &str) -> Result<(), InvalidId> {
    if text.is_empty() || text.len() > ID_BYTES_MAX {
        Err(InvalidId::Length)
    } else if text.chars().any(char::is_control) {
        Err(InvalidId::Control)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_bounded_and_free_of_control_characters() {
        assert!(RolloutId::parse("7f3c-0 \u{e9}").is_ok());
        assert_eq!(RolloutId::parse(""), Err(InvalidId::Length));
        assert_eq!(RolloutId::parse(&"x".repeat(257)), Err(InvalidId::Length));
        assert_eq!(GroupId::parse("a\nb"), Err(InvalidId::Control));
        assert_eq!(GroupId::parse("a\u{85}b"), Err(InvalidId::Control));
    }

    #[test]
    fn keys_tell_ids_apart_and_keep_siblings_together() {
        let ids = |head: &str| -> Vec<String> { (0..20).map(|index| format!("{head}-{index}")).collect() };
        // Lengths around the limit up to which a key is the id itself, and the maximum length.
        let long = |length: usize| "x".repeat(length - 3);
        let heads = ["task1".to_owned(), "task10".to_owned(), "T".to_owned(), long(79), long(80), long(81), long(256)];
        assert!(heads[4].len() < 80 && heads[5].len() + 2 == 80, "siblings on both sides of the longest that is a key");
        let all: Vec<Vec<String>> = heads.iter().map(|head| ids(head)).collect();
        let keys: std::collections::BTreeSet<IdKey> = all.concat().iter().map(|id| IdKey::of(id)).collect();
        assert_eq!(keys.len(), 7 * 20);
        let mut sorted = all.concat();
        sorted.sort_by_key(|id| IdKey::of(id).as_bytes().to_vec());
        let places = |group: &Vec<String>| -> Vec<usize> {
            group.iter().filter_map(|id| sorted.iter().position(|other| other == id)).collect()
        };
        // The end of a long id in its key has a fixed length, so siblings with one digit and with two are not adjacent.
        let longest = &all[6];
        for siblings in [&all[0], &all[1], &all[2], &longest[..10].to_vec(), &longest[10..].to_vec()] {
            let places = places(siblings);
            let (first, last) = (places.iter().min(), places.iter().max());
            assert_eq!(first.zip(last).map(|(first, last)| last - first + 1), Some(siblings.len()), "{siblings:?}");
        }
        assert_eq!(IdKey::of("task1-0").to_hex(), "7461736b312d30");
    }

    #[test]
    fn execution_ids_are_read_as_they_were_stored() {
        let uuid = "01890a5d-ac96-774b-bcce-b302099a8057";
        let braced = format!("{{{uuid}}}");
        let texts = [uuid, &uuid.to_uppercase(), &uuid.replace('-', ""), &braced, "7f3c", "0123456789abcdef", "\u{e9}"];
        let minted = ExecutionId::mint();
        for id in texts.map(|text| ExecutionId::parse(text).expect("it is an id")).into_iter().chain([minted.clone()]) {
            assert_eq!(ExecutionId::from_stored(&id.stored()), Some(id));
        }
        assert_eq!(minted.stored().len(), 17);
        for damaged in [&[][..], &[0], &[0, 1, 2], b"a\nb", b"\xff", &[b'x'; 257]] {
            assert_eq!(ExecutionId::from_stored(damaged), None, "{damaged:?}");
        }
    }

    #[test]
    fn policy_names_need_no_encoding() {
        assert!(PolicyName::parse("math.solver-1_x").is_ok());
        for name in ["", ".", "..", "a/b", "a b", "\u{e9}"] {
            assert_eq!(PolicyName::parse(name), Err(InvalidId::PolicyName), "{name:?}");
        }
        assert_eq!(PolicyName::parse(&"a".repeat(129)), Err(InvalidId::PolicyName));
    }

    #[test]
    fn lease_tokens_stay_out_of_logs() {
        let token = LeaseToken::mint();
        assert!(!format!("{token:?}").contains(token.as_str()));
    }
}
