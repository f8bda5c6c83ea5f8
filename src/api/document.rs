//! What every call may answer, added to the document of the routes.
//!
//! Apart from the handlers because it follows from the extractors and the store that they share, and would be said
//! the same way at each of them.

use utoipa::openapi::{
    ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder,
    path::{Operation, PathItem},
};

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

/// Adds the problems that calls have in common where they do not name them themselves.
pub(super) fn complete(mut document: OpenApi) -> OpenApi {
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        add(operation, &STORE_PROBLEMS);
        if operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty()) {
            add(operation, &PARAMETER_PROBLEMS);
        }
        if operation.request_body.is_some() {
            add(operation, &BODY_PROBLEMS);
        }
    }
    document
}

fn operations(path: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut path.get, &mut path.put, &mut path.post].into_iter().filter_map(Option::as_mut)
}

fn add(operation: &mut Operation, problems: &[(&str, &str)]) {
    for (status, description) in problems {
        operation.responses.responses.entry((*status).to_owned()).or_insert_with(|| {
            let schema = Ref::from_schema_name("Problem");
            let content = ContentBuilder::new().schema(Some(schema)).build();
            let response =
                ResponseBuilder::new().description(*description).content("application/problem+json", content);
            RefOr::T(response.build())
        });
    }
}
