//! What the policies of a team may have together. It is in the configuration of the service, so that no key can raise
//! it, not even an `admin` key of the team.

use crate::access::globs::PolicyGlobs;

/// The bounds of a service for its policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// The most policies of the service. They are held in memory.
    pub policies_max: u32,
    /// The bounds of teams. A policy that several of them include is within all of them.
    pub of_teams: Vec<Quota>,
}

/// The bounds of one team; what is none is not bounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The policies of the team.
    pub policies: PolicyGlobs,
    /// The most policies.
    pub policies_max: Option<u32>,
    /// The most bytes that `backlog.max_bytes` of all of them may add up to. It bounds what is promised, because adding
    /// up what is stored would cost every post a read of all policies of the team.
    pub backlog_bytes_max: Option<u64>,
    /// The most open sessions.
    pub sessions_max: Option<u32>,
}

impl Quotas {
    /// The teams that a policy belongs to.
    pub fn of<'a>(&'a self, policy: &'a str) -> impl Iterator<Item = &'a Quota> {
        self.of_teams.iter().filter(move |quota| quota.policies.matches(policy))
    }
}
