//! Keys: who may call what, of which policies.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a key may do. The service's `api::roles` says for every route which roles it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Role {
    /// Agents: hand in trajectories, see what became of them.
    Produce,
    /// Trainers: lease batches, ack them, keep the lineage of the weights.
    Train,
    /// People and monitors: look at everything, change nothing.
    Read,
    /// Operators: everything.
    Admin,
}

impl Role {
    /// All roles, the narrowest first.
    pub const ALL: [Self; 4] = [Self::Produce, Self::Train, Self::Read, Self::Admin];

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Produce => "produce",
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
    /// Who or what it is for: a label, not an identity.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// Policies that it sees: names, in which `*` stands for any characters; all policies when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<Vec<String>>,
    /// Seconds from now until it stops working; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
}

/// A key as it is listed: never its secret, which the service does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyInfo {
    /// Its public part: what stands between `fb_` and the secret.
    pub key_id: String,
    /// Who or what it is for.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// Policies that it sees.
    pub policies: Vec<String>,
    /// When it was created.
    pub created_at: String,
    /// When it was last accepted; null when never.
    #[serde(default)]
    pub last_used_at: Option<String>,
    /// When it stops working; null when never.
    #[serde(default)]
    pub expires_at: Option<String>,
    /// When it was revoked; null when it is not.
    #[serde(default)]
    pub revoked_at: Option<String>,
}

/// A new key: the only answer that ever holds its secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyCreated {
    /// What to send as `Authorization: Bearer`.
    pub key: ApiKey,
    /// The key as it is listed from now on.
    pub info: KeyInfo,
}

/// A page of keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyPage {
    /// Keys, in the order in which they were created.
    pub keys: Vec<KeyInfo>,
    /// The `after` of the next page; null on the last.
    #[serde(default)]
    pub next: Option<String>,
}

/// A key with its secret, as callers send it: `fb_<id>_<secret>`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(value_type = String, format = Password))]
pub struct ApiKey(String);

impl ApiKey {
    /// A key as it was handed out. The service checks it.
    #[must_use]
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// The key with its secret.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    /// A key is a secret: it never reaches a log.
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
