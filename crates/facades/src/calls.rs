//! What handlers get of a request: what its caller may do, which consumer it is, and the body.

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::request::Parts,
};
use forebay_api::http::{
    body::{ReadBody, pay, read},
    guard::{Caller, owner},
    problem::Failure,
};
use forebay_bounds::{budget::Owner, work};
use forebay_domain::{access::Grant, ids::PolicyName};
use forebay_gateway::structure;
use forebay_service::reading::Reader;

use crate::{Facade, paths::PathConsumer};

/// The caller of a facade. It may access the facade's policy.
pub(crate) struct Call {
    pub(crate) grant: Grant,
    /// The consumer that the path names, if it names one.
    pub(crate) consumer: Option<String>,
}

impl<O: Send + Sync + 'static> FromRequestParts<Facade<O>> for Call {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, facade: &Facade<O>) -> Result<Self, Failure> {
        let Caller(grant) = Caller::from_request_parts(parts, facade).await?;
        grant.check(&facade.policy)?;
        let consumer = parts.extensions.get::<PathConsumer>().map(|PathConsumer(name)| name.clone());
        Ok(Self { grant, consumer })
    }
}

impl Call {
    /// The reader whose leases this caller has: that of the name in the path, or else that of the caller's key, or else
    /// one that all callers share.
    pub(crate) fn reader(&self, facade: &str, policy: &PolicyName) -> Result<Reader, Failure> {
        let name = match (&self.consumer, &self.grant.key_id) {
            (Some(name), _) => format!("{facade}/{name}"),
            (None, Some(key)) => format!("{facade}/key/{}", key.as_str()),
            (None, None) => facade.to_owned(),
        };
        Reader::new(policy.clone(), &name)
            .map_err(|error| Failure::invalid("", format!("the consumer in the path after /c/ {error}")))
    }
}

/// A body of at most `limits.body_bytes`, which may be compressed, with its share of the budget of posts, which also pays
/// for its values. Its media type does not matter.
pub(crate) struct Posted(pub(crate) ReadBody);

impl<O: Send + Sync + 'static> FromRequest<Facade<O>> for Posted {
    type Rejection = Failure;

    async fn from_request(request: Request, facade: &Facade<O>) -> Result<Self, Failure> {
        let api = &facade.api;
        // A body that could not be stored is not read.
        if !api.buffer().is_writable() {
            return Err(Failure::unwritable());
        }
        let (parts, body) = request.into_parts();
        let owner = parts.extensions.get::<Grant>().map_or_else(Owner::of_keyless, owner);
        let budget = &api.budgets().posts;
        let ReadBody { bytes, mut shares } = read(budget, owner, api.limits(), &parts.headers, body).await?;
        let price = work::run(bytes.len(), || structure::price_with_columns(&bytes)).await;
        pay(budget, &mut shares, price)?;
        Ok(Self(ReadBody { bytes, shares }))
    }
}
