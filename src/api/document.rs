//! What the `OpenAPI` document says besides its routes: what it is about, which keys a call takes, and what every call
//! may answer.
//!
//! Apart from the handlers because it follows from the table of roles, the extractors and the store that they share, and
//! would be said the same way at each of them.

use axum::http::Method;
use forebay_client::wire::PROBLEM_JSON;
use utoipa::{
    OpenApi,
    openapi::{
        Content, OpenApi as Document, Ref, RefOr, ResponseBuilder,
        path::{Operation, PathItem},
        security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme},
    },
};

use super::roles::{self, Needs};

/// Name of the only security scheme.
const SCHEME: &str = "key";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Forebay",
        description = "The durable rollout buffer between LLM agents and the trainers that learn from them. \
            Errors are RFC 9457 problems with a stable `type`.",
        license(name = "MIT OR Apache-2.0")
    ),
    tags(
        (name = "agents", description = "Hand in trajectories, look up what became of them"),
        (name = "trainers", description = "Lease batches, ack them, keep the lineage of the weights"),
        (name = "policies", description = "Rules, versions and what a trainer is waiting for"),
        (name = "operations", description = "Health, metrics and totals"),
    )
)]
struct Frame;

/// The problems of a call with a body.
const BODY_PROBLEMS: [(&str, &str); 5] = [
    ("400", "Malformed"),
    ("408", "The body took too long to arrive"),
    ("413", "Too large"),
    ("415", "Not a type that is taken"),
    ("422", "Invalid, with pointers"),
];

/// The problems of a call with parameters.
const PARAMETER_PROBLEMS: [(&str, &str); 1] = [("422", "Invalid")];

/// The problems of every call.
const STORE_PROBLEMS: [(&str, &str); 1] = [("503", "The store cannot answer, or the service is stopping")];

/// The problems of a call that takes a key.
const KEY_PROBLEMS: [(&str, &str); 2] =
    [("401", "`unauthorized`: no valid key"), ("403", "`forbidden`: the key does not allow this")];

/// The document before its routes.
pub(super) fn document() -> Document {
    Frame::openapi()
}

/// The document with what calls have in common, where they do not name it themselves.
pub(super) fn complete(mut document: Document) -> Document {
    let scheme = Http::builder().scheme(HttpAuthScheme::Bearer).description(Some(
        "`fb_<id>_<secret>`, as `forebay keys create` prints it. Not needed while the service has no keys.",
    ));
    let components = document.components.get_or_insert_default();
    components.security_schemes.insert(SCHEME.to_owned(), SecurityScheme::Http(scheme.build()).into());
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            describe(operation, roles::needs(&method, path));
            add(operation, &STORE_PROBLEMS);
            if operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty()) {
                add(operation, &PARAMETER_PROBLEMS);
            }
            if operation.request_body.is_some() {
                add(operation, &BODY_PROBLEMS);
            }
        }
    }
    document
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    let PathItem { get, put, post, patch, delete, .. } = item;
    let all = [
        (Method::GET, get),
        (Method::PUT, put),
        (Method::POST, post),
        (Method::PATCH, patch),
        (Method::DELETE, delete),
    ];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

fn describe(operation: &mut Operation, needs: Needs) {
    let Some(keys) = needs.describe() else { return };
    let before = operation.description.take().map(|text| text + "\n\n").unwrap_or_default();
    operation.description = Some(before + &keys);
    operation.security = Some(vec![SecurityRequirement::new(SCHEME, [] as [&str; 0])]);
    add(operation, &KEY_PROBLEMS);
}

fn add(operation: &mut Operation, problems: &[(&str, &str)]) {
    for (status, description) in problems {
        operation.responses.responses.entry((*status).to_owned()).or_insert_with(|| {
            let problem = Content::new(Some(RefOr::Ref(Ref::from_schema_name("Problem"))));
            ResponseBuilder::new().description(*description).content(PROBLEM_JSON, problem).build().into()
        });
    }
}
