//! What the handlers of the facade share.

use crate::{
    Facade,
    atropos::{retries::Posts, state::Cache},
};

/// The name of the protocol in leases.
pub(super) const NAME: &str = "atropos";

/// What the handlers of this facade share besides what all facades share.
#[derive(Default)]
pub(crate) struct Shared {
    pub(super) cache: Cache,
    pub(super) posts: Posts,
}

/// The facade.
pub(super) type Atropos = Facade<Shared>;
