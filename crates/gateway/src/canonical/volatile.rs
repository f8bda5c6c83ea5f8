//! What the results of tools tell anew each time that they run: how long something took.
//!
//! An agent that is started again in a fresh sandbox runs its commands again, and the test that took 0.03 s takes 0.04 s.
//! That is no reason to sample all answers behind it again. What was recorded wins: in the mode `exact` the model goes on
//! reading the 0.03 s that its answer was sampled behind.
//!
//! Ids, addresses and dates are new each time as well, but an answer may use them: the next call asks for the job with that
//! id. So they count.

use std::{borrow::Cow, sync::LazyLock};

use regex::Regex;

/// What is compared in the place of each of them.
const MARK: &str = "\u{0}";

/// `12 s` may be the size of a file, and `30s` a bound: durations that were measured have a fraction, or milliseconds.
const PATTERN: &str = r"(?x)
    (?-u:\b) (?:
        # 0.03s, 1.5 seconds, 0m0.045s
        (?:[0-9]+m\ ?)?[0-9]+\.[0-9]+\ ?(?:s|secs?|seconds?)
        # 12ms, 0.4 µs
        | [0-9]+(?:\.[0-9]+)?\ ?(?:ms|µs)
        # Of Codex, for each command
        | Chunk\ ID:\ [0-9a-f]+
    ) (?-u:\b)";

static VOLATILE: LazyLock<Regex> = LazyLock::new(|| Regex::new(PATTERN).expect("the pattern is tested"));

/// The text of a result with a mark in the place of each such part.
pub(super) fn without_volatile(text: &str) -> Cow<'_, str> {
    VOLATILE.replace_all(text, MARK)
}

#[cfg(test)]
mod tests {
    use super::without_volatile;

    #[test]
    fn what_is_new_each_time_is_left_out_and_other_numbers_are_not() {
        let same = [
            (
                "Chunk ID: 7b36e1\nWall time: 0.0000 seconds\nExit 0",
                "Chunk ID: 41d4e4\nWall time: 0.1001 seconds\nExit 0",
            ),
            ("== 3 passed in 0.03s ==", "== 3 passed in 12.41s =="),
            ("Ran 1 test in 0.001s\n\nOK", "Ran 1 test in 0.000s\n\nOK"),
            ("real\t0m0.045s", "real\t1m3.100s"),
            ("took 12 ms, then 4µs", "took 9ms, then 11 µs"),
        ];
        for (one, other) in same {
            assert_eq!(without_volatile(one), without_volatile(other));
            assert_ne!(without_volatile(one), one);
        }
        let kept = [
            "3 passed, 2 failed",
            "calc.py:10:20: error",
            "def add(a, b):\n    return a - b\n",
            "2026-11-30,41.5",
            "12 sections, 5 sets, v1.2.3s4, 90 s.py, 3 us-east-1, 1980s",
            "timed out after 120s",
            "job 7f3c0a52-93de-4c55-a0b6-1f1de7c5d5f3 at 0x80070005, free from 2026-12-03 14:00:10",
            "commit 81a864dd",
        ];
        for text in kept {
            assert_eq!(without_volatile(text), text);
        }
    }
}
