//! The parts of the `OpenAPI` document that are not routes: the introduction, the keys that each call needs, and the
//! errors that several calls or all calls may return.
//!
//! It is separate from the handlers because it follows from the table of roles, the extractors and the store, which all
//! handlers share. Otherwise each handler would repeat it. A handler declares only the errors of its own call: the types
//! of this file where other calls have the same error, and otherwise the status with a description. That every error
//! is a problem document is added here.

use axum::http::Method;
use forebay_wire::{ListOrder, PROBLEM_JSON, Problem, ShardBalance};
use serde_json::Value;
use utoipa::{
    IntoResponses, OpenApi, ToSchema,
    openapi::{
        Content, OpenApi as Document, Ref, RefOr, ResponseBuilder,
        path::{Operation, PathItem},
        security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme},
    },
};

use crate::http::roles::{self, Needs};

/// Name of the only security scheme.
const SCHEME: &str = "key";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Forebay",
        description = "The durable rollout buffer between LLM agents and the trainers that learn from them. \
            \n\nThe flow: an agent posts the rollouts of a task to `/trajectories`, with the same `group_id` for all that are \
            compared with each other. A complete group becomes ready, and ready groups are cut into batches. A \
            trainer starts with `/policies/{policy}/resume`. For each step, it leases a batch (`POST /batches`), reads \
            its rows (`/batches/{id}/samples`), computes gradients, acks the batch with the number of the step, and updates its \
            weights only after it has received status 200. When it has saved them, it posts the step to \
            `/policies/{policy}/checkpoints`, \
            and publishes a version with `PUT /policies/{policy}/version`, which agents learn from `/policies/{policy}`. \
            `GET /trajectories?rollout_id=` returns the state of a rollout.\
            \n\nErrors are RFC 9457 problems with a stable `type`.",
        license(name = "MIT OR Apache-2.0")
    ),
    tags(
        (name = "agents", description = "Post trajectories and look up their state"),
        (name = "scorers", description = "Give scores to rollouts, and lease the work of giving them"),
        (name = "evaluation", description = "See what suites of tasks say about each version"),
        (name = "trainers", description = "Lease and ack batches, record checkpoints and resume"),
        (name = "policies", description = "Rules, versions and status of policies"),
        (name = "console", description = "Looking: what the live page asks"),
        (name = "operations", description = "Health, metrics and totals"),
    ),
    components(schemas(ListOrder, Problem, ShardBalance))
)]
struct Frame;

/// Example bodies of requests and responses by operation id. A test sends every request.
const EXAMPLES: &str = include_str!("examples.json");

/// An Arrow IPC stream.
#[derive(ToSchema)]
#[schema(value_type = String, format = Binary)]
#[expect(dead_code, reason = "it only describes a body")]
pub(crate) struct ArrowStream(Vec<u8>);

/// Any bytes.
#[derive(ToSchema)]
#[schema(value_type = String, format = Binary)]
#[expect(dead_code, reason = "it only describes a body")]
pub(crate) struct AnyContent(Vec<u8>);

/// A tokenizer as Hugging Face's `tokenizers` writes it.
#[derive(ToSchema)]
#[schema(value_type = Object)]
#[expect(dead_code, reason = "it only describes a body")]
pub(crate) struct TokenizerJson(serde_json::Map<String, Value>);

/// No such policy
#[derive(IntoResponses)]
#[response(status = 404)]
pub(crate) struct NoSuchPolicy;

/// No such policy or group
#[derive(IntoResponses)]
#[response(status = 404)]
pub(crate) struct NoSuchGroup;

/// No such batch
#[derive(IntoResponses)]
#[response(status = 404)]
pub(crate) struct NoSuchBatch;

/// No such session
#[derive(IntoResponses)]
#[response(status = 404)]
pub(crate) struct NoSuchSession;

/// `session-ended`, `end-conflict`: another request ended the session; `session-reset`; `rollout-conflict`;
/// `group-size-conflict`
#[derive(IntoResponses)]
#[response(status = 409)]
pub(crate) struct SessionConflict;

