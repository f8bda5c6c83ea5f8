//! Keys: who may make which calls, for which policies.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a key permits. The service's `api::roles` lists the roles that each route accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Role {
    /// For agents: post trajectories and see what happened to them.
    Produce,
    /// For graders: score rollouts and read what they score.
    Score,
    /// For trainers: lease and ack batches, and record the lineage of the weights.
    Train,
    /// For people and monitoring: read everything, change nothing.
    Read,
    /// For operators: all calls.
    Admin,
}

impl Role {
    /// All roles, in order of increasing permissions.
    pub const ALL: [Self; 5] = [Self::Produce, Self::Score, Self::Train, Self::Read, Self::Admin];

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Score => "score",
            Self::Train => "train",
            Self::Read => "read",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request for a new key.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyRequest {
    /// Who or what the key is for: a label, not an identity.
    pub name: String,
    /// Role of the key.
    pub role: Role,
    /// Policies that the key may access: names, in which `*` stands for any characters. All policies when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<Vec<String>>,
    /// Seconds from now until the key expires; it never expires when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
}

/// A key in a list. It never contains the secret, because the service does not store it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyInfo {
    /// Id of the key, which is public: the part between `fb_` and the secret.
    pub key_id: String,
    /// Who or what the key is for.
    pub name: String,
    /// Role of the key.
    pub role: Role,
    /// Policies that the key may access.
    pub policies: Vec<String>,
    /// When it was created.
    pub created_at: String,
    /// When the key was last accepted; null if never.
    #[serde(default)]
    pub last_used_at: Option<String>,
    /// When the key expires; null if never.
    #[serde(default)]
    pub expires_at: Option<String>,
    /// When the key was revoked; null if it was not.
    #[serde(default)]
    pub revoked_at: Option<String>,
}

/// A new key. Only this answer contains the secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyCreated {
    /// Value to send as `Authorization: Bearer`.
    pub key: ApiKey,
    /// The key as it appears in lists.
    pub info: KeyInfo,
}

/// A page of keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyPage {
    /// Keys, in the order in which they were created.
    pub keys: Vec<KeyInfo>,
    /// Value of `after` for the next page; null on the last page.
    #[serde(default)]
    pub next: Option<String>,
}

/// Who the caller is, and what it may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WhoAmI {
    /// Role of the caller; `admin` for everybody while the service needs no keys.
    pub role: Role,
    /// Policies that the caller may access: names, in which `*` stands for any characters.
    pub policies: Vec<String>,
    /// Id of the caller's key; null while the service needs no keys.
    pub key_id: Option<String>,
    /// Who or what the key is for; null while the service needs no keys.
    pub name: Option<String>,
    /// Whether calls need a key.
    pub keys_required: bool,
    /// The service's version, e.g. `0.1.0`.
    pub version: String,
    /// The service's time.
    pub at: String,
}

/// A key with its secret, as callers send it: `fb_<id>_<secret>`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(value_type = String, format = Password))]
pub struct ApiKey(String);

impl ApiKey {
    /// Wraps a key without checking it; the service checks it.
    #[must_use]
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// Returns the key with its secret.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    /// A key is a secret, so this output never contains it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

impl std::str::FromStr for ApiKey {
    type Err = std::convert::Infallible;

    fn from_str(key: &str) -> Result<Self, Self::Err> {
        Ok(Self::new(key))
    }
}
