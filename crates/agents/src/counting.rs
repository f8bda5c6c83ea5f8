//! The number of tokens of a prompt, for agents that ask before they call.

use std::sync::Arc;

use axum::http::HeaderMap;
use forebay_bounds::work;
use forebay_gateway::{Dialect, DialectError, canonical::Canonical, lineage::AgentLabel};
use forebay_service::session::record::CallPermit;

use crate::{
    Agents, blocking,
    body::{self, ReadBody},
    call::{self, Purpose},
};

/// The tokens of the prompt that a call with this body would have now. `None` if only the engine could say it: in the
/// mode observe, and for a body that cannot be rendered.
pub(crate) async fn prompt_tokens(
    agents: &Agents,
    permit: &CallPermit,
    headers: &HeaderMap,
    body: &ReadBody,
) -> Option<u64> {
    if !agents.upstreams().render_prompts() {
        return None;
    }
    match rendered(agents, permit, headers, body).await {
        Ok(tokens) => tokens,
        Err(error) => {
            tracing::debug!(error = %error, "the tokens of a prompt are estimated");
            None
        }
    }
}

async fn rendered(
    agents: &Agents,
    permit: &CallPermit,
    headers: &HeaderMap,
    body: &ReadBody,
) -> Result<Option<u64>, DialectError> {
    let length = body.bytes.len();
    let request = work::run(length, || Dialect::Messages.parse(&body.bytes)?.recorded()).await?;
    let request = agents.upstreams().adapted(permit, request).await?;
    let canonical = work::run(length, || Canonical::of(&request)).await;
    // The call will come from the same worker.
    let canonical = canonical.sent_by(AgentLabel::of(headers).as_ref().map(AgentLabel::as_str), false);
    let canonical = canonical.in_attempt(permit.attempt());
    let Ok(policy) = permit.policy(&request.model) else { return Ok(None) };
    let route = agents.upstreams().of_call(&request.model, policy);
    let Some(exact) = route.ok().and_then(|route| route.exact.as_ref().map(Arc::clone)) else { return Ok(None) };
    let continued = match policy {
        Some(policy) => call::continued(agents, permit, policy, &canonical, Purpose::Count).await?.continued,
        None => None,
    };
    // A prompt that is too long is counted, too, so that the agent knows how much to leave out.
    let (clock_s, tokens_max) = (permit.opened_at().unix_s() as i64, permit.tokens_max() as usize);
    let memory = body::work_memory(agents, body.shares.bytes());
    let render =
        move |cancellation: &_| exact.prompt(&request, clock_s, continued.as_ref(), tokens_max, cancellation, &memory);
    Ok(blocking::run(render).await?.map(|(ids, _)| ids.len() as u64))
}
