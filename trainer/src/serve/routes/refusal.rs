//! Errors as answers, in the shape that `OpenAI` gives them.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;

/// Why a request was not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Refusal {
    /// A field is wrong.
    Invalid { param: &'static str, message: String },
    /// The body is not a JSON object with the fields of the route.
    Body(String),
    /// The prompt is longer than the model's context.
    ContextLength { context: usize, prompt: usize },
    /// The body is too large.
    TooLarge,
    /// The body did not arrive in time.
    TooSlow,
    /// No model has this name.
    UnknownModel(String),
    /// There is no such route.
    NoRoute,
    /// The route has another method.
    Method,
    /// The key is missing or wrong.
    Unauthorized,
    /// The request comes from a page in a browser.
    Page,
    /// The model has accepted as much as it may.
    Overloaded { retry_after_s: u64 },
    /// The model has no weights yet.
    NoWeights { model: String, retry_after_s: u64 },
    /// The thread of the model has ended.
    Failed,
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::Body(_) | Self::ContextLength { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Page => StatusCode::FORBIDDEN,
            Self::UnknownModel(_) | Self::NoRoute => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Overloaded { .. } | Self::NoWeights { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "invalid_value",
            Self::Body(_) => "invalid_body",
            Self::ContextLength { .. } => "context_length_exceeded",
            Self::TooLarge => "body_too_large",
            Self::TooSlow => "body_timeout",
            Self::UnknownModel(_) => "model_not_found",
            Self::NoRoute => "no_such_route",
            Self::Method => "method_not_allowed",
            Self::Unauthorized => "invalid_api_key",
            Self::Page => "origin_refused",
            Self::Overloaded { .. } => "overloaded",
            Self::NoWeights { .. } => "model_not_ready",
            Self::Failed => "server_error",
        }
    }

    fn param(&self) -> Option<&'static str> {
        match self {
            Self::Invalid { param, .. } => Some(param),
            Self::UnknownModel(_) => Some("model"),
            _ => None,
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Invalid { param, message } => format!("`{param}`: {message}"),
            Self::Body(message) => format!("the body is not valid: {message}"),
            Self::ContextLength { context, prompt } => format!(
                "This model's maximum context length is {context} tokens. The prompt has {prompt} tokens, and the answer \
                 needs room for at least one more. Please shorten the prompt."
            ),
            Self::TooLarge => "the body is too large".to_owned(),
            Self::TooSlow => "the body did not arrive in time".to_owned(),
            Self::UnknownModel(name) => format!("there is no model `{name}`; GET /v1/models lists the models"),
            Self::NoRoute => "there is no such route".to_owned(),
            Self::Method => "the route does not have this method".to_owned(),
            Self::Unauthorized => "the key is missing or wrong; send it as `Authorization: Bearer KEY`".to_owned(),
            Self::Page => {
                "requests with the header `Origin` are refused: pages in a browser cannot use this server".to_owned()
            }
            Self::Overloaded { .. } => "the model has accepted as many requests as it may; try again later".to_owned(),
            Self::NoWeights { model, .. } => format!("no version of the policy of `{model}` has been published yet"),
            Self::Failed => "the thread of the model has ended; the log says why".to_owned(),
        }
    }

    /// The object `error` of the answer.
    pub(super) fn error(&self) -> serde_json::Value {
        let kind = if self.status().is_client_error() { "invalid_request_error" } else { "server_error" };
        json!({"message": self.message(), "type": kind, "param": self.param(), "code": self.code()})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({"error": self.error()}).to_string();
        let mut response = (self.status(), [(header::CONTENT_TYPE, "application/json")], body).into_response();
        if let Self::Overloaded { retry_after_s } | Self::NoWeights { retry_after_s, .. } = self {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after_s));
        }
        response
    }
}
