//! The table of the roles that each route needs. Routes without an entry need the role `admin`. A test compares the
//! table with the `OpenAPI` document.
//!
//! | calls | produce | score | train | read | admin |
//! |---|---|---|---|---|---|
//! | `POST /admissions`, `POST /trajectories`, `POST /imports/{format}` | x | | | | x |
//! | `POST /media`, `PUT /media/{digest}` | x | | | | x |
//! | `POST /columns`, `PUT /columns/{digest}` | x | | | | x |
//! | `GET /media/{digest}` | x | x | x | x | x |
//! | `POST /sessions`, resume, saved states, finish, abort | x | | | | x |
//! | `POST /scores` | x | x | | | x |
//! | `POST /scores/leases`, extend, `POST /scores/retry` | | x | | | x |
//! | `GET /scores` | x | x | | x | x |
//! | `GET /trajectories`, `GET /groups`, `GET /sessions`, turns | x | x | | x | x |
//! | `GET /policies`, `GET /policies/{p}`, `GET /policies/{p}/why`, `GET /overview`, `GET /why` | x | x | x | x | x |
//! | `POST /batches`, extend, ack, nack | | | x | | x |
//! | `GET /batches`, `GET /batches/{id}`, samples | | | x | x | x |
//! | checkpoints, resume, `PUT /policies/{p}/version` | | | x | | x |
//! | `GET /trajectories/content`, `GET /policies/{p}/tokenizer` | | x | | x | x |
//! | `PUT /policies/{p}/suites/{s}` | x | | x | | x |
//! | `GET /policies/{p}/evals`, `GET /policies/{p}/suites/{s}/tasks` | x | x | x | x | x |
//! | `GET /policies/{p}/series`, `steps`, `journal` | | | x | x | x |
//! | `POST /policies/{p}/filters/try` | | | | x | x |
//! | `GET /whoami`, `GET /filters/variables` | x | x | x | x | x |
//! | `GET /exports`, `GET /stats`; `GET /metrics` (only with policies `*`) | | | | x | x |
//! | `PUT` and `PATCH /policies/{p}`, reset, close, discard, readmit | | | | | x |
//! | `/keys` (only with policies `*`) | | | | | x |
//!
//! A call can only access the policies of its key. Two routes need a key with policies `*`: `/metrics`, because it
//! names all policies, and `/keys`, because a caller could otherwise create a key with more policies than its own.
//! `/healthz`, `/readyz`, `/`, `/console`, `/docs` and `/openapi.json` need no key, because probes cannot hold one and
//! browsers cannot send one when they open a page. Their responses contain nothing secret.

use Role::{Admin, Produce, Read, Score, Train};
use axum::http::Method;
use forebay_domain::access::Grant;
use forebay_wire::Role;

use Needs::{Nothing, Role as By, RoleOverAll as ByOverAll};

