//! The conversation that the rollout of a session is kept with: the messages of its last trained call, and the answer.
//!
//! Nothing is trained on it. It lets people, judges and exports read what was said. A session in which several
//! conversations were held, such as those of sub-agents, has the one that ended last; the others are in its calls.

use std::{mem, sync::Arc};

use forebay_bounds::work;
use forebay_domain::{formats::canonical::check_json, ids::SessionPk, session::CallTexts, warnings::Warning};
use forebay_store::error::StoreError;
use serde_json::value::RawValue;

use crate::{
    Buffer,
    conversations::Conversations,
    session::texts::{self, CallText, TEXTS_PAGE, unpacked},
};

/// The most bytes of requests and answers that a conversation is made from. A conversation that fills a context of a
/// million tokens has about half of this. What is read takes this much memory in each session that is being finished.
const CONVERSATION_BYTES_MAX: usize = 8 << 20;

/// The conversation that ended with the call `last`, as a JSON array: none if nothing here reads messages, and a warning if
/// it cannot be kept.
pub(super) async fn of_call(
    buffer: &Buffer,
    session: SessionPk,
    last: u32,
) -> Result<Result<Option<Box<RawValue>>, Warning>, StoreError> {
    let conversations = Arc::clone(&buffer.conversations);
    let mut walk = Walk { conversations, session, next: Some(last), calls: Vec::new(), bytes: 0 };
    while let Some(next) = walk.next {
        let page = texts::page(buffer, session, next.saturating_sub(TEXTS_PAGE)).await?;
        walk = work::on_thread(move || walk.through(&page)).await.map_err(|_| StoreError::Closed)??;
        if walk.bytes > CONVERSATION_BYTES_MAX {
            return Ok(Err(left_out(&format!("takes more than {CONVERSATION_BYTES_MAX} bytes"))));
        }
    }
    work::on_thread(move || walk.messages()).await.map_err(|_| StoreError::Closed)
}

fn left_out(why: &str) -> Warning {
    Warning::new("messages-left-out", format!("the conversation {why} and was not kept"))
}

/// The way from the last call of a conversation to its first.
struct Walk {
    conversations: Arc<dyn Conversations>,
    session: SessionPk,
    next: Option<u32>,
    /// From the last to the first.
    calls: Vec<CallText>,
    bytes: usize,
}

impl Walk {
    /// Goes on through a page that has the next call, until it needs one that is before the page, or has too many bytes.
    fn through(mut self, page: &[CallTexts]) -> Result<Self, StoreError> {
        let begin = page.first().map_or(0, |texts| texts.seq);
        while let Some(seq) = self.next.filter(|seq| *seq >= begin)
            && self.bytes <= CONVERSATION_BYTES_MAX
        {
            let index = page.binary_search_by_key(&seq, |texts| texts.seq);
            let missing = |_| StoreError::Corrupt(format!("call {seq} of session {} is not there", self.session));
            let index = index.map_err(missing)?;
            let unpack = |packed: &[u8]| unpacked(packed, seq, self.session);
            let call = CallText { request: unpack(&page[index].request)?, response: unpack(&page[index].response)? };
            self.bytes += call.request.len() + call.response.len();
            self.next = self.conversations.follows(&call.request).filter(|before| *before < seq);
            self.calls.push(call);
        }
        Ok(self)
    }

    fn messages(mut self) -> Result<Option<Box<RawValue>>, Warning> {
        let mut calls = mem::take(&mut self.calls);
        calls.reverse();
        let Some(messages) = self.conversations.messages(&calls) else { return Ok(None) };
        // What is no text was not checked when the call was recorded, and must not make the finish fail.
        check_json(&messages).map_err(|_| left_out("is nested too deeply"))?;
        Ok(Some(messages))
    }
}

#[cfg(test)]
mod tests {
    use forebay_domain::{formats::call::pack_text, ids::PolicyName};

    use super::*;
    use crate::conversations::{Conversation, NoConversations};

    /// Requests are the numbers of the calls that they follow.
    struct Numbers;

    impl Conversations for Numbers {
        fn begin(&self) -> Box<dyn Conversation> {
            Box::new(NoConversations)
        }

        fn text(&self, _policy: &PolicyName, _ids: &[i32]) -> Option<String> {
            None
        }

        fn follows(&self, request: &str) -> Option<u32> {
            request.trim().parse().ok()
        }

        fn messages(&self, calls: &[CallText]) -> Option<Box<RawValue>> {
            let answers: Vec<&str> = calls.iter().map(|call| call.response.as_str()).collect();
            serde_json::value::to_raw_value(&answers).ok()
        }
    }

    fn page(calls: impl IntoIterator<Item = (u32, String, String)>) -> Vec<CallTexts> {
        let texts = |(seq, request, response): (u32, String, String)| CallTexts {
            seq,
            request: pack_text(&request),
            response: pack_text(&response),
        };
        calls.into_iter().map(texts).collect()
    }

    fn from(last: u32) -> Walk {
        let session = SessionPk(1);
        Walk { conversations: Arc::new(Numbers), session, next: Some(last), calls: Vec::new(), bytes: 0 }
    }

    #[test]
    fn a_conversation_goes_through_the_pages_from_its_last_call_to_its_first() {
        let call = |seq: u32, follows: &str| (seq, follows.to_owned(), format!("answer {seq}"));
        let walk = from(5).through(&page([call(3, "1"), call(4, ""), call(5, "3")])).expect("nothing is damaged");
        assert_eq!(walk.next, Some(1), "the call is on an earlier page");
        let walk = walk.through(&page([call(1, ""), call(2, "1")])).expect("nothing is damaged");
        assert_eq!(walk.next, None);
        let messages = walk.messages().expect("nothing is left out").expect("they are read");
        assert_eq!(messages.get(), r#"["answer 1","answer 3","answer 5"]"#);
    }

    #[test]
    fn damaged_records_end_the_walk() {
        let circle = page([(1, "2".to_owned(), String::new()), (2, "1".to_owned(), String::new())]);
        assert_eq!(from(2).through(&circle).expect("it ends").calls.len(), 2);
        assert!(
            from(2).through(&page([(1, String::new(), String::new()), (3, String::new(), String::new())])).is_err()
        );
    }

    #[test]
    fn a_conversation_that_is_too_long_is_not_read_to_its_beginning() {
        let long = "x".repeat(CONVERSATION_BYTES_MAX / 2 + 1);
        let calls = page((1..=4).map(|seq: u32| (seq, (seq - 1).to_string(), long.clone())));
        let walk = from(4).through(&calls).expect("nothing is damaged");
        assert_eq!((walk.calls.len(), walk.bytes > CONVERSATION_BYTES_MAX), (2, true));
    }
}