/// `superseded`
#[derive(IntoResponses)]
#[response(status = 409)]
pub(crate) struct Superseded;

/// `lease-lost` or `superseded`
#[derive(IntoResponses)]
#[response(status = 409)]
pub(crate) struct LeaseLost;

/// Invalid query
#[derive(IntoResponses)]
#[response(status = 422)]
pub(crate) struct InvalidQuery;

/// The rules are invalid
#[derive(IntoResponses)]
#[response(status = 422)]
pub(crate) struct InvalidRules;

/// The errors of a call with a body.
const BODY_PROBLEMS: [(&str, &str); 5] = [
    ("400", "Malformed"),
    ("408", "The body took too long to arrive"),
    ("413", "Too large"),
    ("415", "The media type is not supported"),
    ("422", "Invalid: `errors` has a pointer for each violation"),
];

/// The errors of a call with parameters.
const PARAMETER_PROBLEMS: [(&str, &str); 1] = [("422", "Invalid")];

/// The errors of every call.
const STORE_PROBLEMS: [(&str, &str); 1] = [("503", "The store cannot answer, or the service is stopping")];

/// The errors of a call that needs a key.
const KEY_PROBLEMS: [(&str, &str); 2] =
    [("401", "`unauthorized`: no valid key"), ("403", "`forbidden`: the key does not allow this")];

/// The document without its routes.
pub(crate) fn document() -> Document {
    Frame::openapi()
}

/// Adds what calls have in common, unless a call declares it itself.
pub(crate) fn complete(mut document: Document) -> Document {
    let scheme = Http::builder().scheme(HttpAuthScheme::Bearer).description(Some(
        "A key of the form `fb_<id>_<secret>`, as `forebay keys create` prints it. It is not needed while the service has no keys.",
    ));
    let examples: Value = serde_json::from_str(EXAMPLES).expect("the file is JSON, which a test checks");
    let components = document.components.get_or_insert_default();
    components.security_schemes.insert(SCHEME.to_owned(), SecurityScheme::Http(scheme.build()).into());
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            describe(operation, roles::needs(&method, path));
            exemplify(operation, &examples);
            add(operation, &STORE_PROBLEMS);
            if operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty()) {
                add(operation, &PARAMETER_PROBLEMS);
            }
            if operation.request_body.is_some() {
                add(operation, &BODY_PROBLEMS);
            }
            give_errors_their_document(operation);
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

/// Adds the example bodies of an operation, if there are any.
fn exemplify(operation: &mut Operation, examples: &Value) {
    let Some(example) = operation.operation_id.as_ref().and_then(|id| examples.get(id)) else { return };
    if let (Some(RefOr::T(body)), Some(request)) = (&mut operation.request_body, example.get("request")) {
        for (_, content) in body.content.iter_mut().filter(|(media, _)| !media.ends_with("stream")) {
            show(content, request);
        }
    }
    for (status, answer) in example.get("answers").and_then(Value::as_object).into_iter().flatten() {
        if let Some(RefOr::T(response)) = operation.responses.responses.get_mut(status) {
            response.content.values_mut().for_each(|content| show(content, answer));
        }
    }
}

fn show(content: &mut RefOr<Content>, example: &Value) {
    if let RefOr::T(content) = content {
        content.example = Some(example.clone());
    }
}

fn add(operation: &mut Operation, problems: &[(&str, &str)]) {
    for (status, description) in problems {
        let response = || ResponseBuilder::new().description(*description).build().into();
        operation.responses.responses.entry((*status).to_owned()).or_insert_with(response);
    }
}

/// The body of every error is a problem document.
fn give_errors_their_document(operation: &mut Operation) {
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && (status.starts_with('4') || status.starts_with('5'))
        {
            let problem = Content::new(Some(RefOr::Ref(Ref::from_schema_name("Problem"))));
            response.content.insert(PROBLEM_JSON.to_owned(), problem.into());
        }
    }
}