/// What a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// No key.
    Nothing,
    /// A key of one of these roles.
    Role(&'static [Role]),
    /// A key of one of these roles, for all policies.
    RoleOverAll(&'static [Role]),
}

/// Method and template of every route.
const ROUTES: &[(&str, &str, Needs)] = &[
    ("POST", "/admissions", By(&[Produce, Admin])),
    ("POST", "/trajectories", By(&[Produce, Admin])),
    ("POST", "/imports/{format}", By(&[Produce, Admin])),
    ("POST", "/media", By(&[Produce, Admin])),
    ("PUT", "/media/{digest}", By(&[Produce, Admin])),
    ("POST", "/columns", By(&[Produce, Admin])),
    ("PUT", "/columns/{digest}", By(&[Produce, Admin])),
    ("GET", "/media/{digest}", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/trajectories", By(&[Produce, Score, Read, Admin])),
    ("POST", "/scores", By(&[Produce, Score, Admin])),
    ("POST", "/scores/leases", By(&[Score, Admin])),
    ("POST", "/scores/leases/extend", By(&[Score, Admin])),
    ("POST", "/scores/retry", By(&[Score, Admin])),
    ("GET", "/scores", By(&[Produce, Score, Read, Admin])),
    ("POST", "/sessions", By(&[Produce, Admin])),
    ("GET", "/sessions", By(&[Produce, Read, Admin])),
    ("GET", "/sessions/{id}", By(&[Produce, Read, Admin])),
    ("GET", "/sessions/{id}/turns", By(&[Produce, Read, Admin])),
    ("POST", "/sessions/{id}/resume", By(&[Produce, Admin])),
    ("PUT", "/sessions/{id}/state", By(&[Produce, Admin])),
    ("GET", "/sessions/{id}/state", By(&[Produce, Admin])),
    ("POST", "/sessions/{id}/finish", By(&[Produce, Admin])),
    ("POST", "/sessions/{id}/abort", By(&[Produce, Admin])),
    ("POST", "/sessions/finish", By(&[Produce, Admin])),
    ("GET", "/groups", By(&[Produce, Score, Read, Admin])),
    ("POST", "/groups/close", By(&[Admin])),
    ("POST", "/groups/discard", By(&[Admin])),
    ("POST", "/batches", By(&[Train, Admin])),
    ("GET", "/batches", By(&[Train, Read, Admin])),
    ("GET", "/batches/{id}", By(&[Train, Read, Admin])),
    ("GET", "/batches/{id}/samples", By(&[Train, Read, Admin])),
    ("POST", "/batches/{id}/extend", By(&[Train, Admin])),
    ("POST", "/batches/{id}/ack", By(&[Train, Admin])),
    ("POST", "/batches/{id}/nack", By(&[Train, Admin])),
    ("POST", "/batches/{id}/readmit", By(&[Admin])),
    ("GET", "/policies", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/policies/{policy}", By(&[Produce, Score, Train, Read, Admin])),
    ("PUT", "/policies/{policy}", By(&[Admin])),
    ("PATCH", "/policies/{policy}", By(&[Admin])),
    ("PUT", "/policies/{policy}/version", By(&[Train, Admin])),
    ("PUT", "/policies/{policy}/suites/{suite}", By(&[Produce, Train, Admin])),
    ("GET", "/policies/{policy}/suites/{suite}/tasks", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/policies/{policy}/evals", By(&[Produce, Score, Train, Read, Admin])),
    ("POST", "/policies/{policy}/checkpoints", By(&[Train, Admin])),
    ("POST", "/policies/{policy}/resume", By(&[Train, Admin])),
    ("POST", "/policies/{policy}/reset", By(&[Admin])),
    ("GET", "/overview", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/policies/{policy}/why", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/why", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/policies/{policy}/series", By(&[Train, Read, Admin])),
    ("GET", "/policies/{policy}/steps", By(&[Train, Read, Admin])),
    ("GET", "/policies/{policy}/journal", By(&[Train, Read, Admin])),
    ("GET", "/policies/{policy}/tokenizer", By(&[Read, Admin])),
    ("GET", "/keys", ByOverAll(&[Admin])),
    ("POST", "/keys", ByOverAll(&[Admin])),
    ("DELETE", "/keys/{id}", ByOverAll(&[Admin])),
    ("GET", "/trajectories/content", By(&[Score, Read, Admin])),
    ("POST", "/policies/{policy}/filters/try", By(&[Read, Admin])),
    ("GET", "/filters/variables", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/whoami", By(&[Produce, Score, Train, Read, Admin])),
    ("GET", "/exports", By(&[Read, Admin])),
    ("GET", "/stats", By(&[Read, Admin])),
    ("GET", "/metrics", ByOverAll(&[Read, Admin])),
    ("GET", "/healthz", Nothing),
    ("GET", "/readyz", Nothing),
    ("GET", "/", Nothing),
    ("GET", "/console/{*path}", Nothing),
    ("GET", "/openapi.json", Nothing),
    ("GET", "/docs", Nothing),
    ("GET", "/docs/", Nothing),
    ("GET", "/docs/{*rest}", Nothing),
];

/// What a call of a route needs. A route without an entry needs the role `admin`.
pub fn needs(method: &Method, route: &str) -> Needs {
    // The handler of GET also answers HEAD.
    let verb = if method == Method::HEAD { "GET" } else { method.as_str() };
    let entry = ROUTES.iter().find(|entry| entry.0 == verb && entry.1 == route);
    entry.map_or(ByOverAll(&[Admin]), |entry| entry.2)
}

impl Needs {
    /// Why a grant is not sufficient, or nothing if it is.
    pub fn lacking(self, grant: &Grant) -> Option<String> {
        let (Self::Role(roles) | Self::RoleOverAll(roles)) = self else { return None };
        if !roles.contains(&grant.role) {
            let names: Vec<&str> = roles.iter().map(|role| role.as_str()).collect();
            return Some(format!(
                "a key of role `{}` may not make this call; it needs a key of role {}",
                grant.role,
                names.join(" or ")
            ));
        }
        let over_all = matches!(self, Self::RoleOverAll(_));
        (over_all && !grant.policies.are_all()).then(|| "this call needs a key for all policies (`*`)".to_owned())
    }

    /// The sentence for the `OpenAPI` document, or nothing if no key is needed.
    pub fn describe(self) -> Option<String> {
        let (Self::Role(roles) | Self::RoleOverAll(roles)) = self else { return None };
        let names: Vec<&str> = roles.iter().map(|role| role.as_str()).collect();
        let over_all = if matches!(self, Self::RoleOverAll(_)) { ", with policies `*`" } else { "" };
        Some(format!("Keys: {}{over_all}.", names.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use forebay_domain::access::globs::PolicyGlobs;

    /// Routes that are not in the document, because Prometheus and the browser define their format.
    const UNDOCUMENTED: [(&str, &str); 7] = [
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/console/{*path}"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/docs/"),
        ("GET", "/docs/{*rest}"),
    ];

    fn documented() -> BTreeSet<(String, String)> {
        let document: serde_json::Value = serde_json::from_str(&crate::openapi()).expect("it is JSON");
        let paths = document["paths"].as_object().expect("it has paths");
        let of_path = |(path, verbs): (&String, &serde_json::Value)| {
            let verbs = verbs.as_object().expect("a path has verbs");
            verbs.keys().map(|verb| (verb.to_uppercase(), path.clone())).collect::<Vec<_>>()
        };
        paths.iter().flat_map(of_path).collect()
    }

    #[test]
    fn every_route_has_an_entry_and_every_entry_a_route() {
        let mut routes = documented();
        routes.extend(UNDOCUMENTED.map(|(verb, path)| (verb.to_owned(), path.to_owned())));
        let entries: BTreeSet<_> = ROUTES.iter().map(|entry| (entry.0.to_owned(), entry.1.to_owned())).collect();
        assert_eq!(entries.len(), ROUTES.len(), "an entry appears twice");
        assert_eq!(entries, routes);
    }

    #[test]
    fn what_has_no_entry_is_for_operators_alone() {
        for role in Role::ALL {
            let grant = Grant { role, policies: PolicyGlobs::all(), key_id: None };
            let lacking = needs(&Method::PATCH, "/somewhere/new").lacking(&grant);
            assert_eq!(lacking.is_none(), role == Admin, "{role}");
        }
    }
}
