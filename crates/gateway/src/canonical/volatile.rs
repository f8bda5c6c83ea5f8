//! What the results of tools tell anew each time: how long something took, when it was, and ids that were made for it.
//!
//! An agent that is started again in a fresh sandbox runs its commands again, and the test that took 0.03 s takes 0.04 s.
//! That is no reason to sample all answers behind it again. What was recorded wins: in the mode `exact` the model goes on
//! reading the 0.03 s that its answer was sampled behind.

use std::{borrow::Cow, sync::LazyLock};

use regex::Regex;

/// What is compared in the place of each of them.
const MARK: &str = "\u{0}";

/// Numbers that are a time only by chance, as in `calc.py:10:20`, must stay. So a time has seconds, or a date before it.
const PATTERN: &str = r"(?x)
    (?-u:\b) (?:
        # 2026-11-30T15:39:24.123Z, 2026-11-30 15:39
        [0-9]{4}-[0-9]{2}-[0-9]{2}[T\ ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(?:Z|\ ?[+-][0-9]{2}:?[0-9]{2})?
        # Nov 30 15:39, as `ls -l` has it
        | (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\ [\ 0-9][0-9]\ [0-9]{2}:[0-9]{2}(?::[0-9]{2})?
        # 15:39:24
        | [0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?
        # 0.03s, 12 ms, 0m0.045s, 1.5 seconds
        | (?:[0-9]+m\ ?)?[0-9]+(?:\.[0-9]+)?\ ?(?:ns|us|µs|ms|s|secs?|seconds?|milliseconds?)
        # 7f3c0a52-93de-4c55-a0b6-1f1de7c5d5f3
        | [0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}
        # 0x7f1b2c3d4e50
        | 0x[0-9a-f]{8,16}
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
            ("-rw-r--r-- 1 a a 32 Nov 30 15:59 calc.py", "-rw-r--r-- 1 a a 32 Dec  1 09:01 calc.py"),
            ("[2026-11-30T15:39:24.123Z] ready", "[2026-12-01 07:00:00] ready"),
            ("15:39:24 up", "07:00:01 up"),
            ("<Pool object at 0x7f1b2c3d4e50>", "<Pool object at 0x7f1b2c3d0000>"),
            ("run 7f3c0a52-93de-4c55-a0b6-1f1de7c5d5f3", "run 00000000-93de-4c55-a0b6-1f1de7c5d5f4"),
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
            "12 sections, 5 sets, 0x1f, v1.2.3s4",
            "commit 81a864dd",
        ];
        for text in kept {
            assert_eq!(without_volatile(text), text);
        }
    }
}
