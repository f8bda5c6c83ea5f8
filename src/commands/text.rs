//! Text of the service, for a terminal.

/// Text of others without characters that a terminal would obey.
pub(super) fn shown(text: &str) -> String {
    let turns_text = |character| matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_obeyed = |character: char| character.is_control() || turns_text(character);
    text.chars().map(|character| if is_obeyed(character) { '\u{fffd}' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(shown("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
    }
}
