//! The tokens of a part of a segment, with what belongs to each.

use forebay_wire::{Segment, TokenWindow, VersionSpan};

use super::Part;

/// Takes a window out of a segment. A window that begins behind the end is empty. `sent` is the mask as sent.
pub fn take(segment: &Segment, sent: &[u8], part: Part) -> TokenWindow {
    let tokens = segment.tokens.len();
    let from = usize::try_from(part.from).unwrap_or(usize::MAX).min(tokens);
    let to = from.saturating_add(usize::try_from(part.limit).unwrap_or(usize::MAX)).min(tokens);
    let prompt = tokens - sent.len();
    let of_response = Columns { from, to, prompt };
    let floats = |column: &Option<Vec<f32>>| column.as_deref().map(|column| of_response.of(column));
    TokenWindow {
        segment: part.segment,
        from: from as u64,
        to: to as u64,
        prompt_tokens: prompt as u64,
        tokens: segment.tokens[from..to].to_vec(),
        loss_mask: of_response.of(sent),
        trained_mask: of_response.of(&segment.loss_mask),
        logprobs: floats(&segment.logprobs),
        teacher_logprobs: floats(&segment.teacher_logprobs),
        values: floats(&segment.values),
        advantages: floats(&segment.advantages),
        versions: segment.versions.as_deref().map(|spans| of_response.spans(spans)),
    }
}

/// Takes the entries of a window out of columns that only the response has.
struct Columns {
    from: usize,
    to: usize,
    prompt: usize,
}

impl Columns {
    /// The entries of a column; none for prompt tokens.
    fn of<T: Copy>(&self, column: &[T]) -> Vec<Option<T>> {
        (self.from..self.to).map(|token| column.get(token.checked_sub(self.prompt)?).copied()).collect()
    }

    /// The spans with a token in the window.
    fn spans(&self, spans: &[VersionSpan]) -> Vec<VersionSpan> {
        let (from, to) = (self.from.saturating_sub(self.prompt) as i64, self.to.saturating_sub(self.prompt) as i64);
        let meets = |span: &&VersionSpan| span.1 < to && span.1.saturating_add(span.2) > from;
        spans.iter().filter(meets).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(from: u64, limit: u64) -> Part {
        Part { segment: 0, from, limit, messages_from: 0, messages_limit: 0 }
    }

    /// Three prompt tokens and five response tokens; the last three are of another version and masked as stale.
    fn segment() -> Segment {
        Segment {
            tokens: (10..18).collect(),
            loss_mask: vec![1, 0, 0, 0, 0],
            logprobs: Some(vec![-1.0, -2.0, -3.0, -4.0, -5.0]),
            versions: Some(vec![VersionSpan(7, 0, 2), VersionSpan(3, 2, 3)]),
            ..Segment::default()
        }
    }

    #[test]
    fn a_window_over_the_end_of_the_prompt_has_nulls_for_prompt_tokens() {
        let found = take(&segment(), &[1, 0, 1, 1, 1], part(2, 3));
        assert_eq!((found.from, found.to, found.prompt_tokens), (2, 5, 3));
        assert_eq!(found.tokens, [12, 13, 14]);
        assert_eq!(found.loss_mask, [None, Some(1), Some(0)]);
        assert_eq!(found.trained_mask, [None, Some(1), Some(0)]);
        assert_eq!(found.logprobs, Some(vec![None, Some(-1.0), Some(-2.0)]));
        assert_eq!(found.values, None);
        assert_eq!(found.versions, Some(vec![VersionSpan(7, 0, 2)]));
    }

    #[test]
    fn the_mask_as_sent_and_as_delivered_differ_where_tokens_are_stale() {
        let found = take(&segment(), &[1, 0, 1, 1, 1], part(4, 100));
        assert_eq!((found.from, found.to), (4, 8));
        assert_eq!(found.loss_mask, [Some(0), Some(1), Some(1), Some(1)]);
        assert_eq!(found.trained_mask, [Some(0); 4]);
        assert_eq!(found.versions, Some(vec![VersionSpan(7, 0, 2), VersionSpan(3, 2, 3)]));
    }

    #[test]
    fn a_window_behind_the_end_is_empty() {
        for (from, limit) in [(8, 5), (u64::MAX, u64::MAX), (3, 0)] {
            let found = take(&segment(), &[1, 0, 1, 1, 1], part(from, limit));
            assert_eq!(found.from, found.to);
            assert!(found.tokens.is_empty() && found.versions == Some(Vec::new()), "{from} {limit}");
        }
    }
}
