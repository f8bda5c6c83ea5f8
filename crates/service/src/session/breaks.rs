//! Why prompts do not continue the calls that they should have continued.
//!
//! Where a prompt breaks follows from the ids of the calls (`assemble::breaks`). The cause follows from their messages,
//! which are read only if there is a break.
//!
//! The buffer does not understand messages: it hands the stored requests and answers to
//! [`conversations`](crate::conversations), in pages. The messages of a call that both sides of the break continue are
//! passed over, because their ids are the same.

use std::{collections::HashMap, sync::Arc};

use forebay_bounds::work;
use forebay_domain::{
    formats::call::unpack_text,
    ids::{PolicyName, SessionPk},
    session::CallTexts,
};
use forebay_store::error::StoreError;

use crate::{
    Buffer,
    conversations::Conversation,
    session::{calls::SessionCalls, texts},
};

/// The cause of a break if the messages are not known, because the conversation has more messages than are compared.
const UNKNOWN: &str = "unknown";

/// A call that does not continue the call that it should have continued, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallBreak {
    pub(super) policy: PolicyName,
    pub(super) call: u32,
    pub(super) nearest: u32,
    /// The call that both continue, if there is one.
    pub(super) after: Option<u32>,
}

type OfPolicies = HashMap<PolicyName, Box<dyn Conversation>>;

/// The causes of breaks, in the order of the breaks. The texts of the calls are read in pages and forgotten; what is kept
/// of a conversation has a bound of its own.
pub(super) async fn causes(
    buffer: &Buffer,
    session: SessionPk,
    calls: &Arc<SessionCalls>,
    breaks: &[CallBreak],
) -> Result<Vec<&'static str>, StoreError> {
    let Some(last) = breaks.iter().map(|found| found.call.max(found.nearest)).max() else { return Ok(Vec::new()) };
    let begin = |found: &CallBreak| (found.policy.clone(), buffer.conversations.begin());
    let mut conversations: OfPolicies = breaks.iter().map(begin).collect();
    let mut after = 0;
    while after < last {
        let page = texts::page(buffer, session, after).await?;
        let Some(end) = page.last().map(|texts| texts.seq) else { break };
        let calls = Arc::clone(calls);
        let adding = work::on_thread(move || {
            for texts in &page {
                add(&mut conversations, &calls, texts, session);
            }
            conversations
        });
        conversations = adding.await.map_err(|_| StoreError::Closed)?;
        after = end;
    }
    let cause = |found: &CallBreak| {
        let of_policy = conversations.get(&found.policy);
        of_policy.and_then(|calls| calls.cause(found.nearest, found.call, found.after)).unwrap_or(UNKNOWN)
    };
    Ok(breaks.iter().map(cause).collect())
}

fn add(conversations: &mut OfPolicies, calls: &SessionCalls, texts: &CallTexts, session: SessionPk) {
    let conversation = calls.call(texts.seq).and_then(|call| conversations.get_mut(&call.policy));
    let Some(conversation) = conversation else { return };
    match (unpack_text(&texts.request), unpack_text(&texts.response)) {
        (Ok(request), Ok(response)) => conversation.add(texts.seq, &request, &response),
        // A session can be finished without knowing why its prompts break.
        (Err(damage), _) | (_, Err(damage)) => {
            tracing::error!(error = %damage, call.seq = texts.seq, session.pk = %session, "the texts of a call are damaged");
        }
    }
}
