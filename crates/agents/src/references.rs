//! Answers and conversations that a call names by their ids. The session has recorded them.

use forebay_bounds::budget::Shares;
use forebay_bounds::work;
use forebay_gateway::{
    Dialect, DialectError,
    canonical::Record,
    dialect::{References, message_of, not_found, response_id},
    request::Message,
    system::without_instructions,
};
use forebay_service::session::{
    record::CallPermit,
    texts::{CallText, TextPage},
};

use crate::{Agents, body, histories::Holds, refusal, stored::StoredAnswer};

/// Finds what a request names. Each call is read once, and what is read takes bytes of the budget.
pub(crate) async fn resolve(
    agents: &Agents,
    permit: &CallPermit,
    references: &mut References,
    shares: &mut Shares,
) -> Result<(), DialectError> {
    let mut reader = Reader { agents, permit, shares, page: TextPage::default() };
    let conversation = match references.wanted_conversation() {
        Some(id) => {
            let named = format!("resp_{id}");
            Some((reader.number(id, &named).await?, named))
        }
        None => None,
    };
    let mut answers = Vec::new();
    for (id, item) in references.wanted() {
        answers.push((reader.number(id, item).await?, id.to_owned()));
    }
    // Pages are read from the end of the session.
    answers.sort_unstable_by(|left, right| right.cmp(left));
    for (seq, id) in answers {
        let text = reader.text(seq).await?;
        let bytes = text.response.len();
        let answer = work::run(bytes, || stored(&text.response).map(|stored| stored.completion.into_owned())).await?;
        references.found(&id, answer.message, bytes);
    }
    if let Some((seq, named)) = conversation {
        let (messages, bytes) = reader.conversation(seq, &named).await?;
        references.found_conversation(messages, bytes);
    }
    Ok(())
}

/// The body of a response that was recorded.
pub(crate) async fn response(agents: &Agents, permit: &CallPermit, response: &str) -> Result<Vec<u8>, DialectError> {
    let mut reader = Reader { agents, permit, shares: &mut Shares::default(), page: TextPage::default() };
    let id = response_id(response).ok_or_else(|| not_found(response))?;
    let seq = reader.number(id, response).await?;
    let text = reader.text(seq).await?.response;
    work::run(text.len(), || stored(&text).map(|stored| stored.written(Dialect::Responses))).await
}

/// Reads calls of a session.
struct Reader<'a> {
    agents: &'a Agents,
    permit: &'a CallPermit,
    shares: &'a mut Shares,
    page: TextPage,
}

impl Reader<'_> {
    /// The number of the call with this answer, which the request names like this.
    async fn number(&mut self, id: &str, named: &str) -> Result<u32, DialectError> {
        let history = self.agents.histories().of(self.permit.session_id());
        let mut history = history.lock().await;
        let holds = if self.agents.upstreams().render_prompts() { Holds::Ids } else { Holds::Messages };
        history.catch_up(self.agents.buffer(), self.permit, holds).await.map_err(refusal::of)?;
        history.call_of(id).ok_or_else(|| not_found(named))
    }

    async fn text(&mut self, seq: u32) -> Result<CallText, DialectError> {
        let text = self.agents.buffer().recorded_text(self.permit, seq, &mut self.page).await.map_err(refusal::of)?;
        let text = text.ok_or(DialectError::Internal)?;
        let bytes = text.response.len() + text.request.len();
        body::pay_more(self.agents, self.permit.session_id(), self.shares, bytes).await?;
        Ok(text)
    }

    /// The messages of a call and its answer, without instructions, and the bytes that they were read from. A call is
    /// stored as what it adds to an earlier one.
    async fn conversation(&mut self, seq: u32, named: &str) -> Result<(Vec<Message>, usize), DialectError> {
        let (mut calls, mut next, mut bytes) = (Vec::new(), Some(seq), 0);
        // Those of the named call. Earlier calls had instructions of their own.
        let mut instructions = None;
        while let Some(seq) = next {
            let CallText { request, response } = self.text(seq).await?;
            let length = request.len() + response.len();
            let read = || {
                let answer = stored(&response)?;
                let instructions = answer.instructions;
                let record = Record::from_json(&request).map_err(damaged)?;
                Ok::<_, DialectError>((record, answer.completion.into_owned().message, instructions))
            };
            let (record, answer, of_call) = work::run(length, read).await?;
            instructions = instructions.or(Some(of_call));
            next = record.after().filter(|after| *after < seq);
            bytes += length;
            calls.push((record, answer));
        }
        let restore = || {
            calls.into_iter().rev().try_fold(Vec::new(), |before, (record, answer)| {
                let mut messages = record.messages(before)?;
                messages.push(message_of(answer));
                Some(messages)
            })
        };
        let mut messages = work::run(bytes, restore).await.ok_or_else(|| not_found(named))?;
        without_instructions(&mut messages, instructions.unwrap_or_default());
        Ok((messages, bytes))
    }
}

fn stored(response: &str) -> Result<StoredAnswer<'_>, DialectError> {
    serde_json::from_str(response).map_err(damaged)
}

#[expect(clippy::needless_pass_by_value, reason = "it is called by map_err")]
fn damaged(error: serde_json::Error) -> DialectError {
    tracing::error!(error = %error, "a stored call cannot be read");
    DialectError::Internal
}
