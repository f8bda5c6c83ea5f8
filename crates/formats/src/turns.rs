//! Prompts of calls, without what an earlier call has already.

use forebay_wire::Turn;

/// Shortens the prompts of calls that continue the previous call of the same agent to what is new in them. A record
/// repeats the whole history in every prompt, so it grows with the square of the calls; what is posted does not.
///
/// The result is a part of the content of a rollout, so it must stay the same in every version.
pub(crate) fn shorten(turns: &mut [Turn]) {
    // From the end, so that the call before still has its whole prompt.
    for index in (1..turns.len()).rev() {
        let (before, rest) = turns.split_at_mut(index);
        let turn = &mut rest[0];
        let Some((number, previous)) = before.iter_mut().enumerate().rfind(|(_, one)| one.agent == turn.agent) else {
            continue;
        };
        let history = previous.prompt_tokens.len() + previous.tokens.len();
        let continues = turn.prompt_tokens.len() > history
            && turn.prompt_tokens.starts_with(&previous.prompt_tokens)
            && turn.prompt_tokens[previous.prompt_tokens.len()..].starts_with(&previous.tokens);
        if continues {
            let id = previous.id.get_or_insert_with(|| format!("call-{}", number + 1));
            turn.after = Some(id.clone());
            turn.prompt_tokens.drain(..history);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(agent: &str, prompt: &[i32], tokens: &[i32]) -> Turn {
        Turn {
            agent: Some(agent.to_owned()),
            prompt_tokens: prompt.to_vec(),
            tokens: tokens.to_vec(),
            ..Turn::default()
        }
    }

    #[test]
    fn only_what_is_new_in_a_prompt_is_kept() {
        let mut turns = [
            turn("main", &[1], &[2]),
            turn("helper", &[1, 2, 9], &[3]),
            turn("main", &[1, 2, 3], &[4]),
            turn("main", &[1, 2, 3, 4, 5], &[6]),
            turn("main", &[1, 2, 3, 4, 5, 7, 8], &[6]),
        ];
        shorten(&mut turns);
        let shortened: Vec<_> =
            turns.iter().map(|turn| (turn.id.as_deref(), turn.after.as_deref(), &turn.prompt_tokens[..])).collect();
        assert_eq!(
            shortened,
            [
                (Some("call-1"), None, &[1][..]),
                (None, None, &[1, 2, 9]),
                (Some("call-3"), Some("call-1"), &[3]),
                (None, Some("call-3"), &[5]),
                (None, None, &[1, 2, 3, 4, 5, 7, 8]),
            ]
        );
    }
}
